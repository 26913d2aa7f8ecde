import copy

import pytest
import torch
import torch.nn.functional as F
from benchmarks.baselines import count_macs, filter_norms, keep_best, largest_share, prune_by_l2, reestimated
from torch import Tensor, nn

import recoup
from recoup.errors import BudgetError
from tests import zoo

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def networks() -> list[nn.Module]:
    with zoo.seeded(0):
        return [zoo.plain(6).eval(), zoo.Residual(6).eval(), zoo.depthwise(6).eval()]


@pytest.mark.parametrize("limit", [0.01, 0.3, 0.5, 0.999])
def test_largest_share_is_the_largest_that_fits(limit):
    found = largest_share(lambda share: share <= limit)
    assert found <= limit < found + 2**-12


def test_everything_is_kept_where_it_fits():
    assert largest_share(lambda share: True) == 1.0


def test_nothing_that_fits_is_refused():
    with pytest.raises(BudgetError, match="every group costs more than allowed"):
        largest_share(lambda share: False)


def small_network() -> nn.Sequential:
    with zoo.seeded(1):
        return nn.Sequential(zoo.conv_bn(3, 4), nn.Dropout(0.5), zoo.conv_bn(4, 5))


def normalised(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, correction=0)
    return (x - mean) / (var + norm.eps).sqrt()


def test_batch_norms_hold_the_average_mean_and_the_variance_within_and_between_batches():
    model = small_network()
    generator = torch.Generator().manual_seed(2)
    batches = [(torch.randn(6, 3, 5, 5, generator=generator) + i, torch.zeros(6)) for i in range(3)]
    again = reestimated(model, batches)
    first = [model[0][0](x) for x, _ in batches]
    second = [model[2][0](F.relu(normalised(y, model[0][1]))) for y in first]
    for norm, seen in ((again[0][1], first), (again[2][1], second)):
        means = torch.stack([y.mean((0, 2, 3)) for y in seen])
        mean = means.mean(0)
        var = torch.stack([y.var((0, 2, 3)) for y in seen]).mean(0) + (means - mean).square().mean(0)
        torch.testing.assert_close(norm.running_mean, mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(norm.running_var, var, rtol=1e-4, atol=1e-5)


def test_batch_norms_in_a_graph_are_estimated_like_modules():
    model = small_network().eval()
    generator = torch.Generator().manual_seed(2)
    batches = [(torch.randn(6, 3, 5, 5, generator=generator) + i, torch.zeros(6)) for i in range(3)]
    graph = torch.export.export(model, (batches[0][0],)).module()
    expected, actual = reestimated(model, batches), reestimated(graph, batches)
    for name, value in expected.named_buffers():
        if "running" in name:
            torch.testing.assert_close(actual.get_buffer(name), value)
    torch.testing.assert_close(actual(batches[1][0]), expected(batches[1][0]))


def test_estimating_again_changes_nothing_else():
    model = small_network()
    before = copy.deepcopy(model.state_dict())
    again = reestimated(model, [(torch.randn(4, 3, 5, 5), torch.zeros(4))])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for name, value in again.named_parameters():
        assert torch.equal(value, before[name]), name
    assert not any(module.training for module in again.modules())
    assert again[0][1].momentum == model[0][1].momentum == 0.1


def test_macs_are_counted_as_recoup_counts_them():
    for model in networks():
        assert count_macs(model, IMAGES) == recoup.inspect(model, IMAGES).cost.macs


def test_norm_of_a_channel_is_over_all_its_makers():
    _, model, _ = networks()
    structure = recoup.trace(model, IMAGES).structure
    stream = structure.group("stem.0")
    filters = torch.cat([model.stem[0].weight.flatten(1), model.a[1][0].weight.flatten(1)], dim=1)
    expected = filters.detach().double().norm(dim=1)
    torch.testing.assert_close(filter_norms(structure, model)[stream.channels], expected)


def test_every_group_keeps_the_same_share_of_its_best():
    structure = recoup.trace(networks()[0], IMAGES).structure
    score = torch.arange(structure.width, dtype=torch.float64)
    keep = keep_best(structure, score, 0.5)
    for group in structure.prunable:
        assert keep[group.channels].tolist() == [False] * (group.width // 2) + [True] * (group.width // 2)


def test_l2_leaves_the_largest_filters_as_they_were_within_the_budget():
    for model in networks():
        smaller = prune_by_l2(model, IMAGES, 0.6)
        assert count_macs(smaller, IMAGES) <= 0.6 * count_macs(model, IMAGES)
    before, after = model[0][0].weight, smaller[0][0].weight
    best = before.flatten(1).norm(dim=1).argsort(descending=True)[: len(after)].sort().values
    assert 0 < len(after) < len(before) and torch.equal(after, before[best])
