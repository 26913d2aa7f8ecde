"""Calls with the wrong things in every place: each ends in an error of ours that names the thing, early and alone."""

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup import Budget, RecoupError, errors
from recoup.channels.bias_places import place_of_bias
from tests.zoo import seeded

HALF = Budget(width=0.5)


class Net(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3), nn.Linear(6, classes)

    def forward(self, x):
        return self.head(self.features(self.a(x)))

    def features(self, x):
        return self.b(x.relu()).relu().mean((2, 3))


def build(kind=Net):
    with seeded(0):
        return kind().eval()


def images(count=20, channels=3, size=8):
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(1))


def kind_of(value):
    """A name that is the same in every process."""
    return type(value).__name__


def labels(count=20):
    return torch.arange(count) % 4


class Untouchable:
    """Data that must not be read."""

    def __iter__(self):
        pytest.fail("work was begun")


class Silent(Net):
    """A model that must not be run."""

    def forward(self, x):
        pytest.fail("work was begun")


def shown(value):
    return re.sub(r"[^\w.]+", "-", re.sub(r" at 0x\w+", "", repr(value)))[:40]


def cases(table):
    return [
        pytest.param(name, value, message, id=f"{name}={shown(value)}")
        for name, rows in table.items()
        for value, message in rows
    ]


