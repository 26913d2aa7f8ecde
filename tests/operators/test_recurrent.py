"""LSTM, GRU and plain recurrent layers, and cells called step by step: hidden units go as channels do."""

import pytest
import torch
from torch import nn

import recoup
from recoup.channels.cost import cost
from recoup.errors import LockedError, UsageError
from recoup.graph.runner import run
from recoup.operators.cells import Cell, require_fitting, step_by_step, unrolled
from recoup.operators.differential import RecordedCall
from recoup.statistics.observe import Observer, readings
from recoup.surgery.apply import masked
from recoup.tracing.trace import plain_cut
from tests.channels.test_cost_model import keep_of, random_counts, random_orders
from tests.channels.test_other_products import counted
from tests.zoo import seeded

LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}
FORMS = [{}, {"num_layers": 2}, {"bidirectional": True}, {"num_layers": 2, "bidirectional": True, "bias": False}]
HIDDEN = 8


class Tagger(nn.Module):
    """A layer before recurrent ones, and a head on what they make of the last step and on the states they end in."""

    def __init__(self, kind="lstm", body=None, **options):
        super().__init__()
        self.first, self.cells = nn.Linear(5, 6), LAYERS[kind](6, HIDDEN, batch_first=True, **options)
        self.head = nn.Linear(HIDDEN * (1 + options.get("bidirectional", False)), 4)
        self.body = body

    def forward(self, x):
        x = self.first(x).tanh()
        return self.head(self.cells(x)[0][:, -1] if self.body is None else self.body(self, x))


class Steps(nn.Module):
    """A cell that the code calls step by step."""

    def __init__(self, kind):
        super().__init__()
        self.cell, self.head = CELLS[kind](5, HIDDEN), nn.Linear(HIDDEN, 4)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


def sequences(count=60, length=7):
    return torch.randn(count, length, 5, generator=torch.Generator().manual_seed(0)).double()


