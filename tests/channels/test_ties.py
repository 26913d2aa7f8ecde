"""A layer of which a single channel is left names the operation that tied its channels together."""

import pytest
import torch
from torch import nn

from recoup.channels.parts import settled
from recoup.channels.propagate import propagate
from recoup.graph.capture import capture
from recoup.inputs.batches import inputs_of
from recoup.inputs.samples import sampled_call
from recoup.tracing.trace import trace


class Between(nn.Module):
    """A body between two convolutions of eight channels and a third."""

    def __init__(self, body, width=8, after=8):
        super().__init__()
        self.body, self.a, self.b = body, nn.Conv2d(3, width, 1), nn.Conv2d(width, 8, 1)
        self.c = nn.Conv2d(after, 4, 1)

    def forward(self, x):
        a = self.a(x)
        return self.c(self.body(a, self.b(a.relu())))


def rolled(a, b):
    for _ in range(4):
        b = b + b.roll(1, 1)
    return b


def normed(a, b):
    return nn.functional.group_norm(b, 2).unflatten(1, (4, 2)).transpose(1, 2).flatten(1, 2) * b


def picked(a, b):
    return torch.cat([a, b[:, 3:4]], 1)


def added(a, b):
    return a.relu()


@pytest.mark.parametrize(
    ("body", "name", "expected"),
    [
        (rolled, "b", "add in forward (test_ties.py:{}) ties its channels into one"),
        (picked, "b", "slice in forward takes it alone (test_ties.py:{})"),
        (normed, "b", "group_norm in forward (test_ties.py:{}) ties its channels into one, as does another"),
    ],
)
def test_the_operation_and_its_line_are_named(body, name, expected):
    structure = trace(Between(body, after=9 if body is picked else 8).eval(), torch.randn(2, 3, 4, 4)).structure
    (group,) = [group for group in structure.groups if name in group.producers]
    line = Between.forward.__code__.co_firstlineno + 2
    assert expected.format(line) in group.reasons


class Merged(nn.Module):
    """A grouped convolution of two parts reads what a body makes of eight channels."""

    def __init__(self, body, inputs, parts=2):
        super().__init__()
        self.body, self.a, self.c = body, nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
        self.merge = nn.Conv2d(inputs, 8, 1, groups=parts)

    def forward(self, x):
        return self.c(self.merge(self.body(self.a(x))))


def test_a_grouped_convolution_names_what_it_ties_and_what_it_holds():
    line = Merged.forward.__code__.co_firstlineno + 1
    example = torch.randn(2, 3, 4, 4)
    model = Merged(torch.relu, 8, parts=4).eval()
    constraints = propagate(capture(model, sampled_call(inputs_of(example, model)).one)).constraints
    settled(constraints, frozenset())
    assert f"conv2d in merge (test_ties.py:{line})" in {coupling.site for coupling in constraints.couplings}
    structure = trace(Merged(lambda a: torch.cat([a[:, :6], a[:, 2:]], 1), 12).eval(), example).structure
    uneven = f"conv2d in merge (test_ties.py:{line}) divides it into groups that cannot lose equally many"
    assert structure.group("a").reasons == (uneven,)
    assert (structure.group("merge").free, structure.group("merge").step) == (8, 2)


def test_a_layer_of_one_channel_says_so_and_what_is_coupled_only_says_nothing():
    single = trace(Between(added, width=1, after=1).eval(), torch.randn(2, 3, 4, 4)).structure.groups[0]
    assert single.reasons == ("its layers make a single channel",)
    assert trace(Between(added).eval(), torch.randn(2, 3, 4, 4)).structure.groups[0].reasons == ()
