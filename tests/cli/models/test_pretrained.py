import json

import pytest
import torch
from click.testing import CliRunner

from recoup.cli import main
from recoup.cli.models import open_model
from recoup.errors import ModelError, UsageError
from tests.torchvision_operators import define_missing_torchvision_operators


def saved(folder):
    define_missing_torchvision_operators()
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(vocab_size=256, num_key_value_heads=2, head_dim=4, **sizes)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model.eval()


def test_a_folder_that_transformers_wrote_is_opened(tmp_path):
    model, opened = saved(tmp_path), open_model(f"hf:{tmp_path}")
    assert type(opened.model) is type(model)
    assert opened.input.tokens == 256
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(opened.model(tokens).logits, model(tokens).logits)


def test_a_language_model_is_inspected_and_pruned_by_text(tmp_path):
    saved(tmp_path / "model")
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    seen = CliRunner().invoke(main, ["inspect", f"hf:{tmp_path / 'model'}", "--keep-config", "--json"])
    assert seen.exit_code == 0, seen.output
    data, out = f"text:{tmp_path / 'text.txt'}?block=16", tmp_path / "smaller"
    goal = ["--macs", "0.8", "--method", "fast", "--keep-config"]
    given = ["prune", f"hf:{tmp_path / 'model'}", "--calibration", data, *goal, "-o", str(out), "--json"]
    done = CliRunner().invoke(main, given)
    assert done.exit_code == 0, done.output
    assert json.loads((out / "plan.json").read_text())["settings"]["config.intermediate_size"] < 24


def test_what_is_no_such_folder_is_said(tmp_path):
    with pytest.raises(ModelError, match="Nothing is downloaded"):
        open_model(f"hf:{tmp_path}")
    with pytest.raises(UsageError, match="Leave classes out"):
        open_model(f"hf:{tmp_path}", classes=3)
