"""Networks people have: pruned, proven, exported, and run by ONNX Runtime."""

import numpy as np
import onnxruntime
import pytest
import torch

import recoup
from tests.torchvision_operators import define_missing_torchvision_operators

define_missing_torchvision_operators()
import torchvision  # noqa: E402

# Layers of 4608 inputs take the default a minute to rank on one core; surgery and export do not depend on the order.
BY_NORM = recoup.Paper(selector="l2")


@pytest.mark.parametrize(
    ("name", "size", "method"), [("resnet18", 64, BY_NORM), ("mobilenet_v2", 64, "fast"), ("squeezenet1_1", 64, "best")]
)
def test_half_the_macs_go_and_the_rest_exports(name, size, method, tmp_path):
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None, num_classes=10).eval()
    result = recoup.prune(model, [torch.randn(8, 3, size, size)], budget=recoup.Budget(macs=0.5), method=method)
    assert 0.5 <= result.report.macs_removed < 0.6
    assert result.report.proof.difference < 1e-10
    smaller, x = result.model, torch.randn(2, 3, size, size)
    with torch.no_grad():
        expected = smaller(x)
        torch.testing.assert_close(torch.export.export(smaller, (x,)).module()(x), expected, rtol=1e-4, atol=1e-4)
    if name == "resnet18":
        path = str(tmp_path / "model.onnx")
        torch.onnx.export(smaller, (x,), path, dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(output, expected.numpy(), rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_a_transformer_loses_heads_and_hidden_units_and_says_what_stays():
    model = torchvision.models.vit_b_16(weights=None, image_size=32).eval()
    seen = recoup.inspect(model, torch.randn(1, 3, 32, 32))
    assert seen.prunable == 24
    assert sorted({g.row.before for g in seen.groups if not g.row.locked}) == [12, 3072]
    reasons = {reason for group in seen.groups for reason in group.row.reasons}
    assert any("layer_norm in encoder" in reason for reason in reasons)
