"""What may be cut of a model, and what the result has to be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from recoup.channels.patterns import Choice
from recoup.config import require_choice, require_flag


@dataclass(frozen=True, slots=True)
class Terms:
    """What the caller asks of a structure, besides the model and a batch.

    keep_class: lock what the model's own class cannot hold at another size; None leaves it to the goal.
    keep_config: lock what the model's config could not tell, too.
    streams: let normalisations over channels lose some of them.
    untie: give a layer whose weight is a table of embeddings too a weight of its own.
    choice: groups and modules that may be pruned, or may not.
    """

    keep_class: bool | None
    keep_config: bool
    streams: bool
    untie: bool
    choice: Choice

    @classmethod
    def of(
        cls,
        *,
        keep_class: bool | None,
        keep_config: bool,
        streams: bool,
        untie: bool,
        only: Iterable[str],
        exclude: Iterable[str],
    ) -> Terms:
        """Terms that were looked at.

        Raises:
            UsageError: one of them is of another kind.
        """
        require_choice("keep_class", keep_class)
        require_flag("keep_config", keep_config)
        require_flag("streams", streams)
        return cls(keep_class, keep_config, streams, untie, Choice.of(only, exclude))
