"""Networks that read and write text, as Hugging Face has them."""

from __future__ import annotations

from benchmarks.zoo.beyond.making import hugging_face
from benchmarks.zoo.reading import both, numbers, tokens

WORDS, LENGTH = 100, 12
CODES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": WORDS}
SIZES = {**CODES, "intermediate_size": 64, "max_position_embeddings": 64}
SHARED = {**SIZES, "num_key_value_heads": 2}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENDS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
WIDE = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": WORDS}
SMALL = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS}
READS, WRITES = tokens(WORDS, LENGTH), tokens(WORDS, LENGTH, padded=False)
TRANSLATES = both(READS, decoder_input_ids=numbers(WORDS, 8))

LANGUAGE = {
    "BERT": hugging_face("BertForSequenceClassification", READS, **SIZES),
    "RoBERTa": hugging_face("RobertaForSequenceClassification", READS, **SIZES, **SPECIAL),
    "DistilBERT": hugging_face(
        "DistilBertForSequenceClassification", READS, dim=32, hidden_dim=64, n_layers=2, n_heads=4, vocab_size=WORDS
    ),
    "ELECTRA": hugging_face("ElectraForSequenceClassification", READS, **SIZES, embedding_size=16),
    "DeBERTa": hugging_face("DebertaForSequenceClassification", READS, **SIZES, relative_attention=True),
    "DeBERTaV2": hugging_face("DebertaV2ForSequenceClassification", READS, **SIZES, relative_attention=True),
    "ALBERT": hugging_face("AlbertForSequenceClassification", READS, **SIZES, embedding_size=16),
    "ModernBERT": hugging_face("ModernBertForMaskedLM", READS, **SIZES, **SPECIAL, cls_token_id=3, sep_token_id=4),
    "BART": hugging_face("BartForConditionalGeneration", TRANSLATES, **ENDS, **WIDE, **SPECIAL),
    "T5": hugging_face("T5ForConditionalGeneration", TRANSLATES, **SMALL, decoder_start_token_id=0),
    "T5, gated": hugging_face(
        "T5ForConditionalGeneration", TRANSLATES, **SMALL, decoder_start_token_id=0, feed_forward_proj="gated-gelu"
    ),
    "GPT-2": hugging_face("GPT2LMHeadModel", WRITES, n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=WORDS),
    "GPT-NeoX": hugging_face("GPTNeoXForCausalLM", WRITES, **SIZES),
    "OPT": hugging_face(
        "OPTForCausalLM", WRITES, **CODES, ffn_dim=64, max_position_embeddings=64, word_embed_proj_dim=32
    ),
    "BLOOM": hugging_face("BloomForCausalLM", WRITES, hidden_size=32, n_layer=2, n_head=4, vocab_size=WORDS),
    "Llama": hugging_face("LlamaForCausalLM", WRITES, **SHARED),
    "Qwen2": hugging_face("Qwen2ForCausalLM", WRITES, **SHARED),
    "Qwen3": hugging_face("Qwen3ForCausalLM", WRITES, **SHARED, head_dim=8),
    "Mistral": hugging_face("MistralForCausalLM", WRITES, **SHARED),
    "Mixtral": hugging_face("MixtralForCausalLM", WRITES, **SHARED, num_local_experts=4),
    "Phi3": hugging_face("Phi3ForCausalLM", WRITES, **SHARED, **SPECIAL),
    "Gemma2": hugging_face("Gemma2ForCausalLM", WRITES, **SHARED, head_dim=8),
    "Falcon": hugging_face("FalconForCausalLM", WRITES, **CODES),
    "Mamba": hugging_face("MambaForCausalLM", WRITES, hidden_size=32, num_hidden_layers=2, vocab_size=WORDS),
}
