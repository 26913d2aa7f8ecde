"""A report from the plain data that it was saved as."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from recoup.report.content import Report


def report_from_json(data: Mapping[str, Any]) -> Report:
    """The report that `Report.to_json` made this of; figures that follow from others are left out.

    Raises:
        KeyError, TypeError, ValueError: a field is missing, or of another form.
    """
    report = _rebuilt(Report, data)
    assert isinstance(report, Report)
    return report


def _rebuilt(kind: Any, value: Any) -> Any:
    """A value of this type from plain data: a dataclass from a dict of its fields, a tuple from a list."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        inner = [part for part in parts if part is not type(None)]
        return None if value is None else _rebuilt(inner[0], value)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        fields = {f.name: f for f in dataclasses.fields(kind)}
        missing = [name for name, f in fields.items() if name not in value and not _has_default(f)]
        if missing:
            raise KeyError(missing[0])
        return kind(**{name: _rebuilt(hints[name], value[name]) for name in fields if name in value})
    if origin is tuple:
        return tuple(_rebuilt(parts[0], part) for part in value)
    if origin is not None and issubclass(origin, Mapping):
        return {str(name): _rebuilt(parts[1], part) for name, part in value.items()}
    if kind in (int, float, str) and not isinstance(value, (int, float) if kind is float else kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
