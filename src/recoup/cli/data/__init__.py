"""Images by name: CIFAR, folders, handwritten digits, noise, or the user's own batches."""

from recoup.cli.data.batches import Batch, Data, reshuffled
from recoup.cli.data.registry import open_data

__all__ = ["Batch", "Data", "open_data", "reshuffled"]
