import pytest
import torch

from recoup.cli.data import open_data
from recoup.cli.data.noise import Noise
from recoup.cli.input_spec import CIFAR, unnormalised
from recoup.errors import UsageError


def whole(spec: str, **options) -> torch.Tensor:
    return torch.cat(list(open_data(spec, CIFAR, **options)))


def test_batch_size_changes_nothing():
    assert torch.equal(whole("noise:20", batch_size=7), whole("noise:20", batch_size=20))


def test_a_longer_run_begins_like_a_shorter_one():
    assert torch.equal(whole("noise:20")[:8], whole("noise:8"))


def test_seeds_and_images_differ():
    images = torch.cat([whole("noise:50", seed=0), whole("noise:50", seed=1)]).flatten(1)
    correlation = torch.corrcoef(images) - torch.eye(100)
    assert correlation.abs().max() < 0.1  # 3072 values each: five deviations of independent noise


def test_values_are_standard_normal_whatever_the_normalisation():
    values = whole("noise:100")
    assert values.dtype == torch.float32 and values.shape == (100, 3, 32, 32)
    assert values.mean().item() == pytest.approx(0, abs=0.01)
    assert values.std().item() == pytest.approx(1, abs=0.01)
    assert (values.abs() > 3).double().mean().item() == pytest.approx(0.0027, rel=0.1)


def test_default_count_is_unlabelled_and_lazy(monkeypatch):
    made: list[int] = []
    monkeypatch.setattr(Noise, "images", lambda self, rows: made.extend(rows.tolist()) or torch.zeros(len(rows)))
    data = open_data("noise", unnormalised((1, 4)), batch_size=100)
    assert (data.count, data.batches, data.labelled, data.name) == (1024, 11, False, "noise:1024")
    next(iter(data))
    assert made == list(range(100))


@pytest.mark.parametrize("count", ["0", "-3", "many", "1.5", "10000001", "9" * 5000])
def test_counts_that_make_no_sense(count):
    with pytest.raises(
        UsageError, match=f"'{count[:20]}' is not a number of images from 1 to 10,000,000. Write noise:N"
    ):
        open_data(f"noise:{count}", CIFAR)
