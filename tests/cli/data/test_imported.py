import pytest
import torch

from recoup.cli.data import open_data
from recoup.cli.input_spec import CIFAR
from recoup.errors import DataError, UsageError

FACTORIES = """
import torch
from torch.utils.data import DataLoader, TensorDataset

class Counting:
    def __iter__(self):
        return iter(torch.arange(12.0).view(3, 4, 1))

def images(): return [torch.arange(4.0), torch.arange(4.0, 6.0)]
def pairs(): return DataLoader(TensorDataset(torch.arange(10.0), torch.arange(10)), batch_size=4)
def dicts(): return [{"ids": torch.arange(4), "scale": torch.tensor(2.0)}]
def sizeless(): return Counting()
def empty(): return []
def once(): return (torch.zeros(1) for _ in range(3))
def number(): return 3
def tensor(): return torch.zeros(3, 3)
def texts(): return ["a", "b"]
def broken(): raise KeyError("path")
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own_data.py"
    path.write_text(FACTORIES)
    return lambda name, **options: open_data(f"{path}:{name}", CIFAR, **options)


def test_batches_are_passed_on_untouched(own):
    data = own("images", batch_size=3)
    assert [batch.tolist() for batch in data] == [[0, 1, 2, 3], [4, 5]]
    assert [batch.tolist() for batch in data] == [[0, 1, 2, 3], [4, 5]]
    assert (data.labelled, data.count, data.batches) == (False, 6, 2)
    assert data.name.endswith("own_data.py:images")


def test_pairs_are_labelled(own):
    data = own("pairs")
    assert (data.labelled, data.count, data.batches) == (True, 10, 3)
    assert [labels.tolist() for _, labels in data] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_other_forms_and_iterables_without_length(own):
    assert (own("dicts").count, own("dicts").labelled) == (4, False)
    assert (own("sizeless").count, own("sizeless").batches) == (12, 3)


@pytest.mark.parametrize(("limit", "sizes"), [(3, [3]), (4, [4]), (5, [4, 1]), (50, [4, 4, 2])])
def test_limit_takes_the_first(own, limit, sizes):
    data = own("pairs", limit=limit)
    assert [len(images) for images, _ in data] == sizes
    assert torch.cat([labels for _, labels in data]).tolist() == list(range(sum(sizes)))
    assert (data.count, data.batches) == (sum(sizes), len(sizes))


def test_limit_reaches_into_dicts(own):
    (batch,) = own("dicts", limit=3)
    assert batch["ids"].tolist() == [0, 1, 2] and batch["scale"].item() == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "empty' returned no batches"),
        ("once", "returned a generator, which can be read only once"),
        ("number", "returned a int. Return a list of batches"),
        ("tensor", "returned a Tensor. Return a list of batches"),
        ("texts", "gave a batch of type str without a tensor"),
        ("broken", "own_data.py:broken' raised KeyError: 'path'"),
    ],
)
def test_what_cannot_be_used(own, name, message):
    with pytest.raises(DataError) as caught:
        own(name)
    assert message in str(caught.value)


def test_unknown_module():
    with pytest.raises(UsageError, match="there is no module 'no_such_module'"):
        open_data("no_such_module:batches", CIFAR)
