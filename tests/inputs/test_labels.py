import pytest
import torch
from torch import nn

import recoup
from recoup.inputs.batches import inputs_of
from tests.language import batches, build

x = torch.ones(4, 3)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, pixels, labels=None):
        return self.layer(pixels)


class Needy(Classifier):
    def forward(self, pixels, labels):
        return self.layer(pixels) + labels[:, None]


class Translator(Classifier):
    def forward(self, pixels, decoder_input_ids=None, labels=None):
        return self.layer(pixels)

    def prepare_decoder_input_ids_from_labels(self, labels):
        return labels.roll(1, dims=1)


def test_labels_in_a_dict_are_no_input_and_kept_beside_them():
    inputs = inputs_of({"pixels": x, "labels": torch.tensor([0, 1, 1, 0])}, Classifier())
    assert list(inputs.kwargs) == ["pixels"]
    assert inputs.labels.tolist() == [0, 1, 1, 0]
    assert inputs_of({"pixels": x, "labels": torch.zeros(4, 7)}, Classifier()).labels is None


def test_labels_that_the_forward_pass_needs_are_an_input():
    inputs = inputs_of({"pixels": x, "labels": torch.zeros(4)}, Needy())
    assert list(inputs.kwargs) == ["pixels", "labels"]


def test_labels_become_what_the_decoder_reads():
    labels = torch.tensor([[1, 2, 3]] * 4)
    kwargs = inputs_of({"pixels": x, "labels": labels}, Translator()).kwargs
    assert kwargs["decoder_input_ids"].tolist() == [[3, 1, 2]] * 4
    given = {"pixels": x, "labels": labels, "decoder_input_ids": labels}
    assert torch.equal(inputs_of(given, Translator()).kwargs["decoder_input_ids"], labels)


def test_accuracy_reads_the_labels_of_a_dict():
    model = Classifier()
    right = model(x).argmax(1)
    batch = {"pixels": x, "labels": right}
    assert recoup.accuracy(model, [batch]) == 100.0
    assert recoup.accuracy(model, [{**batch, "labels": 1 - right}]) == 0.0


def test_without_class_numbers_a_dict_has_nothing_to_measure_by():
    with pytest.raises(recoup.RecoupError, match="carry no labels"):
        recoup.accuracy(Classifier(), [{"pixels": x, "labels": torch.zeros(4, 7).long()}])


def test_a_language_model_is_pruned_with_labels_in_its_batches():
    given = batches(labels=torch.zeros(8, 12).long())
    result = recoup.prune(build(), given, budget=recoup.Budget(macs=0.8), method="fast")
    assert result.report.macs_removed >= 0.2
