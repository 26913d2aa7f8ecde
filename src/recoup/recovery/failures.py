"""A step of a recovery that fails ends alone: what was there before it is kept, and a warning says so."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from recoup.errors import RecoupWarning


@contextmanager
def surviving(step: str, layer: str) -> Iterator[None]:
    """Whatever is raised inside ends the step, not the run: a warning names the step, the layer and the error."""
    try:
        yield
    except NotImplementedError:  # an operation without a derivative: nothing that a user could mend
        return
    except Exception as error:  # a kernel that refuses a layout, a matrix that is singular, memory that runs out
        reason = (str(error).strip().splitlines() or ["no message"])[0][:200]
        warnings.warn(
            f"{step} of {layer} failed and is left out ({type(error).__name__}: {reason}). The result is the one "
            "before that step; please report the network.",
            RecoupWarning,
            stacklevel=3,
        )
