import pytest
import torch

from tests.torchvision_operators import define_missing_torchvision_operators

define_missing_torchvision_operators()
pytest.importorskip("torch_pruning")
pytest.importorskip("transformers")
language = pytest.importorskip("benchmarks.language")


def test_every_eighth_topic_is_held_out():
    seen, held = language.texts()
    assert len(held) > 20_000
    assert 4 < len(seen) / len(held) < 12
    assert bytes(held[:200].tolist()) not in bytes(seen.tolist())


def test_blocks_are_pieces_of_the_text():
    text = torch.arange(1000)
    found = language.blocks(text, 5, torch.Generator().manual_seed(0))
    assert found.shape == (5, language.BLOCK)
    assert torch.equal(found - found[:, :1], torch.arange(language.BLOCK).expand(5, -1))


def test_widths_and_macs_are_those_of_the_model():
    model = language.fresh()
    assert language.widths(model) == (384,) * 4 + (8,) * 4 + (96,)
    layer = 2 * 96 * 96 + 2 * 96 * 48 + 3 * 96 * 384
    assert language.macs(model) == 128 * (4 * layer + 96 * 256) + 2 * 128 * 128 * 4 * 96


def test_the_table_has_a_column_for_every_seed():
    rows = [{"method": "best", "seed": seed, "kept": 0.5, "perplexity": 4 + seed / 8} for seed in (0, 1)]
    text = language.table([*rows, {"method": "fast", "seed": 1, "kept": 0.25, "perplexity": 5.0}])
    assert "| fast | 25.0% | - | 5.000 |" in text
    assert "| best | 50.0% | 4.000 | 4.125 |" in text


def test_a_model_that_writes_otherwise_with_its_cache_is_refused():
    model = language.fresh().eval()
    prompts = torch.randint(256, (2, language.PROMPT))
    language.require_same_text(model, prompts)
    model.model.layers[0].self_attn.k_proj.register_forward_hook(
        lambda module, given, out: out * 3.0 if out.shape[1] > 1 else -out
    )
    with pytest.raises(AssertionError):
        language.require_same_text(model, prompts)
