"""The plan of the house: names that are said once, and a surface that hides nothing."""

import ast
import importlib
import inspect
import pkgutil
from collections import Counter
from pathlib import Path

import pytest

import recoup

SOURCE = Path(recoup.__file__).parent
ROOMS = {"cli", "report", "methods", "allocation", "recovery", "judge", "statistics", "tracing", "surgery", "channels"}
ROOMS |= {"graph", "operators", "labels", "algebra", "inputs", "artefact", "training"}
FILES = {"__init__", "_prune", "config", "errors", "plan", "progress", "version"}


def trees():
    return {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def test_no_two_classes_share_a_name():
    names = [node.name.lstrip("_") for tree in trees().values() for node in tree.body if isinstance(node, ast.ClassDef)]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_the_hall_has_the_files_of_the_plan_and_no_others():
    assert {path.stem for path in SOURCE.glob("*.py")} == FILES
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} == ROOMS


def test_no_public_name_hides_a_module():
    modules = {module.name for module in pkgutil.iter_modules(recoup.__path__)}
    assert not modules & set(recoup.__all__)
    for room in ROOMS:
        assert inspect.ismodule(importlib.import_module(f"recoup.{room}"))
        assert inspect.ismodule(getattr(recoup, room))


@pytest.mark.parametrize("name", [name for name in recoup.__all__ if name != "__version__"])
def test_every_public_name_is_described(name):
    assert (inspect.getdoc(getattr(recoup, name)) or "").strip()


def test_every_room_says_what_it_is_for():
    for room in ROOMS:
        assert len(ast.get_docstring(ast.parse((SOURCE / room / "__init__.py").read_text())) or "") > 20


@pytest.mark.parametrize("where", ["_prune.py:prune", "methods/best.py:Best", "methods/paper.py:Paper"])
def test_the_pipeline_and_each_method_fit_on_a_screen(where):
    """Code alone: a screen has sixty lines, and what a field means is said beside it."""
    path, name = where.split(":")
    (node,) = [n for n in ast.parse((SOURCE / path).read_text()).body if getattr(n, "name", None) == name]
    told = [n for n in ast.walk(node) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    lines = node.end_lineno - node.lineno + 1 - sum(n.end_lineno - n.lineno + 1 for n in told)
    assert lines <= 65


def test_files_are_chapters():
    assert {path.name: n for path in SOURCE.rglob("*.py") if (n := path.read_text().count("\n")) > 400} == {}
