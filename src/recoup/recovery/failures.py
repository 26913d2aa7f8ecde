"""A step of a recovery that fails ends alone: what was there before it is kept, and a warning says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from recoup.errors import RecoupError, ResourceError, warn


@contextmanager
def surviving(step: str, layer: str, *, needs_derivative: bool = False) -> Iterator[None]:
    """What torch or a solver raises inside ends the step, not the run: a warning names the step, layer and error.

    Where a step `needs_derivative`, an operation without one ends it silently: there is nothing to mend.
    """
    try:
        yield
    except ResourceError:  # the next step would have no more room than this one
        raise
    except (RuntimeError, RecoupError) as error:  # a kernel that refuses a layout, a singular matrix, no memory left
        if needs_derivative and isinstance(error, NotImplementedError):
            return
        reason = (str(error).strip().splitlines() or ["no message"])[0][:200]
        warn(
            f"{step} of {layer} failed and is left out ({type(error).__name__}: {reason}). The result is the one "
            "before that step; please report the network."
        )
