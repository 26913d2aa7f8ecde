"""Python objects named on the command line: `package.module:factory` and `path/file.py:factory`.

Models and data share this one place. A name that leads nowhere is a `UsageError`; code that is found but raises is
reported with its cause, as the kind of error the caller asks for.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from recoup.errors import RecoupError, UsageError


def import_attribute(spec: str) -> object:
    """The object that `package.module:name` or `path/file.py:name` stands for.

    Modules are looked for in the working folder too; a file may import its neighbours.

    >>> import_attribute("math:tau")
    6.283185307179586

    Raises:
        UsageError: the text has no such form, or the module, file or name does not exist.
        RecoupError: the module exists but raises while it is imported.
    """
    target = _parse(spec)
    with _importable_from(target.folder):
        module = _load_file(target) if target.is_file else _load_module(target)
    try:
        return getattr(module, target.name)
    except AttributeError:
        raise UsageError(
            f"'{spec}': '{target.module}' was imported but has no attribute '{target.name}'. "
            "Check the spelling after the colon."
        ) from None


def call_factory(spec: str, failure: type[RecoupError]) -> object:
    """What the argument-free callable named by `spec` returns; if it raises, a `failure` that carries the cause."""
    factory = import_attribute(spec)
    if not callable(factory):
        raise UsageError(
            f"'{spec}' is a {type(factory).__name__}, not a callable. Name a function that takes no arguments."
        )
    with _importable_from(_parse(spec).folder):
        try:
            return factory()
        except RecoupError:
            raise
        except Exception as error:  # the user's own code may raise anything
            raise failure(
                f"'{spec}' raised {_describe(error)} when it was called without arguments. "
                "Run it on its own in Python to find the cause."
            ) from error


def import_library(name: str, install: str, failure: type[RecoupError]) -> ModuleType:
    """An optional library as a module, or a `failure` that says what to `pip install`."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if _is_part_of(error.name, name):
            raise failure(f"This needs '{name}', which is not installed. Run: pip install '{install}'") from error
        raise failure(_broken(name, install, error)) from error
    except Exception as error:  # a broken binary library raises whatever its loader does
        raise failure(_broken(name, install, error)) from error


@dataclass(frozen=True, slots=True)
class _Target:
    """A parsed spec: a dotted module or a file, and the attribute wanted from it."""

    spec: str
    module: str
    name: str

    @property
    def is_file(self) -> bool:
        return self.module.endswith(".py")

    @property
    def folder(self) -> Path:
        return Path(self.module).resolve().parent if self.is_file else Path.cwd()


def _parse(spec: str) -> _Target:
    module, colon, name = spec.rpartition(":")
    if not colon or not module or not name:
        raise UsageError(
            f"'{spec}' does not name a Python object. Write package.module:factory or path/file.py:factory."
        )
    return _Target(spec, module, name)


@contextmanager
def _importable_from(folder: Path) -> Iterator[None]:
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        # The imported code may have changed the path itself: take back our entry, wherever it is now.
        if entry in sys.path:
            sys.path.remove(entry)


def _load_file(target: _Target) -> ModuleType:
    path = Path(target.module)
    if not path.is_file():
        raise UsageError(f"'{target.spec}': there is no file '{path}'. Check the path before the colon.")
    # Named by its full path, so that two files called model.py do not replace each other.
    name = f"recoup_file_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}_{path.stem}"
    description = importlib.util.spec_from_file_location(name, path)
    assert description is not None and description.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(description)
    sys.modules[name] = module  # dataclasses and pickling look their module up by name
    try:
        description.loader.exec_module(module)
    except Exception as error:  # the user's own code may raise anything
        del sys.modules[name]
        raise _raised_on_import(target, error) from error
    return module


def _load_module(target: _Target) -> ModuleType:
    try:
        return importlib.import_module(target.module)
    except ModuleNotFoundError as error:
        if not _is_part_of(error.name, target.module):
            raise _raised_on_import(target, error) from error
        raise UsageError(
            f"'{target.spec}': there is no module '{target.module}' here or among the installed packages. Check the "
            "spelling, run from the folder that holds it, or name the file as path/file.py:factory."
        ) from error
    except Exception as error:  # the user's own code may raise anything
        raise _raised_on_import(target, error) from error


def _raised_on_import(target: _Target, error: Exception) -> RecoupError:
    return RecoupError(
        f"'{target.spec}': importing '{target.module}' raised {_describe(error)}. "
        "Import it on its own in Python to find the cause."
    )


def _is_part_of(missing: str | None, module: str) -> bool:
    return missing is not None and f"{module}.".startswith(f"{missing}.")


def _broken(name: str, install: str, error: Exception) -> str:
    return (
        f"The library '{name}' is installed but importing it raised {_describe(error)}. "
        f"Install a version that fits this Python and torch. Run: pip install --force-reinstall '{install}'"
    )


def _describe(error: Exception) -> str:
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
