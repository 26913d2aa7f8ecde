"""A few of the calibration images, kept while they pass, for selectors that look at feature maps."""

from __future__ import annotations

from recoup.inputs.batches import Inputs

# Images that are kept, and the bytes that they may take on the device.
MOST_IMAGES = 256
MOST_BYTES = 256 << 20


class KeptImages:
    """Takes the first images of every batch, so many that all batches together give `MOST_IMAGES`.

    Data may be sorted by class: the first images of all batches show more than all images of the first. Where nobody
    knows how many batches there are, the first batches are taken whole.
    """

    def __init__(self, batches: int | None) -> None:
        self._share = MOST_IMAGES if batches is None else -(-MOST_IMAGES // max(1, batches))
        self._kept: list[Inputs] = []
        self._count = self._bytes = 0

    @property
    def images(self) -> tuple[Inputs, ...]:
        """What was kept, in pieces."""
        return tuple(self._kept)

    def see(self, inputs: Inputs) -> None:
        """Take what there is room for: one image of the first batch in any case."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in inputs.tensors()) / inputs.size
        room = int((MOST_BYTES - self._bytes) // max(1, size))
        count = min(self._share, inputs.size, MOST_IMAGES - self._count, max(room, 0 if self._kept else 1))
        if count > 0:
            self._kept.append(inputs.first(count).copy())  # a view would keep the whole batch
            self._count += count
            self._bytes += int(size * count)