WRONG_OPTIONS = {
    "tolerance": [
        ("1", r"tolerance must be a number of points, got '1' \(str\)"),
        (True, r"tolerance must be a number of points, got True \(bool\)"),
        ([1], "tolerance must be a number"),
        (1 + 0j, "tolerance must be a number"),
        (torch.tensor(1.0), "tolerance must be a number"),
        (Net, "tolerance must be a number of points, got the class Net"),
        (math.nan, "tolerance must be above 0 points, got nan"),
        (-math.inf, "tolerance must be above 0"),
        (math.inf, "without end"),
    ],
    "budget": [
        (0.5, r"budget must be a Budget, such as recoup.Budget\(macs=0.5\), got 0.5 \(float\)"),
        ("half", "budget must be a Budget"),
        ({"macs": 0.5}, "budget must be a Budget"),
        (True, "budget must be a Budget"),
        ([HALF], "budget must be a Budget"),
        (Budget, "budget must be a Budget.*the class Budget"),
    ],
    "widths": [
        (5, "widths must be a dict of channels by name"),
        (["a"], "widths must be a dict"),
        ("a", "widths must be a dict"),
        ([("a", 2)], "widths must be a dict"),
        ({1: 2}, r"every name in widths must be a text, got 1 \(int\)"),
        ({None: 2}, "every name in widths must be a text"),
        ({"a": "x"}, r"widths\['a'\] must be a whole number"),
        ({"a": 2.0}, r"widths\['a'\] must be a whole number"),
        ({"a": True}, r"widths\['a'\] must be a whole number"),
        ({"a": None}, r"widths\['a'\] must be a whole number"),
        ({"a": 0}, r"widths\['a'\] must be a whole number"),
    ],
    "min_width": [(v, "min_width must be a whole number of at least 1") for v in ("x", 2.5, None, True, 0, math.nan)],
    "only": [
        (5, r"only must be a list of names, got 5 \(int\)"),
        (None, "only must be a list of names"),
        ([5], "every name in only must be a text"),
        ([None], "every name in only must be a text"),
        ([["a"]], "every name in only must be a text"),
        (b"a", "every name in only must be a text"),
        ("a", r"only must be a list of names, got the text 'a'. Write \['a'\]"),
    ],
    "exclude": [
        (True, "exclude must be a list of names"),
        ([b"a"], "every name in exclude must be a text"),
        (Net, "exclude must be a list of names, got the class Net"),
    ],
    "progress": [
        (5, "progress must be a function of .stage, done, total., got 5"),
        (None, "progress must be a function"),
        ([], "progress must be a function"),
        (lambda: None, "progress is called as progress.stage, done, total., which .* does not take"),
        (lambda stage: None, "progress is called as"),
    ],
    "keep_class": [(v, "keep_class must be True or False, or None") for v in ("no", 1, [])],
    "method": [
        (5, "method must be a name or a value such as recoup.Best"),
        (None, "method must be a name or a value"),
        (recoup.Best, "method must be a name or a value.*the class Best"),
        ({"name": "best"}, "method must be a name or a value"),
        ("Best", "unknown method 'Best'.*Did you mean 'best'"),
        (type("Half", (), {"allocate": 1, "seed": 0})(), "method Half lacks selector, weighting, ridge, positions"),
    ],
    "evaluate": [
        (5, "evaluate must be a function from a model to points, got 5"),
        ("accuracy", "evaluate must be a function"),
        (nn.Linear(2, 2), "evaluate must be a function"),
    ],
    "validation": [
        (5, "validation must be an iterable of batches, got one int"),
        ("images", "validation must be an iterable of batches, got one str"),
        (b"images", "validation must be an iterable of batches"),
        (list, "validation must be an iterable of batches"),
        (iter([]), "validation is an iterator that can be read only once"),
    ],
    "model": [
        (None, r"model must be a torch.nn.Module, made and loaded, got None"),
        ("resnet", "model must be a torch.nn.Module"),
        (Net, "model must be a torch.nn.Module, made and loaded, got the class Net"),
        ({"a": 1}, "model must be a torch.nn.Module"),
        (nn.ReLU(), "ReLU has no parameters"),
        (nn.Sequential(nn.LazyConv2d(4, 3)), "Sequential: 0.weight has no size yet. Run the model once"),
        (Net().to("meta"), "Net: a.weight is on the meta device and holds no numbers. Load the weights first"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message"), cases(WRONG_OPTIONS))
def test_an_option_of_the_wrong_kind_is_refused_before_any_work(name, value, message):
    goal = {} if name in ("budget", "tolerance") else {"budget": HALF}
    options = {"model": Silent(), **goal, name: value}
    with pytest.raises(RecoupError, match=message):
        recoup.prune(options.pop("model"), Untouchable(), **options)


WRONG_FIELDS = {
    "Budget": [
        ({name: value}, "the share to keep must lie above 0 and not above 1")
        for name, value in [
            ("width", "x"), ("width", True), ("width", math.nan), ("macs", [0.5]), ("macs", 1j), ("macs", "0.5"),
            ("macs", torch.tensor(0.5)), ("macs", torch.tensor([0.5, 0.5])), ("parameters", -1), ("latency", math.inf),
        ]
    ],
    "Paper": [
        ({"seed": "x"}, "seed must be a whole number"),
        ({"seed": 10**30}, "seed must be below 2 to the power of 63"),
        ({"ridge": None}, "ridge must be a number"),
        ({"ridge": torch.tensor([1.0, 2.0])}, "ridge must be a number"),
        ({"multiple_of": torch.tensor([1, 2])}, "multiple_of must be a whole number"),
        ({"multiple_of": "x"}, "multiple_of must be a whole number"),
        ({"selector": []}, "unknown selector"),
        ({"selector": {}}, "unknown selector"),
        ({"order": []}, "unknown order"),
        ({"weighting": 5}, "unknown weighting"),
        ({"classifier": "no"}, "classifier must be True or False"),
    ],
    "Best": [
        ({"confidence": "x"}, "confidence must be None or lie from 0.5"),
        ({"confidence": True}, "confidence must be None or lie"),
        ({"confidence": [1]}, "confidence must be None or lie"),
        ({"refine": "x"}, "refine must be a number of seconds"),
        ({"refine": None}, "refine must be a number of seconds"),
        ({"refine": True}, "refine must be a number of seconds"),
        ({"outputs": []}, "unknown outputs"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "message"), cases(WRONG_FIELDS))
def test_a_field_of_the_wrong_kind(name, fields, message):
    with pytest.raises(errors.UsageError, match=message):
        getattr(recoup, name)(**fields)


def test_numbers_of_numpy_are_numbers_that_can_be_saved():
    assert type(Budget(width=np.float32(0.5)).share) is float
    assert type(recoup.Goal(tolerance=np.float64(1), evaluate=len).tolerance) is float


def raising(count, error):
    yield from (images(8) for _ in range(count))
    raise error


class BadItems:
    def __len__(self):
        return 3

    def __getitem__(self, place):
        if place == 1:
            raise KeyError("no such file")
        return images(8)


class BadIterator:
    def __iter__(self):
        raise ValueError("no")


class NoIterator:
    def __iter__(self):
        return 5


def nested():
    return torch.nested.nested_tensor([torch.randn(3, 8, 8), torch.randn(3, 8, 8)])


def fake():
    with torch._subclasses.FakeTensorMode():
        return torch.randn(4, 3, 8, 8)


BAD_BATCHES = {
    "raises at once": (lambda: raising(0, ValueError("bad disk")), "batch 1 could not be read .ValueError: bad disk"),
    "raises later": (lambda: raising(2, OSError(5, "io")), "calibration batch 3 could not be read .*io"),
    "an item raises": (BadItems, "calibration batch 2 could not be read .KeyError: 'no such file'"),
    "iter raises": (BadIterator, "calibration batch 1 could not be read .ValueError: no"),
    "iter is none": (NoIterator, "calibration batch 1 could not be read .TypeError"),
    "text": (lambda: "images", "calibration must be an iterable of batches, got one str"),
    "type": (lambda: list, "calibration must be an iterable of batches"),
    "meta": (lambda: [images().to("meta")], "a tensor on the meta device, which has no values"),
    "sparse": (lambda: [images().to_sparse()], "a sparse_coo tensor. Make it dense"),
    "sparse rows": (lambda: [images()[:, 0, 0].to_sparse_csr()], "a sparse_csr tensor"),
    "mkldnn": (lambda: [images().to_mkldnn()], "a mkldnn tensor"),
    "nested": (lambda: [nested()], "a nested tensor"),
    "quantised": (lambda: [torch.quantize_per_tensor(images(), 0.1, 0, torch.quint8)], "a quantised tensor"),
    "fake": (lambda: [fake()], "a FakeTensor, which is no ordinary tensor"),
    "later sparse": (lambda: [images(), images().to_sparse()], "calibration batch 2: a batch holds a sparse_coo"),
    "complex": (lambda: [images().to(torch.complex64)], "Net fails on inputs of shape .*[Cc]omplex"),
    "no dims": (lambda: [torch.tensor(1.0)], r"only single numbers, so it has no dimension for samples.*x\[None\]"),
    "no tensor": (lambda: [images(1).tolist()], "no tensor, so it has no dimension for samples"),
    "an empty dict": (lambda: [{}], "no tensor"),
    "None": (lambda: [None], "a batch of type NoneType cannot be fed to Net"),
    "later None": (lambda: [images(), None], "calibration batch 2: a batch of type NoneType"),
    "a pair of None": (lambda: [(None, None)], "a batch of type NoneType"),
    "a pair with numpy": (lambda: [(images().numpy(), labels())], "a batch of type ndarray"),
    "numpy": (lambda: [images().numpy()], "a batch of type ndarray"),
    "no samples": (lambda: [images(0), images()], r"a batch of shape \(0, 3, 8, 8\) holds no samples"),
    "later no samples": (lambda: [images(), images(0)], "calibration batch 2: .* holds no samples"),
    "dtype": (
        lambda: [images(), images().double()],
        "calibration batch 2 holds a torch.float64 tensor of 4 dims where the first one holds a torch.float32 tensor",
    ),
    "rank": (lambda: [images(), images()[0]], "batch 2 holds a torch.float32 tensor of 3 dims where the first"),
    "later a dict": (
        lambda: [images(), {"x": images()}],
        "batch 2 calls the model with 0 positional inputs and x, the first one with 1 positional inputs",
    ),
    "an unknown name": (lambda: [{"foo": images()}], "unexpected keyword argument 'foo'"),
    "infinite and complex": (lambda: [images() + math.nan * 1j], "fails on inputs|NaN"),
}  # fmt: skip


@pytest.mark.parametrize("method", ["best", "paper"])
@pytest.mark.parametrize("name", BAD_BATCHES)
def test_batches_that_cannot_be_used(name, method):
    make, message = BAD_BATCHES[name]
    with pytest.raises(RecoupError, match=message):
        recoup.prune(build(), make(), budget=HALF, method=method)


def test_the_error_of_the_data_is_the_cause():
    error = OSError(5, "io")
    with pytest.raises(errors.CalibrationError) as caught:
        recoup.prune(build(), raising(2, error), budget=HALF, method="paper")
    assert caught.value.__cause__ is error


class Labelled(torch.Tensor):
    """A tensor with a class of its own, as torchvision's images are."""


class Stubborn(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_args, **_kwargs):
        raise TypeError("never")


def made_in_inference_mode():
    with torch.inference_mode():
        return images()


GOOD_BATCHES = {
    "of a class of its own": lambda: images().as_subclass(Labelled),
    "of a class that refuses": lambda: images().as_subclass(Stubborn),
    "a parameter": lambda: nn.Parameter(images()),
    "with a gradient": lambda: images().requires_grad_(),
    "of inference mode": made_in_inference_mode,
}


@pytest.mark.parametrize("name", GOOD_BATCHES)
def test_tensors_of_any_class_serve_as_plain_ones(name):
    expected, result = (
        recoup.prune(build(), [batch], budget=HALF, method="paper").model for batch in (images(), GOOD_BATCHES[name]())
    )
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), result.parameters(), strict=True))


def test_the_samples_are_counted_by_the_first_tensor_that_has_a_dim():
    class Timed(Net):
        def forward(self, time, x):
            return super().forward(x * time)

    result = recoup.prune(build(Timed), [((torch.tensor(2.0), images()), labels())], budget=HALF, method="paper")
    assert result.report.samples == 20


def test_tensors_that_differ_in_their_first_dimension_are_told():
    class Added(Net):
        def forward(self, x, y):
            return super().forward(x + y)

    with pytest.raises(
        errors.CalibrationError, match=r"\(20, 3, 8, 8\), \(7, 3, 8, 8\), differ in their first dimension"
    ):
        recoup.prune(build(Added), [((images(), images(7)), labels())], budget=HALF, method="paper")


BAD_LABELS = {
    "texts": (["a"] * 40, "the labels of validation batch 1 are no numbers"),
    "None": (None, "are no numbers .*got None"),
    "Nones": ([None] * 40, "are no numbers"),
    "an array of texts": (np.array(["a"] * 40), "are no numbers"),
    "ragged": ([[1], [1, 2]] * 20, "are no numbers"),
    "an object": (object(), "are no numbers"),
    "a dict": ({"label": labels(40)}, "are no numbers"),
    "two": ((labels(40), labels(40)), "are no numbers|must be 40 class numbers"),
    "soft": (torch.rand(40), r"labels must be 40 class numbers.*got \(40,\) torch.float32 in validation batch 1"),
    "one-hot": (F.one_hot(labels(40)), r"got \(40, 4\) torch.int64.*argmax"),
    "complex": (torch.zeros(40, dtype=torch.complex64), "labels must be 40 class numbers"),
    "too few": (labels(39), "labels must be 40 class numbers"),
    "none at all": (labels(0), "labels must be 40 class numbers"),
    "one for all": (torch.tensor(1), "labels must be 40 class numbers"),
    "sparse": (labels(40).to_sparse(), "labels must be 40 class numbers"),
    "meta": (labels(40).to("meta"), "labels must be 40 class numbers"),
    "from one": (labels(40) + 1, "go from 1 to 4, but the model has 4 outputs, numbered 0 to 3"),
    "unknown": (torch.full((40,), -1), "go from -1 to -1, but the model has 4 outputs"),
    "one unknown": (torch.cat([labels(39), torch.tensor([-100])]), "go from -100 to 3"),
}


@pytest.mark.parametrize("name", BAD_LABELS)
def test_labels_that_cannot_be_used(name):
    given, message = BAD_LABELS[name]
    with pytest.raises(errors.CalibrationError, match=message):
        recoup.prune(build(), [images()], validation=[(images(40), given)], budget=HALF, method="paper")
    with pytest.raises(errors.CalibrationError, match=message):
        recoup.accuracy(build(), [(images(40), given)])


@pytest.mark.parametrize("given", [labels(40).tolist(), labels(40).numpy(), labels(40)[:, None], labels(40).byte()])
def test_labels_in_other_forms(given):
    with torch.no_grad():
        expected = 100 * float((build()(images(40)).argmax(1) == labels(40)).double().mean())
    assert recoup.accuracy(build(), [(images(40), given)]) == expected


class Breaking:
    """Validation that can be read once, or not at all."""

    def __init__(self, good):
        self.good = good

    def __iter__(self):
        self.good -= 1
        if self.good < 0:
            raise OSError(5, "io")
        yield images(40), labels(40)


class Once:
    """Hands the same iterator out again and again."""

    def __init__(self):
        self.iterator = iter([(images(40), labels(40))])

    def __iter__(self):
        return self.iterator


BAD_VALIDATION = {
    "empty": ([], "validation gave no batch"),
    "no samples": ([(images(40), labels(40)), (images(0), labels(0))], "validation batch 2: .* holds no samples"),
    "None": ([(images(40), labels(40)), None], "validation batch 2: a batch of type NoneType"),
    "shape": ([(images(40, 5), labels(40))], r"batch 1 with samples of shape \(5, 8, 8\) makes Net fail"),
    "NaN": ([(images(40) * math.nan, labels(40))], "Net returns NaN for validation batch 1"),
    "meta": ([(images(40).to("meta"), labels(40))], "validation batch 1: .*meta device"),
    "later without labels": ([(images(4), labels(4)), [images(4)]], "batch 2 and the first one: one has labels"),
    "later with labels": ([[images(4)], (images(4), labels(4))], "batch 2 and the first one: one has labels"),
    "raises": (Breaking(0), "validation batch 1 could not be read .OSError"),
    "raises the second time": (Breaking(1), "validation batch 1 could not be read .OSError"),
    "can be read once": (Once(), "validation gave no batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_VALIDATION)
def test_validation_that_cannot_be_used(name):
    validation, message = BAD_VALIDATION[name]
    with pytest.raises(errors.CalibrationError, match=message):
        recoup.prune(build(), [images()], validation=validation, tolerance=90.0, method="paper")


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "90", "x", [1], True, 1j, torch.tensor([1.0, 2.0])])
def test_a_measure_that_returns_no_number(value):
    with pytest.raises(errors.CalibrationError, match="must return a finite number of points, it returned"):
        recoup.prune(build(), [images()], evaluate=lambda _: value, tolerance=1.0, method="paper")


@pytest.mark.parametrize("value", [90, torch.tensor(90.0), torch.tensor([90.0]), np.float32(90), np.array(90.0)])
def test_a_measure_may_return_any_kind_of_number(value):
    result = recoup.prune(build(), [images()], evaluate=lambda _: value, tolerance=1.0, method="paper")
    assert result.report.parameters_removed > 0


@pytest.mark.parametrize("good", [0, 1])
@pytest.mark.parametrize("error", [ZeroDivisionError("no"), KeyError("late"), RuntimeError("out of luck")])
def test_a_measure_that_fails(error, good):
    calls = []

    def evaluate(_):
        calls.append(1)
        if len(calls) > good:
            raise error
        return 90.0

    told = "a candidate could not be measured" if good else "evaluate.model. failed on the original model"
    with pytest.raises(RecoupError, match=told) as caught:
        recoup.prune(build(), [images()], evaluate=evaluate, tolerance=1.0, method="paper")
    assert caught.value.__cause__ is error


class Sizes(Net):
    def forward(self, x):
        y = self.a(x)
        return super().forward(x) + (y.sum((0, 2, 3)) > 0).nonzero().numel() * 0


class Masked(Net):
    def forward(self, x):
        return super().forward(x) * x[x > 0].mean()


class Different(Net):
    def forward(self, x):
        return super().forward(x) + self.features(self.a(x)).unique().sum()


class Returned(Net):
    def forward(self, x):
        return super().forward(x), (x > 0).nonzero()


@pytest.mark.parametrize(("kind", "free"), [(Sizes, "b"), (Masked, "ab"), (Different, "a"), (Returned, "ab")])
def test_sizes_that_depend_on_values_lock_what_they_read(kind, free):
    model = build(kind)
    structure = recoup.trace(model, images(2)).structure
    assert {group.name for group in structure.prunable} == set(free)
    result = recoup.prune(model, [images()], budget=HALF, method=recoup.Paper(classifier=True))
    with torch.no_grad():
        got, expected = result.model(images(3)), model(images(3))
    assert type(got) is type(expected) and result.report.proof.difference <= result.report.proof.allowed


class Divided(Net):
    """The number of channels as a tensor: torch.export writes its value down."""

    def forward(self, x):
        y = self.a(x)
        return self.head(self.features(y / torch.tensor(float(y.shape[1]))))


@pytest.mark.parametrize("method", [recoup.Fast(), recoup.Paper(classifier=True)])
@pytest.mark.parametrize("keep_class", [False, True])
def test_a_constant_made_of_a_size(method, keep_class):
    result = recoup.prune(build(Divided), [images()], budget=HALF, method=method, keep_class=keep_class)
    assert result.report.proof.difference <= result.report.proof.allowed
    assert (type(result.model) is Divided) == keep_class
    assert result.model.a.weight.shape[0] == (6 if keep_class else 3)


class Cast(Net):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.a(x)
        return self.head(self.features(y.float()))


class Exempt(Net):
    def forward(self, x):
        y = self.a(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(self.features(y.float()))


class Halved(Net):
    def forward(self, x):
        y = self.a(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.head(self.features(y))
        return y.float()


def test_regions_of_autocast_are_left_alone_and_named():
    assert [group.name for group in recoup.trace(build(Cast), images(2)).structure.prunable] == ["b"]
    result = recoup.prune(build(Cast), [images()], budget=HALF, method="fast")
    assert result.model.b.out_channels == 3 and result.report.proof.difference <= result.report.proof.allowed
    with pytest.raises(errors.LockedError, match="wrap_with_autocast in forward is not understood"):
        recoup.prune(build(Halved), [images()], budget=HALF)


def test_a_region_in_which_autocast_is_off_is_a_part_of_the_graph():
    result = recoup.prune(build(Exempt), [images()], budget=HALF, method="fast")
    assert result.report.method["name"] == "Fast"
    assert result.model.b.out_channels < 6 and result.model.a.out_channels < 6


def test_layers_with_complex_weights_are_locked():
    layers = [nn.Linear(*sizes, dtype=torch.complex64) for sizes in ((8, 6), (6, 4))]
    with pytest.raises(errors.LockedError, match="nothing in Sequential can be pruned"):
        recoup.prune(nn.Sequential(*layers), [torch.randn(20, 8, dtype=torch.complex64)], budget=HALF, method="paper")


class Sliced(nn.Module):
    """A part of a list that has two names: the modules in it have a path that leads nowhere."""

    def __init__(self, bias):
        super().__init__()
        convs = nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3, bias=bias), nn.ReLU(), nn.Conv2d(6, 4, 1)
        self.model = nn.Sequential(*convs)
        self.other = self.model

    def forward(self, x):
        return self.model[-1](self.model[:-1](x)).mean((2, 3))


@pytest.mark.parametrize("bias", [False, True])
def test_a_slice_of_a_list_of_modules(bias):
    with seeded(0):
        model = Sliced(bias).eval()
    traced = recoup.trace(model, images(2))
    where = {product.where for product in traced.structure.products}
    assert "model.slice(None, -1, None).2" in where  # otherwise this tests nothing
    tensors = dict(model.named_parameters(remove_duplicate=False))
    places = [place_of_bias(model, tensors, product) for product in traced.structure.products]
    assert places == ["other.0.bias", "other.2.bias" if bias else None, "other.4.bias"]
    result = recoup.prune(model, [images()], budget=HALF, method="fast")
    assert result.model.model[2].in_channels == 3


def made_inside():
    with torch.inference_mode():
        return build()


def scripted():
    return torch.jit.trace(build(), images(2))


def quantised():
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)))


