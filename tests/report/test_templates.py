from importlib.resources import files

import pytest
from jinja2 import UndefinedError

from recoup.report import templates
from recoup.report.templates import render

FILES = {file.name: file.read_text(encoding="utf-8") for file in files(templates).iterdir() if file.is_file()}


def test_no_template_switches_escaping_off():
    assert {"report.html", "parts.html", "charts.html", "style.css", "groups.svg", "groups.css"} <= set(FILES)
    for name, text in FILES.items():
        assert not any(word in text for word in ("|safe", "| safe", "autoescape false")), name


def test_a_value_that_is_missing_raises():
    with pytest.raises(UndefinedError, match="network"):
        render("report.html")


def test_a_field_that_is_missing_raises():
    with pytest.raises(UndefinedError, match="detail"):
        render(
            "report.html",
            version="1",
            network="Net",
            summary="",
            warnings=(),
            cards=[{"label": "", "value": "", "unit": ""}],
        )
