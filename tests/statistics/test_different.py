import torch

from recoup.inputs.batches import Inputs
from recoup.statistics.different import DifferentSamples


def counted(*batches, most=100):
    different = DifferentSamples(most)
    for batch in batches:
        different.see(batch if isinstance(batch, Inputs) else Inputs((batch,), {}))
    return different.count


def test_copies_of_a_sample_count_once_in_whatever_batches_they_come():
    images = torch.randn(7, 3, 8, 8)
    assert counted(images) == 7
    assert counted(images, images.flip(0), images[2:3], images.repeat(3, 1, 1, 1)) == 7
    assert counted(torch.zeros(50, 3, 8, 8)) == 1


def test_samples_that_differ_in_one_place_are_two():
    images = torch.rand(1, 3, 32, 32).repeat(200, 1, 1, 1)
    images.view(200, 3072).diagonal().add_(1)
    assert counted(images, most=5000) == 200


def test_every_kind_of_input_is_told_apart():
    assert counted(torch.tensor([[1, 2], [2, 1], [1, 2]])) == 2
    assert counted(torch.tensor([[True], [False], [True]])) == 2
    assert counted(torch.tensor([[1 + 1j], [1 - 1j], [1 + 1j]])) == 2
    assert counted(torch.tensor([1.0, 2.0, 1.0], dtype=torch.bfloat16)) == 2


def test_of_several_inputs_one_has_to_differ():
    left, right = torch.tensor([[1.0], [1.0], [2.0]]), torch.tensor([[1], [2], [2]])
    assert counted(Inputs((left,), {"right": right, "scale": torch.tensor(3.0)})) == 3


def test_counting_ends_where_there_are_enough():
    assert counted(torch.randn(60, 2), torch.randn(60, 2), None, most=100) == 100


def test_a_batch_that_has_no_samples_to_tell_apart_counts_as_one():
    assert counted(Inputs((torch.tensor(1.0),), {}), Inputs((torch.tensor(2.0),), {})) == 1
