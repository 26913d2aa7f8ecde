"""Networks that hear: speech, separation."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.beyond.making import hugging_face, of
from benchmarks.zoo.reading import named, numbers, tensors

SAMPLES, FRAMES = 800, 64  # of a waveform, of a spectrogram
WORDS = 100
ENCODER: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
ENDS: dict[str, Any] = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
WIDE: dict[str, Any] = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
HEARS: dict[str, Any] = {
    "conv_dim": (16, 16, 32),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3,
}
PLACES: dict[str, Any] = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
SHORT: dict[str, Any] = {
    "vocab_size": WORDS,
    "num_mel_bins": 20,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": 20,
}
NARROW: dict[str, Any] = {"msk_num_feats": 16, "msk_num_hidden_feats": 32, "msk_num_layers": 2, "msk_num_stacks": 2}

AUDIO = {
    "Whisper": hugging_face(
        "WhisperForConditionalGeneration",
        named(input_features=tensors((20, FRAMES)), decoder_input_ids=numbers(WORDS, 8)),
        **ENDS,
        **WIDE,
        **SHORT,
        **SPECIAL,
    ),
    "wav2vec2": hugging_face("Wav2Vec2ForCTC", named(input_values=tensors((SAMPLES,))), **ENCODER, **HEARS, **PLACES),
    "HuBERT": hugging_face("HubertForCTC", named(input_values=tensors((SAMPLES,))), **ENCODER, **HEARS, **PLACES),
    "AST": hugging_face(
        "ASTForAudioClassification",
        named(input_values=tensors((FRAMES, 32))),
        **ENCODER,
        max_length=FRAMES,
        num_mel_bins=32,
        patch_size=8,
        frequency_stride=8,
        time_stride=8,
    ),
    "Conv-TasNet": of("torchaudio.models:ConvTasNet", tensors((1, SAMPLES)), 2, 16, 32, **NARROW),
    "Wav2Letter": of("torchaudio.models:Wav2Letter", tensors((13, FRAMES)), 10, "mfcc", 13),
    "DeepSpeech": of("torchaudio.models:DeepSpeech", tensors((1, FRAMES, 13)), 13, 32, 10),
}