def copied(model):
    """Every second half of the hidden units does what the first half does: equal rows in all gates."""
    with torch.no_grad():
        for module in model.modules():
            if not isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
                continue
            for parameter in module.parameters():
                gates = parameter.view(-1, HIDDEN, *parameter.shape[1:])
                gates[:, HIDDEN // 2 :] = gates[:, : HIDDEN // 2]
    return model


@pytest.mark.parametrize(
    ("kind", "form"), [*((kind, form) for kind in ("lstm", "gru") for form in FORMS), ("rnn", FORMS[0])]
)
def test_copies_of_hidden_units_lose_nothing_at_half_width(kind, form):
    with seeded(0):
        model, x = copied(Tagger(kind, **form).double().eval()), sequences()
    method = recoup.Paper(ridge=1e-12, weighting="none", classifier=True)
    result = recoup.prune(model, [x], budget=recoup.Budget(width=0.5), method=method, exclude=["first"])
    smaller = result.model
    assert type(smaller) is Tagger and smaller.cells.hidden_size == HIDDEN // 2
    assert smaller.cells.weight_hh_l0.shape[1] == HIDDEN // 2
    with torch.no_grad():
        torch.testing.assert_close(smaller(x), model(x), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind", CELLS)
def test_copies_in_a_cell_lose_nothing_either(kind):
    with seeded(0):
        model, x = copied(Steps(kind).double().eval()), sequences()
    method = recoup.Paper(ridge=1e-12, weighting="none", classifier=True)
    result = recoup.prune(model, [x], budget=recoup.Budget(width=0.5), method=method)
    assert result.model.cell.hidden_size == HIDDEN // 2
    with torch.no_grad():
        torch.testing.assert_close(result.model(x), model(x), rtol=1e-7, atol=1e-7)


def test_copies_lose_nothing_by_the_default_method():
    with seeded(0):
        model, x = copied(Tagger("lstm").eval()), sequences().float()
    smaller = recoup.prune(model, [x], budget=recoup.Budget(width=0.5), exclude=["first"]).model
    assert smaller.cells.hidden_size == HIDDEN // 2
    with torch.no_grad():
        assert (smaller(x) - model(x)).abs().max() < 1e-4 * model(x).abs().max()


def test_what_reads_hidden_units_is_refitted():
    """Refitted in sequence, a half costs less than what is cut alone, in the output's variance."""
    with seeded(0):
        model, x = Tagger("lstm").double().eval(), sequences(200)
    result = recoup.prune(model, [x], budget=recoup.Budget(width=0.5), method="fast", exclude=["first"])
    keep = torch.cat([result.plan.keep[group.name] for group in recoup.trace(model, x).structure.groups])
    bare = recoup.apply(model, plain_cut(recoup.trace(model, x), keep))
    new = sequences(300)[200:]
    with torch.no_grad():
        refitted, cut = ((net(new) - model(new)).square().sum() for net in (result.model, bare))
        torch.testing.assert_close(masked(model, result.plan)(new), result.model(new))  # with its new weights
    assert refitted < 0.2 * cut
    assert {"cells.weight_hh_l0", "head"} <= result.plan.recovery.keys()


def test_the_smaller_layers_are_whole_modules():
    """They train, take other lengths, and save what they compute with; their class is kept."""
    with seeded(0):
        model, x = Tagger("lstm", num_layers=2).double(), sequences()
        smaller = recoup.prune(model, [x], budget=recoup.Budget(width=0.5), exclude=["first"], keep_class=True).model
    cells = smaller.cells
    assert all(a is b for a, b in zip(cells._flat_weights, cells.parameters(), strict=True))
    assert (cells.input_size, cells.hidden_size, cells._flat_weights[0].shape) == (6, 4, (16, 6))
    other = Tagger("lstm", num_layers=2).double()
    other.cells, other.head = nn.LSTM(6, 4, 2, batch_first=True).double(), nn.Linear(4, 4).double()
    other.load_state_dict(smaller.state_dict())
    torch.testing.assert_close(other(x[:3, :5]), smaller(x[:3, :5]))
    smaller(x).sum().backward()
    assert cells.weight_hh_l1.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", LAYERS)
def test_what_is_read_is_what_cells_read_step_by_step(kind):
    """Two layers, both ways, sequence first: the readings against cells of torch's own, layer by layer."""
    torch.manual_seed(0)
    layers = LAYERS[kind](3, 4, num_layers=2, bidirectional=True).double()
    x, seen = torch.randn(6, 2, 3).double(), {}
    names = {id(weight): name for name, weight in layers.named_parameters() if "weight" in name}

    def listener(name):
        return lambda inputs, made, _: seen.update({name: (inputs, made)})

    with torch.no_grad(), Observer({key: listener(name) for key, name in names.items()}):
        layers(x)
    values = x.transpose(0, 1)
    for layer in range(2):
        outputs = []
        for suffix in (f"l{layer}", f"l{layer}_reverse"):
            given = values.flip(1) if "reverse" in suffix else values
            hidden, before = by_cells(CELLS[kind], layers, suffix, given)
            for name, read in (("ih", given), ("hh", before)):
                weight, bias = (getattr(layers, f"{part}_{name}_{suffix}") for part in ("weight", "bias"))
                inputs, made = seen[f"weight_{name}_{suffix}"]
                torch.testing.assert_close(inputs, read)
                torch.testing.assert_close(made, read @ weight.T + bias)
            outputs.append(hidden.flip(1) if "reverse" in suffix else hidden)
        values = torch.cat(outputs, 2)


@torch.no_grad()
def by_cells(cell, layers, suffix, values):
    """Hidden units of every step, and of the step before it."""
    made = cell(values.shape[2], 4).double()
    for name, parameter in made.named_parameters():
        parameter.copy_(getattr(layers, f"{name}_{suffix}"))
    state, found = None, [torch.zeros(len(values), 4).double()]
    for step in values.unbind(1):
        state = made(step, state)
        found.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(found[1:], 1), torch.stack(found[:-1], 1)


@pytest.mark.parametrize("body", [lambda m, x: m.cells(x)[1][0][-1], lambda m, x: m.cells(x)[1][1][0]])
def test_the_states_at_the_end_are_read_unit_by_unit(body):
    with seeded(0):
        model, x = copied(Tagger("lstm", body, num_layers=2).double().eval()), sequences()
    method = recoup.Paper(ridge=1e-12, weighting="none", classifier=True)
    smaller = recoup.prune(model, [x], budget=recoup.Budget(width=0.5), method=method, exclude=["first"]).model
    assert smaller.head.in_features == HIDDEN // 2
    with torch.no_grad():
        torch.testing.assert_close(smaller(x), model(x), rtol=1e-7, atol=1e-7)


def call_of(kind, batch_first, relu=False):
    """A call on sequences of two layers, both ways, and the operation."""
    options = {"nonlinearity": "relu"} if relu else {}
    layers = LAYERS[kind](3, 4, 2, bidirectional=True, batch_first=batch_first, **options).double()
    states = [torch.randn(4, 2 if batch_first else 5, 4).double() for _ in range(2 if kind == "lstm" else 1)]
    weights, first = [weight.detach() for weight in layers.parameters()], torch.randn(2, 5, 3).double()
    target = getattr(torch.ops.aten, {"rnn": "rnn_relu" if relu else "rnn_tanh"}.get(kind, kind)).input
    begin = states if kind == "lstm" else states[0]
    return target, (first, begin, weights, True, 2, 0.0, False, True, batch_first)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("kind", "relu"), [("lstm", False), ("gru", False), ("rnn", False), ("rnn", True)])
def test_steps_and_their_differential_are_those_of_the_operation(kind, relu, batch_first):
    torch.manual_seed(0)
    target, args = call_of(kind, batch_first, relu)
    result = list(target(*args))
    for mine, theirs in zip(step_by_step(target.overloadpacket.__name__, *args), result, strict=True):
        torch.testing.assert_close(mine, theirs)
    push = unrolled(RecordedCall(target, args, (), result, (True, False, True, *[False] * 6)))
    stay = [None, None] if kind == "lstm" else None
    turned = [None, *(torch.randn_like(weight) for weight in args[2][1:])]
    moves = [torch.randn_like(args[0]), stay, turned, *[None] * 6]
    step = 1e-6
    weights = [args[2][0], *(w + step * m for w, m in zip(args[2][1:], turned[1:], strict=True))]
    ahead = target(args[0] + step * moves[0], args[1], weights, *args[3:])
    for move, after, before in zip(push(moves), ahead, result, strict=True):
        torch.testing.assert_close(move, (after - before) / step, rtol=1e-3, atol=1e-4)


def test_states_that_do_not_fit_are_refused_before_torch_reads_beyond_them():
    target, args = call_of("lstm", batch_first=True)
    require_fitting(args)
    few = (args[0], [state[:, :1] for state in args[1]], *args[2:])
    with pytest.raises(RuntimeError, match="do not fit sequences of 2 samples"):
        require_fitting(few)
    graph = torch.fx.Graph()
    node = graph.call_function(target, few)
    with pytest.raises(RuntimeError, match="do not fit"):
        run([node], {}, {}.__getitem__)


def test_an_operation_of_another_kind_reads_nothing():
    assert not list(readings(torch.ops.aten.relu.default, (torch.ones(2),), {}, torch.ones(2)))
    assert Cell(1, 2, 3, None).layers == [(1, 3), (2, None)]


@pytest.mark.parametrize(("kind", "form"), [("gru", FORMS[0]), ("gru", FORMS[3]), ("rnn", FORMS[2])])
def test_macs_are_those_that_torch_counts_whole_and_cut(kind, form):
    """Torch counts the cells of a GRU and of a plain layer as it runs them; an LSTM's are one operation to it."""
    with seeded(0):
        model, x = Tagger(kind, **form).eval(), sequences(3).float()
    found = recoup.trace(model, x)
    structure = found.structure
    assert not structure.others and cost(structure, found.host).macs == counted(model, x)
    orders, counts = random_orders(structure, 1), random_counts(structure, 1)
    keep = structure.refill(keep_of(structure, orders, counts), torch.arange(structure.width))
    smaller = recoup.apply(model, plain_cut(found, keep))
    assert cost(structure, found.host, keep).macs == counted(smaller, x) < counted(model, x)


def test_a_state_that_the_caller_gives_stays():
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells, self.head = nn.GRU(5, HIDDEN, batch_first=True), nn.Linear(HIDDEN, 4)

        def forward(self, x, state):
            return self.head(self.cells(x, state[None].expand(1, len(x), -1))[0])

    said = str(recoup.inspect(Given().eval(), (torch.randn(1, 7, 5), torch.randn(1, HIDDEN))))
    assert "gru in cells begins with a state of fixed size" in said


def test_a_state_that_is_learnt_is_cut():
    class Learnt(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells, self.head = nn.GRU(5, HIDDEN, batch_first=True), nn.Linear(HIDDEN, 4)
            self.state = nn.Parameter(torch.randn(1, 1, HIDDEN))

        def forward(self, x):
            return self.head(self.cells(x, self.state.expand(-1, len(x), -1))[0])

    result = recoup.prune(Learnt().double().eval(), [sequences()], budget=recoup.Budget(width=0.5))
    assert result.model.state.shape == (1, 1, HIDDEN // 2) and result.report.proof.difference < 1e-10


def test_cells_that_project_are_left_alone_by_name():
    with seeded(0):
        model = Tagger("lstm", proj_size=3).eval()
        model.head = nn.Linear(3, 4)
    said = str(recoup.inspect(model, sequences().float()))
    assert "projects its hidden units" in said
    with pytest.raises(LockedError, match="projects its hidden units"):
        recoup.prune(model, [sequences().float()], budget=recoup.Budget(width=0.5))


def test_a_weight_of_several_layers_stays():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.cells = nn.Linear(5, HIDDEN), nn.GRU(HIDDEN, HIDDEN, 2, batch_first=True)
            self.head = nn.Linear(HIDDEN, 4)
            self.cells.weight_hh_l1 = self.cells.weight_hh_l0

        def forward(self, x):
            return self.head(self.cells(self.first(x))[0])

    assert "one weight for several of its layers" in str(recoup.inspect(Tied().eval(), torch.randn(2, 7, 5)))


@pytest.mark.parametrize(("selector", "reason"), [("taylor", "no maps to look at"), ("nisp", "lstm in cells has no")])
def test_a_selector_that_looks_into_the_network_says_what_it_does_not_see(selector, reason):
    with seeded(0):
        model = Tagger("lstm").eval()
    method = recoup.Paper(selector=selector)
    with pytest.raises(UsageError, match=reason):
        recoup.prune(model, [sequences().float()], budget=recoup.Budget(width=0.5), method=method)
