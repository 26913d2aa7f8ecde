import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import recoup
from recoup.errors import CalibrationError
from tests.language import VOCABULARY, batches, build, padded


class Guess(nn.Module):
    """Knows one token's likelihood, whatever comes before."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, input_ids, attention_mask=None):
        return self.logits.expand(*input_ids.shape, -1)


def test_who_knows_nothing_hesitates_between_all_tokens():
    assert recoup.perplexity(Guess(torch.zeros(10)), [torch.ones(2, 5).long()]) == pytest.approx(10)


def test_it_is_that_of_the_loss_of_the_next_token():
    model, given = build(), batches()
    with torch.no_grad():
        scores = torch.cat([model(**batch).logits for batch in given])[:, :-1].double()
    right = torch.cat([batch["input_ids"] for batch in given])[:, 1:]
    expected = math.exp(F.cross_entropy(scores.flatten(0, 1), right.flatten()))
    assert recoup.perplexity(model, given) == pytest.approx(expected, rel=1e-6)
    assert recoup.perplexity(model, [batch["input_ids"] for batch in given]) == pytest.approx(expected, rel=1e-6)


def test_padding_and_labels_of_minus_100_do_not_count():
    model, (batch,) = build(), batches(1)
    short = {name: value[:, :8] for name, value in batch.items()}
    expected = recoup.perplexity(model, [short])
    assert recoup.perplexity(model, [padded(batch, 8)]) == pytest.approx(expected, rel=1e-6)
    labels = batch["input_ids"].clone()
    labels[:, 8:] = -100
    assert recoup.perplexity(model, [{**batch, "labels": labels}]) == pytest.approx(expected, rel=1e-6)


def test_scores_of_the_token_itself_are_not_shifted():
    logits = torch.zeros(4)
    logits[3] = 100.0
    labels = torch.tensor([[3, -100, 3], [-100, 3, -100]])
    batch = {"input_ids": torch.zeros(2, 3).long(), "labels": labels}
    assert recoup.perplexity(Guess(logits), [batch], shifted=False) == pytest.approx(1)
    labels[0, 0] = 1
    assert recoup.perplexity(Guess(logits), [batch], shifted=False) > 1000


def test_every_token_counts_alike_however_batches_are_cut():
    model, (batch,) = build(), batches(1, samples=6)
    parts = [{name: value[part] for name, value in batch.items()} for part in (slice(0, 1), slice(1, 6))]
    assert recoup.perplexity(model, parts) == pytest.approx(recoup.perplexity(model, [batch]), rel=1e-6)


def test_it_is_a_measure_for_a_tolerance():
    model, given = build(), batches()

    def measure(candidate):
        return -recoup.perplexity(candidate, given)

    result = recoup.prune(model, given, evaluate=measure, tolerance=2.0, method="fast")
    assert result.report.score.before == pytest.approx(measure(model))
    assert measure(result.model) > measure(model) - 2.0


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.full((2, 5), VOCABULARY), "could not be|fail|numbered from 0"),
        ({"input_ids": torch.ones(2, 5).long(), "labels": torch.ones(2, 4).long()}, "one token for every position"),
        ({"input_ids": torch.ones(2, 5).long(), "labels": torch.full((2, 5), -100)}, "no token"),
        ({"input_ids": torch.ones(2, 5).long(), "labels": torch.full((2, 5), VOCABULARY)}, "numbered from 0"),
    ],
)
def test_what_cannot_be_measured_is_said(batch, message):
    with pytest.raises(CalibrationError, match=message):
        recoup.perplexity(build(), [batch])


def test_scores_of_another_shape_are_refused():
    with pytest.raises(CalibrationError, match="samples, positions, tokens"):
        recoup.perplexity(nn.Linear(3, 2), [torch.ones(4, 3)])
