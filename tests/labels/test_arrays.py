import torch

from recoup.labels.arrays import NONE, along, collapse, components, compress, constant, core, varies


def test_compress_finds_the_dims_that_do_not_change():
    labels = along(torch.arange(3), 1, (1, 3, 4, 5)).contiguous()
    small = compress(labels)
    assert torch.equal(small, labels)
    assert small.stride()[2:] == (0, 0)
    assert [varies(small, dim) for dim in range(4)] == [False, True, False, False]


def test_core_cuts_only_where_nothing_changes():
    a, b = along(torch.arange(3), 1, (1, 3, 4)), constant((1, 3, 4), NONE)
    assert [t.shape for t in core(a, b)] == [(1, 3, 1), (1, 3, 1)]
    c = along(torch.arange(4), 2, (1, 3, 4))
    assert [t.shape for t in core(a, c)] == [(1, 3, 4), (1, 3, 4)]


def test_collapse_drops_or_keeps_dims():
    labels = along(torch.arange(3), 1, (2, 3, 4, 5))
    assert collapse(labels, [2, 3], keepdim=False).tolist() == [[0, 1, 2]] * 2
    assert collapse(labels, [2, 3], keepdim=True).shape == (2, 3, 1, 1)


def test_components_are_found_along_chains_in_any_order():
    torch.manual_seed(0)
    chain = torch.stack([torch.arange(0, 99), torch.arange(1, 100)])[:, torch.randperm(99)]
    assert torch.equal(components(100, chain), torch.zeros(100, dtype=torch.long))
    assert components(5, torch.tensor([[4, 2], [1, 3]])).tolist() == [0, 1, 2, 2, 1]
    assert components(3, torch.zeros(2, 0, dtype=torch.long)).tolist() == [0, 1, 2]
