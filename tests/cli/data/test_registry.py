import pytest
import torch

from recoup.cli.data import open_data
from recoup.cli.data.spec import DataSpec, parse_spec
from recoup.cli.input_spec import unnormalised
from recoup.errors import UsageError

INPUT = unnormalised((1, 8, 8))


def labels(data) -> list[int]:
    return [label for _, batch in data for label in batch.tolist()]


def images(data) -> torch.Tensor:
    return torch.cat([batch if isinstance(batch, torch.Tensor) else batch[0] for batch in data])


@pytest.mark.parametrize("spec", ["digits@train", "noise:60"])
@pytest.mark.parametrize("limit", [None, 40])
def test_reading_twice_gives_the_same(spec, limit):
    data = open_data(spec, INPUT, batch_size=16, limit=limit)
    assert torch.equal(images(data), images(data))
    assert data.count == len(images(data)) and data.batches == len(list(data))


def test_all_in_order_without_a_limit_or_below_it():
    everything = open_data("digits", INPUT)
    assert labels(open_data("digits", INPUT, limit=5000, seed=3)) == labels(everything)
    assert labels(everything)[:10] == list(range(10))


def test_limit_draws_by_seed_without_repetition():
    first, again, other = (open_data("digits", INPUT, limit=300, seed=seed, batch_size=70) for seed in (1, 1, 2))
    assert first.count == 300 and [len(y) for _, y in first] == [70, 70, 70, 70, 20]
    assert torch.equal(images(first), images(again))
    assert not torch.equal(images(first), images(other))
    rows = torch.randperm(1797, generator=torch.Generator().manual_seed(1))[:300]
    assert torch.equal(images(first), images(open_data("digits", INPUT))[rows])


def test_batch_size_does_not_change_the_sample():
    small, large = (open_data("digits", INPUT, limit=100, batch_size=size) for size in (3, 250))
    assert torch.equal(images(small), images(large))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("digits", ("digits", "", "")),
        ("digits@test", ("digits", "", "test")),
        ("cifar10:data", ("cifar10", "data", "")),
        ("cifar100:/a/b@train", ("cifar100", "/a/b", "train")),
        ("cifar10:me@home/cifar", ("cifar10", "me@home/cifar", "")),
        ("cifar10:me@home/cifar@test", ("cifar10", "me@home/cifar", "test")),
        ("folder:photos@2024", ("folder", "photos@2024", "")),
        ("noise:12", ("noise", "12", "")),
    ],
)
def test_parts_of_a_name(text, expected):
    assert parse_spec(text) == DataSpec(text, *expected)


def test_numbers_that_make_no_sense():
    with pytest.raises(UsageError, match="batch size of 0"):
        open_data("noise", INPUT, batch_size=0)
    with pytest.raises(UsageError, match="limit of 0 images"):
        open_data("noise", INPUT, limit=0)
    with pytest.raises(UsageError, match="seed -1 is negative"):
        open_data("noise", INPUT, seed=-1)


def test_unknown_names_get_a_hint(tmp_path):
    with pytest.raises(UsageError, match=r"no data called 'digit'. Did you mean 'digits'\?"):
        open_data("digit", INPUT)
    with pytest.raises(UsageError, match=f"write folder:{tmp_path}"):
        open_data(str(tmp_path), INPUT)
    with pytest.raises(UsageError, match=r"no data called 'xyzzy'. Data is named cifar10:DIR"):
        open_data("xyzzy", INPUT)
