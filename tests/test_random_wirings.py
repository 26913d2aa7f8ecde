"""Networks composed of unusual pieces at random, cut at random: what comes out is exact, or nothing does."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

import recoup
from recoup.settings import Settings
from recoup.structure.trace import plain_cut
from recoup.structure.verify import outputs, prove
from tests.test_laws import draw_keep, make_copies, relative, with_twins
from tests.wirings import PIECES, Composed, example
from tests.zoo import seeded

networks = st.builds(
    dict,
    pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=3),
    width=st.sampled_from([4, 6]),
    feature=st.integers(0, 6),
    skips=st.integers(0, 7),
)


def build(**how):
    with seeded(0):
        return Composed(**how).double().eval()


@given(how=networks, seed=st.integers(0, 10_000))
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_random_network_cut_at_random_is_exact(how, seed):
    model = build(**how)
    traced = recoup.trace(model, example())
    assume(traced.structure.prunable)  # a returned feature may hold all of a short network
    keep = draw_keep(traced.structure, seed)
    smaller, proof = prove(model, plain_cut(model, traced, keep), traced.inputs)
    assert proof.difference < 1e-10
    before, after = (sum(p.numel() for p in m.parameters()) for m in (traced.host(model), smaller))
    assert keep.all() or after < before


@pytest.mark.parametrize("piece", PIECES)
def test_every_piece_is_pruned_and_exact_for_other_batches(piece):
    model = build(pieces=[piece], width=6, feature=5, skips=0)
    traced = recoup.trace(model, example())
    assert all(group.free == group.width for group in traced.structure.groups if group.width > 1 and not group.returned)
    keep = draw_keep(traced.structure, 1)
    smaller, proof = prove(model, plain_cut(model, traced, keep), traced.inputs)
    assert proof.difference < 1e-10
    assert not keep.all()
    shape = {
        name: tuple(value.shape)
        for name, value in smaller(*(t.repeat(3, *[1] * (t.dim() - 1)) for t in example())).items()
    }
    assert shape == {"scores": (6, 4)}


@pytest.mark.parametrize("piece", PIECES)
def test_copies_of_kept_channels_lose_nothing_in_any_piece(piece):
    """Half of the channels of every group are made copies of the other half, and go."""
    model = build(pieces=[piece], width=6, feature=5, skips=0)
    x = (torch.randn(90, 3, 8, 8, dtype=torch.float64), torch.randn(90, 5, dtype=torch.float64))
    traced = recoup.trace(model, x)
    host = traced.host(model)
    half = torch.ones(traced.structure.width, dtype=torch.bool)
    for group in traced.structure.prunable:
        half[group.channels][1::2] = group.locked[1::2]
    keep, twin = with_twins(traced.structure, half)
    make_copies(host, traced.structure, twin)
    seen = recoup.calibrate(host, traced, [x], Settings(weighting="none", ridge=1e-12, positions=None))
    smaller = recoup.apply(host, recoup.compensate(seen, keep))
    with torch.no_grad():
        expected, actual = (outputs(m, recoup.batches.Inputs(x, {})) for m in (host, smaller))
    assert not keep.all()
    assert relative(actual, expected) < 1e-6