def partly_quantised():
    model = build()
    model.head = torch.ao.quantization.quantize_dynamic(nn.Sequential(model.head))
    return model


def about_to_be_quantised():
    model = build().train()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    return torch.ao.quantization.prepare_qat(model).eval()


def partly_scripted():
    model = build()
    model.b = torch.jit.script(model.b)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (made_inside, r"Net: a.weight was made in torch.inference_mode.*copy.deepcopy\(model\)"),
        (scripted, "is TorchScript, which has no Python code"),
        (quantised, "Sequential: 0 is quantised .Linear., so there are no plain weights. Prune before you quantise"),
        (partly_quantised, "Net: head.0 is quantised .Linear.*Prune before you quantise"),
        (about_to_be_quantised, "Net: a is quantised .Conv2d.*Prune before you quantise"),
        (partly_scripted, "Net: b is TorchScript, which has no Python code"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_models_that_cannot_be_worked_on(make, message):
    with pytest.raises(RecoupError, match=message):
        recoup.prune(make(), Untouchable(), budget=HALF)


@pytest.mark.parametrize("error", [ValueError, KeyError, NotImplementedError, StopIteration, MemoryError])
def test_a_model_that_fails(error):
    class Failing(Net):
        def forward(self, _):
            raise error("the model says no")

    with pytest.raises(errors.CaptureError, match=f"Failing fails on inputs.*{error.__name__}.*the model says no"):
        recoup.prune(build(Failing), [images()], budget=HALF)


@pytest.fixture(scope="module")
def steps():
    """What the steps hand on to each other."""
    model = build()
    found = {"model": model, "traced": recoup.trace(model, images(2)), "split": recoup.split(model, [images()])}
    found["method"] = recoup.Fast()
    found["calibration"] = recoup.calibrate(found["traced"], found["split"], found["method"])
    found["rankings"] = recoup.rank(found["calibration"])
    found["goal"] = recoup.Goal(budget=HALF)
    found["allocation"] = recoup.allocate(found["calibration"], found["rankings"], found["goal"])
    found["plan"] = recoup.recover(found["calibration"], found["allocation"]).plan
    found["smaller"] = recoup.apply(model, found["plan"])
    found["batches"], found["example"] = [(images(), labels())], images(2)
    found["original"], found["progress"] = model, lambda *_: None
    return found


STEPS = {
    recoup.trace: ("model", "example"),
    recoup.inspect: ("model", "example"),
    recoup.split: ("model", "batches"),
    recoup.calibrate: ("traced", "split", "method", "progress"),
    recoup.rank: ("calibration", "progress"),
    recoup.allocate: ("calibration", "rankings", "goal"),
    recoup.recover: ("calibration", "allocation", "progress"),
    recoup.apply: ("model", "plan"),
    recoup.verify: ("model", "plan", "smaller", "example"),
    recoup.accuracy: ("model", "batches"),
    recoup.divergence: ("model", "original", "batches"),
}
WRONG_THINGS = (None, 5, "x", [], object(), np.zeros(3), Net, lambda: 0)


@pytest.mark.parametrize("wrong", WRONG_THINGS, ids=kind_of)
@pytest.mark.parametrize(
    ("step", "place"), [pytest.param(s, n, id=f"{s.__name__}-{a[n]}") for s, a in STEPS.items() for n in range(len(a))]
)
def test_a_step_refuses_what_no_other_step_made(steps, step, place, wrong):
    arguments = [steps[name] for name in STEPS[step]]
    arguments[place] = wrong
    with pytest.raises(RecoupError):
        step(*arguments)


def test_the_arguments_of_every_step_are_right_by_themselves(steps):
    for step, names in STEPS.items():
        step(*(steps[name] for name in names))


def test_rankings_that_are_not_of_these_groups(steps):
    calibration, rankings, goal = steps["calibration"], steps["rankings"], steps["goal"]
    with pytest.raises(errors.UsageError, match="the ranking of b must be a recoup.Ranking, got None"):
        recoup.allocate(calibration, {"a": rankings["a"]}, goal)
    with pytest.raises(errors.UsageError, match="the ranking of a has 3 channels, not 6"):
        recoup.allocate(calibration, {**rankings, "a": recoup.Ranking(torch.arange(3))}, goal)
    with pytest.raises(errors.UsageError, match="acceptance must measure candidates"):
        recoup.allocate(calibration, rankings, goal, 5)


@pytest.mark.parametrize("answer", [None, "x", object(), {}, Net, torch.zeros(6), [0, 1]], ids=kind_of)
def test_a_selector_that_returns_no_ranking(answer):
    method = recoup.Paper(selector=lambda _: answer)
    with pytest.raises(errors.UsageError, match="a: the selector must return"):
        recoup.prune(build(), [images()], budget=HALF, method=method)


def test_a_selector_that_fails():
    method = recoup.Paper(selector=lambda _: 1 / 0)
    with pytest.raises(errors.UsageError, match="a: the selector failed .ZeroDivisionError"):
        recoup.prune(build(), [images()], budget=HALF, method=method)
