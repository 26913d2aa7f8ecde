"""What modules and configs remember besides tensors: a cache that is asked for, sizes, and numbers for all layers."""

import copy

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import CaptureError, LockedError, UsageError, VerificationError
from recoup.report.reading import report_from_json
from recoup.tracing.configured import UNCOUNTED, rebuilt
from tests.language import Cache, Model, batches, build, config

HALF = recoup.Budget(width=0.5)


def widths(model):
    return [(block.up.out_features, block.attention.qkv.out_features // 12) for block in model.blocks]


def test_a_cache_is_switched_off_to_look_and_the_result_has_it():
    model = build()
    result = recoup.prune(model, batches(), budget=HALF, method="fast")
    assert type(result.model) is Model
    assert model.config.use_cache
    assert result.model.config.use_cache
    assert len(result.model(**batches(1)[0]).cache.held) == 2
    assert "use_cache" in str(result.report)
    assert report_from_json(result.report.to_json()).notes == result.report.notes


def test_a_model_without_a_cache_gets_none():
    result = recoup.prune(build(use_cache=False), batches(), budget=HALF, method="fast")
    assert not result.model.config.use_cache
    assert result.report.notes == ()


def test_a_cache_that_no_config_switches_off_is_named():
    class Remembering(Model):
        def forward(self, input_ids, attention_mask=None):
            return {"logits": super().forward(input_ids), "cache": Cache()}

    with pytest.raises(CaptureError, match="returns a cache of its past"):
        recoup.inspect(Remembering(config(use_cache=False)).eval(), batches(1)[0])


def test_step_by_step_a_cache_is_no_obstacle():
    model, given, method = build(), batches(), recoup.Fast()
    traced = recoup.trace(model, given[0])
    seen = recoup.calibrate(traced, recoup.split(model, given), method)
    recovered = recoup.recover(seen, recoup.allocate(seen, recoup.rank(seen), recoup.Goal(budget=HALF)))
    smaller = recoup.apply(model, recovered.plan)
    assert recoup.verify(model, recovered.plan, smaller, given[0]).difference < 1e-10
    assert smaller.config.use_cache


@pytest.mark.parametrize("keep_class", [False, True])
def test_numbers_that_the_code_reads_follow(keep_class):
    result = recoup.prune(build(), batches(), budget=HALF, method="fast", keep_class=keep_class)
    assert type(result.model) is Model
    assert widths(result.model) == [(12, 2), (12, 2)]
    for block in result.model.blocks:
        assert (block.attention.split_size, block.attention.head_dim) == (8, 4)


def test_layers_of_their_own_widths_have_numbers_of_their_own():
    chosen = {"blocks.0.attention.qkv": 3, "blocks.1.attention.qkv": 1}
    model = recoup.prune(build(), batches(), widths=chosen, method="fast").model
    assert [block.attention.split_size for block in model.blocks] == [12, 4]


def test_a_saved_result_has_its_numbers(tmp_path):
    model = build()
    result = recoup.prune(model, batches(), widths={"blocks.0.attention.qkv": 3}, method="fast")
    result.save(tmp_path / "saved")
    loaded = recoup.load(tmp_path / "saved", model)
    assert loaded.blocks[0].attention.split_size == 12
    (batch,) = batches(1)
    torch.testing.assert_close(loaded(**batch).logits, result.model(**batch).logits)


@pytest.mark.parametrize("method", ["fast", "best", "paper"])
def test_a_config_tells_every_width(method):
    budget = recoup.Budget(macs=0.6)
    result = recoup.prune(build(layers=3), batches(), budget=budget, method=method, keep_config=True)
    assert result.report.macs_removed >= 0.4
    assert len(set(widths(result.model))) == 1
    ((hidden, heads),) = set(widths(result.model))
    assert (result.model.config.intermediate_size, result.model.config.num_attention_heads) == (hidden, heads)
    again = Model(copy.deepcopy(result.model.config)).eval()
    again.load_state_dict(result.model.state_dict())
    (batch,) = batches(1)
    assert torch.equal(again(**batch).logits, result.model(**batch).logits)


def test_the_config_of_the_original_stays():
    model = build()
    recoup.prune(model, batches(), budget=HALF, method="fast", keep_config=True)
    assert vars(model.config) == vars(config())
    assert widths(model) == [(24, 4), (24, 4)]


def test_a_width_by_hand_is_that_of_all_layers():
    result = recoup.prune(build(), batches(), widths={"blocks.0.up": 7}, method="fast", keep_config=True)
    assert widths(result.model) == [(7, 4), (7, 4)]
    assert result.model.config.intermediate_size == 7


def test_what_no_number_counts_in_all_layers_is_locked():
    inspected = recoup.inspect(build(), batches(1)[0], keep_config=True, exclude=["blocks.0.up"])
    reasons = {seen.row.name: seen.row.reasons for seen in inspected.groups}
    assert UNCOUNTED in reasons["blocks.1.up"]
    assert reasons["blocks.1.attention.qkv"] == ()


class Whimsical(Model):
    """Its heads become wider as they get fewer: their number says nothing of sizes."""

    def __init__(self, config):
        super().__init__(config.__class__(**vars(config) | {"head_dim": 16 // config.num_attention_heads}))


def test_a_number_that_changes_no_size_counts_nothing():
    torch.manual_seed(0)
    inspected = recoup.inspect(Whimsical(config()).eval(), batches(1)[0], keep_config=True)
    locked = {seen.row.name: UNCOUNTED in seen.row.reasons for seen in inspected.groups}
    assert locked["blocks.0.attention.qkv"]
    assert not locked["blocks.0.up"]


def test_no_layer_gets_a_bias_that_its_class_would_not_make():
    result = recoup.prune(build(), batches(), budget=HALF, method="fast", keep_config=True)
    assert result.model.blocks[0].down.bias is None
    assert result.model.state_dict().keys() == build().state_dict().keys()


def test_without_a_config_there_is_none_to_keep():
    x = torch.randn(50, 3)
    with pytest.raises(UsageError, match="has no config"):
        recoup.prune(
            torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)), [x], budget=HALF, keep_config=True
        )


def test_a_config_that_no_number_of_which_counts_leaves_nothing():
    with pytest.raises(LockedError, match=UNCOUNTED):
        recoup.prune(build(), batches(), budget=HALF, keep_config=True, only=["blocks.0.up"])


def test_a_config_that_does_not_fit_is_refused():
    result = recoup.prune(build(), batches(), widths={"blocks.0.up": 7}, method="fast")
    with pytest.raises(VerificationError, match="built again from its config"):
        rebuilt(result.model)


class Sampled(nn.Module):
    """Reads a stream as wide as its heads together; `width` counts the places of the heads, and not the stream's."""

    def __init__(self):
        super().__init__()
        self.width, self.heads = 16, 2
        self.first = nn.Linear(6, 16)
        self.value, self.gate, self.out = nn.Linear(16, 16), nn.Linear(16, 2), nn.Linear(16, 3)

    def forward(self, x):
        x = self.first(x).relu()
        value = self.value(x).view(*x.shape[:2], self.heads, self.places(x))
        return self.out((value * self.gate(x).softmax(-1)[..., None]).flatten(2))

    def places(self, _):
        return self.width // self.heads


class Stretched(Sampled):
    """Takes the stream's size for that of its heads together."""

    def places(self, x):
        return x.shape[-1] // self.heads


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("keep_class", [None, True])
def test_a_number_follows_the_one_of_two_groups_as_wide_that_the_code_means(nested, keep_class):
    torch.manual_seed(0)
    network, data = Sampled(), [torch.randn(60, 5, 6)]
    model, inner = (nn.Sequential(network), "0.") if nested else (network, "")
    chosen = {f"{inner}first": 13, f"{inner}value": 3}
    smaller = recoup.prune(model.eval(), data, widths=chosen, method="fast", keep_class=keep_class).model
    assert type(smaller) is type(model)
    assert smaller.get_submodule(inner.rstrip(".")).width == 6


def test_a_number_that_need_not_follow_stays():
    class Deep(nn.Module):
        """Returns a feature of the layer whose number it remembers, which is a width by chance."""

        def __init__(self, width):
            super().__init__()
            self.feature = 6
            self.a, self.b, self.c = nn.Linear(5, width), nn.Linear(width, width), nn.Linear(width, 4)

        def forward(self, x):
            found = []
            for place, layer in enumerate((self.a, self.b, self.c)):
                x = layer(x).relu()
                found += [x] if place == self.feature else []
            return [x, *found]

    torch.manual_seed(0)
    model, data = Deep(6).eval(), [torch.randn(60, 4, 5)]
    for width in (5, 2, 1):
        smaller = recoup.prune(model, data, widths={"a": width, "b": width}, method="fast").model
        assert (type(smaller), smaller.feature) == (Deep, 6)


def test_code_that_reads_the_size_of_another_group_is_not_taken_for_code_that_follows():
    torch.manual_seed(0)
    network, data = Stretched().eval(), [torch.randn(60, 5, 6)]
    whole = {group.name for group in recoup.trace(network, data[0], keep_class=True).structure.groups if not group.free}
    assert {"first", "value"} <= whole
    result = recoup.prune(network, data, widths={"first": 13, "value": 3}, method="fast")
    assert result.report.proof.difference < 1e-10
