"""Models of transformers, where it is installed: pruned, reloaded by their library, and writing with their cache."""

import pytest
import torch

import recoup
from tests.torchvision_operators import define_missing_torchvision_operators

define_missing_torchvision_operators()
transformers = pytest.importorskip("transformers")

TOKENS = 64
PLAIN = {
    "vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**PLAIN, "num_key_value_heads": 2}
GPT2 = {"vocab_size": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
T5 = {"vocab_size": TOKENS, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2}
FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", GROUPED),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**T5, "decoder_start_token_id": 0, "pad_token_id": 0}),
    "bert": ("BertForMaskedLM", "BertConfig", PLAIN),
}
HEADS = {"llama", "qwen2", "phi3", "t5"}


def build(family):
    model, config, sizes = FAMILIES[family]
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**{**ids, **sizes})).eval()


def batches(count=4):
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        ids = torch.randint(3, TOKENS, (8, 12), generator=generator)
        mask = torch.ones_like(ids)
        mask[:2, 9:] = 0
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


def require_same_text(model):
    ids = batches(1)[0]["input_ids"][4:6]
    settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids), "eos_token_id": None}
    with_cache, without = (model.generate(ids, use_cache=cached, **settings) for cached in (True, False))
    assert torch.equal(with_cache, without)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_result_comes_back_from_its_folder(family, tmp_path):
    model, given = build(family), batches()
    result = recoup.prune(model, given, budget=recoup.Budget(width=0.5), method="fast", keep_config=True)
    cut = [row.name for row in result.report.groups if row.after < row.before]
    assert any("ttention" in name or "attn" in name for name in cut) == (family in HEADS)
    result.model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    call = {name: value for name, value in given[0].items() if name != "labels" or family == "t5"}
    with torch.no_grad():
        torch.testing.assert_close(again(**call).logits, result.model(**call).logits)
    if family != "bert":
        require_same_text(again)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_layers_of_their_own_widths_write_with_their_cache(family):
    model = build(family)
    result = recoup.prune(model, batches(), budget=recoup.Budget(width=0.5), method="fast")
    assert type(result.model) is type(model)
    assert result.model.config.use_cache
    require_same_text(result.model)
