"""Numbers in modules and configs that count channels, and so follow a cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Number:
    """A setting with the `value` of a whole model, which is in proportion to how many channels a group keeps.

    One that is `fixed` has that value in any smaller model.
    """

    setting: str
    value: int
    group: str
    fixed: bool = False

    def after(self, kept: int, width: int) -> int:
        """Its value in a model that keeps so many of the group's channels."""
        return self.value if self.fixed else self.value * kept // width


def settings_after(numbers: Iterable[Number], masks: Mapping[str, Tensor]) -> dict[str, int]:
    """The settings that a cut changes, given what it keeps of every group."""
    cut = [(number, masks[number.group]) for number in numbers if not bool(masks[number.group].all())]
    return {number.setting: number.after(int(mask.sum()), len(mask)) for number, mask in cut}
