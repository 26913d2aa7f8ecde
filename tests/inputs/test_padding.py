import torch

import recoup
from recoup.inputs.batches import Inputs
from recoup.inputs.padding import counted, flags_for, has_padding
from tests.language import batches, build, padded

MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


def test_positions_count_where_the_mask_is_not_zero():
    assert torch.equal(counted(Inputs((), {"attention_mask": MASK})), MASK.bool())
    assert counted(Inputs((MASK,), {})) is None
    assert counted(Inputs((), {"attention_mask": MASK[:, None, None]})) is None


def test_of_two_sequences_the_mask_tells_nothing():
    assert counted(Inputs((), {"attention_mask": MASK, "decoder_input_ids": MASK})) is None


def test_the_mask_is_laid_over_positions_or_over_rows_of_all_of_them():
    mask = MASK.bool()
    assert torch.equal(flags_for(torch.Size([2, 3, 7]), mask), mask)
    assert torch.equal(flags_for(torch.Size([6, 7]), mask), mask.flatten())
    assert flags_for(torch.Size([2, 4, 7]), mask) is None
    assert flags_for(torch.Size([2, 7]), mask) is None
    assert flags_for(torch.Size([2, 3, 7]), None) is None
    assert has_padding(mask)
    assert not has_padding(mask[:, :1])


def statistics(given, method):
    model = build(use_cache=False)
    traced = recoup.trace(model, given[0])
    return recoup.calibrate(traced, recoup.split(model, given, held_out=False), method).statistics


def test_padding_does_not_count_in_the_statistics():
    """Causal attention: what comes after the first places changes nothing in them."""
    method = recoup.Paper(positions=None)
    short = [{name: value[:, :8] for name, value in batch.items()} for batch in batches()]
    expected, found = (statistics(given, method) for given in (short, [padded(b, 8) for b in batches()]))
    for name, seen in expected.items():
        torch.testing.assert_close(found[name].moments.mean, seen.moments.mean)
        torch.testing.assert_close(found[name].moments.scatter, seen.moments.scatter, rtol=1e-5, atol=1e-5)
        assert found[name].moments.rows == seen.moments.rows


def test_padding_does_not_count_in_refits_and_on_held_out_samples():
    short = [{name: value[:, :8] for name, value in batch.items()} for batch in batches()]
    results = [
        recoup.prune(build(), given, widths={"blocks.0.up": 12, "blocks.1.up": 12}, method=recoup.Fast(positions=None))
        for given in (short, [padded(batch, 8) for batch in batches()])
    ]
    first, second = (result.model.state_dict() for result in results)
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-3, atol=1e-4)


def test_where_shapes_do_not_tell_positions_padding_counts_with_a_warning(recwarn):
    class Folded(type(build())):
        def forward(self, input_ids, attention_mask=None):
            x = self.table(input_ids).unflatten(1, (3, 4))
            return self.head(self.blocks[0].down(self.blocks[0].up(x).relu()))

    model = Folded(build(use_cache=False).config).eval()
    given = [padded(batch, 8) for batch in batches()]
    recoup.prune(model, given, budget=recoup.Budget(width=0.5), method="fast")
    assert any("padding counts in the statistics" in str(warning.message) for warning in recwarn)
