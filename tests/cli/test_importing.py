import math
import sys

import pytest

from recoup.cli.importing import call_factory, import_attribute, import_library
from recoup.errors import DataError, RecoupError, UsageError


def test_attribute_of_a_module():
    assert import_attribute("math:tau") == math.tau


def test_file_may_import_its_neighbours_even_late(tmp_path):
    (tmp_path / "neighbour_early.py").write_text("value = 41")
    (tmp_path / "neighbour_late.py").write_text("value = 1")
    (tmp_path / "own.py").write_text(
        "from neighbour_early import value\ndef make():\n    import neighbour_late\n"
        "    return value + neighbour_late.value\n"
    )
    path = list(sys.path)
    assert call_factory(f"{tmp_path / 'own.py'}:make", DataError) == 42
    assert sys.path == path


def test_modules_of_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "module_of_the_working_folder.py").write_text("value = 3")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert import_attribute("module_of_the_working_folder:value") == 3


def test_files_of_the_same_name_stay_apart(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text(
            f"from dataclasses import dataclass\n@dataclass\nclass Own:\n    folder: str = '{folder}'\n"
        )
    first, second = (import_attribute(f"{tmp_path / folder / 'own.py'}:Own") for folder in ("a", "b"))
    assert (first().folder, second().folder) == ("a", "b")
    assert sys.modules[first.__module__] is not sys.modules[second.__module__]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("plain", "'plain' does not name a Python object. Write package.module:factory"),
        ("math:", "does not name a Python object"),
        ("no_such_module:x", "there is no module 'no_such_module'"),
        ("math.no_such:x", "there is no module 'math.no_such'"),
        ("no/such/file.py:x", "there is no file 'no/such/file.py'"),
        ("math:no_such", "'math' was imported but has no attribute 'no_such'"),
    ],
)
def test_names_that_lead_nowhere(spec, message):
    with pytest.raises(UsageError) as caught:
        import_attribute(spec)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import no_such_dependency", "ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def (", "SyntaxError"),
    ],
)
def test_code_that_raises_while_imported(tmp_path, monkeypatch, source, cause):
    (tmp_path / "raises_on_import.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    known = set(sys.modules)
    for spec in ("raises_on_import:x", "raises_on_import.py:x"):
        with pytest.raises(RecoupError) as caught:
            import_attribute(spec)
        assert f"raised {cause}" in str(caught.value) and spec in str(caught.value)
        assert not isinstance(caught.value, UsageError)
    assert not [name for name in set(sys.modules) - known if "raises_on_import" in name]


def test_own_errors_of_a_factory_pass_through(tmp_path):
    (tmp_path / "own.py").write_text(
        "from recoup.errors import UsageError\ndef make():\n    raise UsageError('mine')\n"
    )
    with pytest.raises(UsageError, match=r"^mine$"):
        call_factory(f"{tmp_path / 'own.py'}:make", DataError)


def test_broken_library_is_told_from_a_missing_one(tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text("raise RuntimeError('operator missing')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match=r"is installed but importing it raised RuntimeError: operator missing"):
        import_library("broken_library", "broken", DataError)
    (tmp_path / "needy_library.py").write_text("import no_such_dependency")
    with pytest.raises(DataError, match=r"'needy_library' is installed but importing it raised ModuleNotFoundError"):
        import_library("needy_library", "needy", DataError)
    with pytest.raises(DataError, match=r"needs 'no_such.part', which is not installed. Run: pip install 'such\[x\]'"):
        import_library("no_such.part", "such[x]", DataError)
