"""The guidebook tells the truth: its code runs, its commands parse, its tables are complete, its links lead somewhere.

The Python blocks of a file run one after the other in one namespace, in an empty folder. `prepared` is what they may
use without making it themselves. A block that cannot run has `<!-- not run: reason -->` right above it.
"""

import dataclasses
import functools
import re
import shlex
import warnings
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup import _prune
from recoup.algebra.selection import SELECTORS
from recoup.allocation import timing
from recoup.cli import main
from recoup.operators import record
from tests.timers import Work
from tests.torchvision_operators import define_missing_torchvision_operators
from tests.zoo import seeded

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LONGEST = 120
MOST_LEFT_OUT = 3
# A minute of refinement is as long in a test as on a page: seconds are cut to this.
SECONDS = "0.1"
# Pages that prune the same model again and again, and change nothing that a trace depends on.
REPEATING = {"README.md", "usage.md"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line it begins at, and why it is not run."""

    language: str
    text: str
    line: int
    not_run: str | None


def blocks(page):
    """Every fenced block of a page."""
    found, lines, number = [], page.read_text().splitlines(), 0
    while number < len(lines):
        fence = re.fullmatch(r"\s*```(\w*)\s*", lines[number])
        if fence:
            end = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == "```")
            why = re.fullmatch(r"<!-- not run: (.+) -->", lines[number - 1].strip()) if number else None
            found.append(Block(fence[1], "\n".join(lines[number + 1 : end]), number + 2, why and why[1]))
            number = end
        number += 1
    return found


def python_blocks(page):
    return [block for block in blocks(page) if block.language == "python"]


def page_id(page):
    return page.relative_to(ROOT).as_posix()


def section(page, heading):
    """The text under a heading, up to the next one."""
    after = page.read_text().split(f"{heading}\n", 1)[1]
    return re.split(r"^#", after, flags=re.MULTILINE)[0]


def first_cells(text):
    """The first cell of every row of the tables in a text."""
    return [row.split("|")[1].strip() for row in text.splitlines() if row.startswith("|")]


class Layer(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, 32, 3, stride, 1, bias=False), nn.BatchNorm2d(32)
        self.conv2 = nn.Conv2d(32, outputs, 3, 1, 1)

    def forward(self, x):
        return self.conv2(F.relu(self.norm1(self.conv1(x))))


class MyNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.layer1, self.layer2 = nn.Conv2d(3, 16, 3, 2, 1), Layer(16, 16), Layer(16, 24, stride=2)
        self.head = nn.Linear(24, 10)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = F.relu(x + self.layer1(x))
        return self.head(F.relu(self.layer2(x)).mean((2, 3)))


def prepared():
    """What the pages call a model, its batches and a measure."""
    with seeded(0):
        model = MyNetwork().eval()
        images = torch.randn(400, 3, 6, 6)
        calibration = list(torch.randn(200, 3, 6, 6).split(50))
    with torch.no_grad():
        batches = [(part, model(part).argmax(1)) for part in images.split(100)]
    return {
        "torch": torch, "nn": nn, "F": F, "recoup": recoup, "MyNetwork": MyNetwork, "model": model, "network": model,
        "images": images, "unlabelled": [images], "calibration": calibration, "batches": batches,
        "validation": batches, "my_measure": lambda candidate: recoup.accuracy(candidate, batches),
    }  # fmt: skip


def remembering(trace):
    """`trace` that traces a model once."""
    known = {}

    def traced(model, example, **options):
        if not isinstance(example, torch.Tensor):
            return trace(model, example, **options)
        key = (model, *(tuple(value) if name in ("only", "exclude") else value for name, value in options.items()))
        if key not in known:
            known[key] = trace(model, example, **options)
        return known[key]

    return traced


@pytest.mark.parametrize("page", [page for page in PAGES if page.exists() and python_blocks(page)], ids=page_id)
def test_the_code_of_every_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(record, "_OPERATORS", dict(record._OPERATORS))  # a page may teach Recoup an operator
    for name in ("operation_timings", "network_seconds"):  # no budget of time fails because the machine is busy
        monkeypatch.setattr(timing, name, functools.partial(getattr(timing, name), timer=Work()))
    if page.name in REPEATING:
        monkeypatch.setattr(_prune, "trace", remembering(_prune.trace))
    define_missing_torchvision_operators()
    namespace = {**prepared(), "__name__": "page"}
    with seeded(0), warnings.catch_warnings():
        warnings.simplefilter("ignore", recoup.RecoupWarning)
        for block in python_blocks(page):
            if not block.not_run:
                text = "\n" * (block.line - 1) + re.sub(r"refine=\d+", f"refine={SECONDS}", block.text)
                exec(compile(text, page_id(page), "exec"), namespace)


def test_few_blocks_are_left_out():
    left_out = [block for page in PAGES if page.exists() for block in python_blocks(page) if block.not_run]
    assert len(left_out) <= MOST_LEFT_OUT


def commands(page):
    """Every call of `recoup` in a block that is no Python, its continued lines joined."""
    shown = [block for block in blocks(page) if block.language in ("", "console", "bash", "sh")]
    lines = [line for block in shown for line in block.text.replace("\\\n", " ").splitlines()]
    return [line.strip().removeprefix("$ ") for line in lines if re.match(r"(\$ )?recoup ", line.strip())]


def test_every_command_parses():
    shown = [(page_id(page), command) for page in PAGES if page.exists() for command in commands(page)]
    assert {page for page, _ in shown} >= {"README.md", "docs/usage.md"}
    for page, command in shown:
        name, *words = shlex.split(command, comments=True)[1:]
        assert name in main.commands, f"{page}: {command}"
        try:
            main.commands[name].make_context(name, words)  # parses and checks, and does not run
        except click.exceptions.Exit as shown_and_done:  # --help
            assert shown_and_done.exit_code == 0
        except click.UsageError as error:
            pytest.fail(f"{page}: {command}: {error.format_message()}")


def test_every_option_of_the_command_line_is_in_the_guide():
    rows = [row for row in (ROOT / "docs" / "usage.md").read_text().splitlines() if row.startswith("| `-")]
    told = set()
    for row in rows:
        options, of = row.split("|")[1:3]
        names = main.commands if of.strip() == "all" else of.strip().split(", ")
        told |= {(name, option) for name in names for option in re.findall(r"`(-[\w-]+)", options)}
    known = {
        (name, option)
        for name, command in main.commands.items()
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    assert told == known


@pytest.mark.parametrize(
    ("heading", "method", "twin", "missing"),
    [
        ("### Fields of Best and Fast", recoup.Best, recoup.Fast, set()),
        ("### Fields of Paper and Released", recoup.Paper, recoup.Released, {"weighting", "recovery"}),
    ],
)
def test_every_field_of_a_method_is_in_the_guide(heading, method, twin, missing):
    told = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", section(ROOT / "docs" / "usage.md", heading), flags=re.MULTILINE)
    fields = [(field.name, repr(field.default)) for field in dataclasses.fields(method)]
    assert told == fields
    assert [(f.name, repr(f.default)) for f in dataclasses.fields(twin)] == [f for f in fields if f[0] not in missing]


def test_every_argument_of_prune_is_in_the_guide():
    told = re.findall(r"`(\w+)`", " ".join(first_cells(section(ROOT / "docs" / "usage.md", "## First prune"))))
    assert set(told) - {"prune"} == recoup.prune.__annotations__.keys() - {"return"}


def test_every_error_is_in_the_guide():
    told = re.findall(
        r"`(\w+Error)`", " ".join(first_cells(section(ROOT / "docs" / "usage.md", "## Errors and warnings")))
    )
    known = [name for name, kind in vars(recoup.errors).items() if isinstance(kind, type) and name.endswith("Error")]
    assert sorted(told) == sorted(set(known) - {"RecoupError"})


def test_every_field_of_the_report_is_in_the_guide():
    told = re.findall(r"`(\w+)`", " ".join(first_cells(section(ROOT / "docs" / "usage.md", "## Results"))))
    fields = {field.name for field in dataclasses.fields(recoup.Report)} - {"network"}
    assert set(told) == fields | {"warnings"}


def test_the_pages_say_what_each_step_returns():
    text = section(ROOT / "docs" / "usage.md", "## Step by step")
    steps = ["trace", "split", "calibrate", "rank", "allocate", "recover", "apply", "verify"]
    assert [cell.strip("`") for cell in first_cells(text) if cell.startswith("`")] == steps
    assert re.findall(r"= recoup\.([a-z]+)\(", text)[: len(steps)] == steps


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_lines_are_not_too_long(page):
    lines = enumerate(page.read_text().splitlines(), start=1)
    assert [number for number, line in lines if len(line) > LONGEST and not line.lstrip().startswith("|")] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    dead = [target for target in targets if not is_alive(page, target)]
    assert dead == []


def is_alive(page, target):
    """Whether a link leads to a file, or to a heading, that is there; addresses of the web are not looked up."""
    if re.match(r"https?:|mailto:", target):
        return True
    path, _, anchor = target.partition("#")
    place = page.parent / path if path else page
    if not place.exists():
        return False
    return not anchor or anchor in anchors(place)


def anchors(page):
    """The names that headings of a page can be linked by."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_results_fit_on_a_page():
    assert len((ROOT / "docs" / "results.md").read_text().splitlines()) <= 120


def test_every_selector_is_on_its_page():
    page = ROOT / "docs" / "selectors.md"
    for heading in ("## Formulas", "## Cost and use"):
        told = re.findall(r"`([\w-]+)`", " ".join(first_cells(section(page, heading))))
        assert sorted(told) == sorted(SELECTORS)
