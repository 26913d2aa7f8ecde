"""The templates of the page and of the drawing, and the function that fills them."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def render(name: str, **values: object) -> str:
    """The template `name` filled with `values`; text is escaped, a value that is missing raises."""
    return _ENVIRONMENT.get_template(name).render(values)


def _pixels(length: float) -> str:
    return f"{length:.1f}"


def _printable(value: object) -> object:
    """Text without control characters: XML does not have them, and a terminal would obey them."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "".join(character for character in value if character.isprintable() or character == "\n")


_ENVIRONMENT = Environment(
    loader=PackageLoader("recoup.report"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_printable,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters["formatted"] = format
_ENVIRONMENT.filters["px"] = _pixels
