"""A tolerance on untouched images: what is drawn, what is measured, and the table."""

import json

import pytest
import torch
from benchmarks.rows import Case, Outcome, Row
from benchmarks.tolerance import SUBJECTS, Images, images_of, lost_on, measured, outcome, parse, table
from torch import nn

from benchmarks import tolerance
from recoup.cli.input_spec import InputSpec
from recoup.cli.models import OpenModel
from recoup.errors import UsageError
from tests import zoo
from tests.cli.data.test_cifar import cifar10, numbers  # noqa: F401 - a fixture

RAW = InputSpec((3, 32, 32), (0.0,) * 3, (1.0,) * 3)


def network(pool=1):
    """One layer of channels behind 8 x 8 pixels: the work is over in a second."""
    with zoo.seeded(0):
        return nn.Sequential(nn.AvgPool2d(pool), nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 10)).eval()


def labelled(model, count, seed):
    """Images with the labels that the model gives them."""
    images = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return [(images, model(images).argmax(1))]


def options(*words):
    return parse(["--cifar", "images", "--checkpoints", "weights", *words])


def test_a_row_has_the_drop_on_untouched_images_and_its_noise():
    model = network()
    images = Images(*(labelled(model, count, seed) for seed, count in enumerate((120, 90, 200))))
    found = outcome(model, images, Case("net", "best", 3, tolerance=30.0))
    assert 0 < found.removed < 1
    assert found.validation_drop <= found.bound < 30.0
    assert found.top1 == pytest.approx(100 - found.test_drop)
    share = found.test_drop / 100
    assert found.noise == pytest.approx(100 * (share * (1 - share) / 199) ** 0.5)
    assert found.seconds > 0 and found.device == "CPU"


def test_what_is_lost_is_a_mean_of_pairs():
    class Answer(nn.Module):
        def __init__(self, *answers):
            super().__init__()
            self.answers, self.any = torch.tensor(answers), nn.Linear(1, 1)

        def forward(self, x):
            return nn.functional.one_hot(self.answers[x[:, 0].long()], 2).float()

    batches = [(torch.arange(4.0)[:, None], torch.tensor([0, 1, 0, 1]))]
    lost = lost_on(batches, Answer(0, 1, 0, 0), Answer(1, 0, 0, 1))  # two lost, one gained
    assert (lost.before, lost.drop) == (75.0, 25.0)
    assert lost.noise == pytest.approx(100 * torch.tensor([1.0, 1.0, 0.0, -1.0]).std().item() / 2)


@pytest.mark.parametrize("name", SUBJECTS)
def test_untouched_images_are_seen_by_nothing_else(name, cifar10):  # noqa: F811
    opened = OpenModel(nn.Identity(), RAW, "none")
    asked = parse(["--cifar", str(cifar10), "--checkpoints", ".", "--validation-images", "8", "--images", "30"])
    draws = [images_of(Case(name, "best", seed), opened, asked) for seed in (0, 1)]
    for images in draws:
        seen, measured_on, untouched = (
            numbers(part) for part in (images.calibration, images.validation, images.untouched)
        )
        assert (len(seen), len(measured_on), len(untouched)) == (30, 8, 12 if name == "vgg16" else 20)
        assert len({*seen, *measured_on, *untouched}) == len(seen) + len(measured_on) + len(untouched)
        assert set(untouched) <= set(range(100, 120))
        assert set(measured_on) <= (set(range(100, 120)) if name == "vgg16" else set(range(100)))
    assert numbers(draws[0].validation) != numbers(draws[1].validation)
    assert numbers(draws[0].calibration) != numbers(draws[1].calibration)


def test_validation_images_that_leave_none_are_refused(cifar10):  # noqa: F811
    asked = parse(["--cifar", str(cifar10), "--checkpoints", ".", "--validation-images", "20"])
    with pytest.raises(UsageError, match="20 validation images leave none of the 20"):
        images_of(Case("vgg16", "best", 0), OpenModel(nn.Identity(), RAW, "none"), asked)


def test_one_process_makes_the_rows_one_by_one(monkeypatch):
    monkeypatch.setattr(tolerance, "row_of", lambda case, _: Row(case, Outcome(removed=0.5)))
    cases = [Case("vgg16", "best", seed, tolerance=1.0) for seed in range(3)]
    assert [row.case for row in measured(cases, options())] == cases


def plain(seed, drop, noise=0.2):
    case = Case("net", "best", seed, tolerance=1.0)
    return Row(
        case,
        Outcome(removed=0.5, top1=90 - drop, validation_drop=0.4, bound=0.8, test_drop=drop, noise=noise, seconds=9),
    ).plain()


def test_the_table_counts_what_exceeds_the_tolerance_and_what_noise_does_not_explain():
    rows = [plain(0, 0.5), plain(1, 1.0), plain(2, 1.1), plain(3, 1.4)]
    *_, last = table(rows).splitlines()
    assert last.startswith(
        "| net (90.00) | 1.0 | 4 | 50.0% (50.0% to 50.0%) | 0.40 (0.40) | 0.80 (0.80) | 1.00 (1.40) |"
    )
    assert last.endswith("| 0.20 | 2 | 1 | 9.0 |")


def test_the_whole_of_it_on_a_few_images(cifar10, tmp_path, monkeypatch, capsys):  # noqa: F811
    """As on the command line, a network of the zoo in the place of the trained ones."""

    out = tmp_path / "rows.json"
    words = ["--cifar", str(cifar10), "--checkpoints", ".", "--networks", "vgg16", "--tolerance", "60"]
    words += ["--seeds", "1", "--first-seed", "3", "--images", "40", "--validation-images", "10", "--out", str(out)]
    monkeypatch.setattr(tolerance, "_open", lambda *_: OpenModel(network(4), RAW, "small"))
    monkeypatch.setattr("sys.argv", ["tolerance", *words])
    tolerance.main()
    assert [row["seed"] for row in json.loads(out.read_text())["rows"]] == [3]
    assert "| vgg16 (" in capsys.readouterr().out
