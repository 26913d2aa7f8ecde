"""Networks composed of unusual pieces at random, cut at random: what comes out is exact, or nothing does."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, assume, given, seed, settings

import recoup
from recoup.inputs.batches import Inputs
from recoup.surgery.verify import outputs, verify
from recoup.tracing.trace import plain_cut
from tests.fuzz.copies import make_copies, with_twins
from tests.test_laws import draw_keep, relative
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


def cut(traced, keep):
    """The network that keeps `keep` with nothing refitted, and the proof that it is right."""
    model, plan = traced.standalone.model, plain_cut(traced, keep)
    smaller = recoup.apply(model, plan)
    return smaller, verify(model, plan, smaller, traced.inputs)


# 510 cuts in all: three masks share a trace, which takes most of the time.
SHARDS, NETWORKS, MASKS = 10, 17, 3


@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_random_network_cut_at_random_is_exact(shard):
    @seed(shard)
    @settings(max_examples=NETWORKS, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
    @given(how=networks, number=st.integers(0, 10_000))
    def check(how, number):
        traced = recoup.trace(build(**how), example())
        assume(traced.structure.prunable)  # a returned feature may hold all of a short network
        for mask in range(MASKS):
            check_cut(traced, draw_keep(traced.structure, MASKS * number + mask))

    check()


def check_cut(traced, keep):
    smaller, proof = cut(traced, keep)
    assert proof.difference < 1e-10
    before, after = (sum(p.numel() for p in m.parameters()) for m in (traced.host, smaller))
    assert keep.all() or after < before


@pytest.mark.parametrize("piece", PIECES)
def test_every_piece_is_pruned_and_exact_for_other_batches(piece):
    model = build(pieces=[piece], width=6, feature=5, skips=0)
    traced = recoup.trace(model, example())
    assert all(group.free == group.width for group in traced.structure.groups if group.width > 1 and not group.returned)
    keep = draw_keep(traced.structure, 1)
    smaller, proof = cut(traced, keep)
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
    host = traced.host
    half = torch.ones(traced.structure.width, dtype=torch.bool)
    for group in traced.structure.prunable:
        half[group.channels][1::2] = group.locked[1::2]
    keep, twin = with_twins(traced.structure, half)
    make_copies(host, traced.structure, twin)
    method = recoup.Paper(weighting="none", ridge=1e-12, positions=None)
    seen = recoup.calibrate(traced, recoup.split(model, [x], held_out=False), method)
    smaller = recoup.apply(model, recoup.recover(seen, keep).plan)
    with torch.no_grad():
        expected, actual = (outputs(m, Inputs(x, {})) for m in (host, smaller))
    assert not keep.all()
    assert relative(actual, expected) < 1e-6
