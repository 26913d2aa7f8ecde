"""What is said of a model that cannot be captured: one paragraph, with the line of the code and the part to prune."""

import traceback

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import CalibrationError, CaptureError

HALF = recoup.Budget(width=0.5)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return self.b(self.a(x).relu())


class Detector(nn.Module):
    """Like torchvision's: a list of images in, boxes for each out."""

    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.heads = nn.Sequential(nn.Linear(8, 200), nn.Linear(200, 4))

    def forward(self, images):
        scores = self.heads(self.backbone(torch.cat(images)).mean((2, 3)))
        return [row[row > 0] for row in scores if row.max() > 0]


class Branching(nn.Module):
    def __init__(self, ask):
        super().__init__()
        self.ask, self.body = ask, nn.Sequential(Backbone(), nn.Conv2d(8, 4, 1))

    def forward(self, x):
        if self.ask(x):
            x = 2 * x
        return self.body(x).mean((2, 3))


def refusal(model, batch):
    with pytest.raises(CaptureError) as caught:
        recoup.inspect(model.eval(), batch)
    return caught.value


def test_a_detector_is_refused_in_one_paragraph_that_names_its_backbone():
    error = refusal(Detector(), [[torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 8)]])
    assert "prune the part that does the heavy work: model.backbone has 24% of the parameters." in str(error)
    assert len(str(error).splitlines()) == 1


def test_a_cause_that_fills_the_screen_is_left_out(monkeypatch):
    def failing(*_, **__):
        raise RuntimeError("\n".join(f"node {n}" for n in range(7000)))

    monkeypatch.setattr(torch.export, "export", failing)
    error = refusal(Backbone(), torch.rand(2, 3, 8, 8))
    assert len("".join(traceback.format_exception(error)).splitlines()) < 40
    assert "RuntimeError: node 0" in str(error)


@pytest.mark.parametrize("ask", [lambda x: x.sum() > 0, lambda x: int(x.argmax()) % 2, lambda x: x.max().item() > 1])
def test_a_branch_on_values_is_named_by_its_line(ask):
    error = refusal(Branching(ask), torch.rand(2, 3, 8, 8))
    lines = {ask.__code__.co_firstlineno, Branching.forward.__code__.co_firstlineno + 1}
    assert any(f"test_refusals.py:{line} (" in str(error) for line in lines)
    assert "asks for the values of a tensor" in str(error)
    assert "choose with torch.where" in str(error)
    assert "model.body.0 has 96% of the parameters" in str(error)


def test_code_that_leaves_torch_is_named_by_its_line():
    class Leaving(Backbone):
        def forward(self, x):
            return self.b(torch.from_numpy(self.a(x).numpy()))

    error = refusal(Leaving(), torch.rand(2, 3, 8, 8))
    assert f"at test_refusals.py:{Leaving.forward.__code__.co_firstlineno + 1} (return self.b(" in str(error)


def test_a_forward_pass_that_fails_names_its_line():
    class Failing(Backbone):
        def forward(self, x):
            return self.b(self.a(x)[:, :4])

    error = refusal(Failing(), torch.rand(2, 3, 8, 8))
    assert f"at test_refusals.py:{Failing.forward.__code__.co_firstlineno + 1} (return" in str(error)


def test_a_mask_of_minus_infinity_is_told_from_a_broken_batch():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x, mask):
            h = self.a(x)
            return self.b((h @ h.transpose(1, 2) + mask).softmax(-1) @ h.relu())

    mask = torch.zeros(6, 5, 5)
    mask[:, :, 3:] = -torch.inf
    batch = {"x": torch.randn(6, 5, 4), "mask": mask}
    with pytest.raises(CalibrationError, match="holds -inf, as a mask does.*Pass a mask of booleans"):
        recoup.calibrate(*_steps(Masked().eval(), batch))
    with pytest.raises(CalibrationError, match="holds NaN or infinite inputs"):
        recoup.calibrate(*_steps(Masked().eval(), {**batch, "mask": -mask}))


def _steps(model, batch):
    return recoup.trace(model, batch), recoup.split(model, [batch]), recoup.Fast()
