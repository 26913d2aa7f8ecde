"""Along which dim of a value its channels lie, and so what remains of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The shape of a value for one sample; index i along `dim` belongs to channel `channel_of[i]` (-1: it stays).

    `dim` is None for a value without channels. `is_box` is false where channels lie along several dims, so that
    what remains is no rectangle; such a value is only ever carried on. `value` is there for stored indices.
    """

    shape: tuple[int, ...]
    dim: int | None
    channel_of: Tensor | None
    is_box: bool = True
    value: Tensor | None = None

    def kept(self, keep: Tensor) -> Tensor | None:
        """Indices along `dim` that remain, or None if all do."""
        if self.dim is None or self.channel_of is None:
            return None
        mask = (self.channel_of < 0) | keep[self.channel_of.clamp(min=0)]
        return None if bool(mask.all()) else mask.nonzero().squeeze(1)

    def shape_of(self, keep: Tensor) -> tuple[int, ...]:
        """The shape of what remains."""
        kept = self.kept(keep)
        return (
            self.shape if kept is None else tuple(len(kept) if d == self.dim else n for d, n in enumerate(self.shape))
        )
