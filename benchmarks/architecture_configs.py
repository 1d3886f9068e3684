"""Small configurations of transformers' architectures, each with a sample batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import architecture_samples as samples
from architecture_samples import LENGTH, VOCABULARY, Sample


class Architecture(NamedTuple):
    """The configuration of a model class, and the function that makes a batch for it."""

    config: dict[str, Any]
    sample: Callable[[], Sample]


_TOKENS = dict(pad_token_id=0, bos_token_id=0, eos_token_id=0)
_SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
_PLAIN = _SIZES | _TOKENS | dict(vocab_size=VOCABULARY, max_position_embeddings=64)
_GROUPED = _PLAIN | dict(num_key_value_heads=2)
_HEADS = _GROUPED | dict(head_dim=8)
_EXPERTS = dict(num_experts_per_tok=2, experts_implementation="batched_mm")
_MOE = _EXPERTS | dict(num_experts=4, moe_intermediate_size=32)
_BERT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
_GPT = dict(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64) | dict(
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
)
_NO_DROPOUT = dict(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)
_HIDDEN = dict(hidden_dropout=0.0, attention_dropout=0.0)
_TWO_STACKS = (
    _NO_DROPOUT
    | _TOKENS
    | dict(vocab_size=VOCABULARY, d_model=32, max_position_embeddings=64)
    | dict(encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64)
    | dict(encoder_attention_heads=4, decoder_attention_heads=4, decoder_start_token_id=0)
    | dict(encoder_layerdrop=0.0, decoder_layerdrop=0.0)
)
_T5 = dict(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4) | dict(
    dropout_rate=0.0, decoder_start_token_id=0
)
_PATCHES = _SIZES | _BERT | dict(image_size=16, patch_size=4)
_WINDOWS = (
    _BERT
    | dict(image_size=32, patch_size=4, embed_dim=16, depths=[2, 2])
    | dict(num_heads=[2, 4], window_size=4, drop_path_rate=0.0)
)
_CONVOLUTIONS = dict(hidden_sizes=[16, 32], depths=[1, 2], num_stages=2, image_size=32)
_STAGES = dict(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1])
_AUDIO = (
    _SIZES
    | _HIDDEN
    | dict(vocab_size=32, conv_dim=(16, 16), conv_stride=(4, 2), conv_kernel=(8, 4))
    | dict(num_feat_extract_layers=2, num_conv_pos_embeddings=8)
    | dict(num_conv_pos_embedding_groups=4, activation_dropout=0.0, feat_proj_dropout=0.0)
    | dict(layerdrop=0.0, apply_spec_augment=False, final_dropout=0.0)
)
_TOWERS = dict(
    text_config=_SIZES | _TOKENS | _BERT | dict(vocab_size=VOCABULARY, max_position_embeddings=16),
    vision_config=_SIZES | dict(image_size=16, patch_size=4),
)
_LINEAR_HEADS = dict(linear_num_value_heads=4, linear_num_key_heads=2) | dict(
    linear_key_head_dim=8, linear_value_head_dim=8
)
_LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8) | dict(
    v_head_dim=8
)
_DECODERS: dict[str, dict[str, Any]] = {
    "ArceeForCausalLM": _GROUPED,
    "BloomForCausalLM": dict(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4) | _HIDDEN,
    "CodeGenForCausalLM": _GPT | dict(rotary_dim=4, n_ctx=64),
    "CohereForCausalLM": _GROUPED,
    "DeepseekV3ForCausalLM": _PLAIN
    | _LATENT
    | _EXPERTS
    | dict(num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1)
    | dict(moe_intermediate_size=32, first_k_dense_replace=1),
    "DiffLlamaForCausalLM": _GROUPED,
    "Ernie4_5ForCausalLM": _HEADS,
    "Exaone4ForCausalLM": _GROUPED,
    "FalconForCausalLM": _PLAIN | _HIDDEN,
    "GemmaForCausalLM": _HEADS,
    "Gemma2ForCausalLM": _HEADS | dict(sliding_window=8),
    "Gemma3ForCausalLM": _HEADS | dict(sliding_window=8),
    "GlmForCausalLM": _HEADS,
    "Glm4ForCausalLM": _HEADS,
    "GPT2LMHeadModel": _GPT,
    "GPTBigCodeForCausalLM": _GPT,
    "GPTJForCausalLM": _GPT | dict(rotary_dim=4),
    "GPTNeoForCausalLM": _PLAIN
    | dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=8)
    | dict(resid_dropout=0.0, embed_dropout=0.0, attention_dropout=0.0),
    "GPTNeoXForCausalLM": _PLAIN | _HIDDEN,
    "GptOssForCausalLM": _HEADS | _EXPERTS | dict(num_local_experts=4, sliding_window=8),
    "GraniteForCausalLM": _GROUPED,
    "HeliumForCausalLM": _HEADS,
    "JetMoeForCausalLM": dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2)
    | dict(intermediate_size=64, num_key_value_heads=4, kv_channels=8, num_local_experts=4),
    "Lfm2ForCausalLM": _GROUPED | dict(layer_types=["conv", "full_attention"]),
    "LlamaForCausalLM": _GROUPED,
    "Llama4ForCausalLM": _HEADS | dict(intermediate_size_mlp=64, num_local_experts=2),
    "MambaForCausalLM": dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2)
    | dict(state_size=8),
    "Mamba2ForCausalLM": dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2)
    | dict(state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=8),
    "MistralForCausalLM": _GROUPED | dict(sliding_window=8),
    "MixtralForCausalLM": _GROUPED | _EXPERTS | dict(num_local_experts=4),
    "MptForCausalLM": dict(vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4)
    | dict(max_seq_len=64),
    "NemotronForCausalLM": _HEADS,
    "OlmoForCausalLM": _GROUPED,
    "Olmo2ForCausalLM": _GROUPED,
    "OlmoeForCausalLM": _GROUPED | _MOE,
    "OPTForCausalLM": _PLAIN | _NO_DROPOUT | dict(ffn_dim=64, word_embed_proj_dim=32),
    "PersimmonForCausalLM": _PLAIN,
    "PhiForCausalLM": _GROUPED | dict(resid_pdrop=0.0, embd_pdrop=0.0),
    "Phi3ForCausalLM": _GROUPED,
    "Qwen2ForCausalLM": _GROUPED,
    "Qwen2MoeForCausalLM": _GROUPED | _MOE | dict(shared_expert_intermediate_size=32),
    "Qwen3ForCausalLM": _HEADS,
    "Qwen3MoeForCausalLM": _HEADS | _MOE,
    "Qwen3NextForCausalLM": _HEADS
    | _MOE
    | _LINEAR_HEADS
    | dict(shared_expert_intermediate_size=32)
    | dict(layer_types=["linear_attention", "full_attention"]),
    "RwkvForCausalLM": dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2)
    | dict(context_length=64),
    "SmolLM3ForCausalLM": _GROUPED,
    "StableLmForCausalLM": _PLAIN | dict(num_key_value_heads=4),
    "Starcoder2ForCausalLM": _GROUPED | dict(residual_dropout=0.0, embedding_dropout=0.0),
}
_ENCODERS: dict[str, Architecture] = {
    "AlbertForMaskedLM": Architecture(_PLAIN | _BERT | dict(embedding_size=16), samples.text),
    "BertForMaskedLM": Architecture(_PLAIN | _BERT, samples.text),
    "BigBirdForMaskedLM": Architecture(
        _PLAIN | _BERT | dict(attention_type="original_full"), samples.text
    ),
    "CamembertForQuestionAnswering": Architecture(_PLAIN | _BERT, samples.questions),
    "DebertaV2ForSequenceClassification": Architecture(_PLAIN | _BERT, samples.sentences),
    "DistilBertForMaskedLM": Architecture(
        dict(vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=64)
        | dict(dropout=0.0, attention_dropout=0.0),
        samples.text,
    ),
    "ElectraForSequenceClassification": Architecture(
        _PLAIN | _BERT | dict(embedding_size=16), samples.sentences
    ),
    "ErnieForMaskedLM": Architecture(_PLAIN | _BERT, samples.text),
    "FNetForMaskedLM": Architecture(_PLAIN | dict(hidden_dropout_prob=0.0), samples.text),
    "FunnelForMaskedLM": Architecture(
        _HIDDEN
        | dict(vocab_size=VOCABULARY, block_sizes=[1, 1], num_decoder_layers=1, d_model=32)
        | dict(n_head=4, d_head=8, d_inner=64, activation_dropout=0.0),
        samples.text,
    ),
    "LongformerForMaskedLM": Architecture(_PLAIN | _BERT | dict(attention_window=8), samples.text),
    "ModernBertForMaskedLM": Architecture(
        _PLAIN | dict(local_attention=8, cls_token_id=0, sep_token_id=0), samples.text
    ),
    "MPNetForMaskedLM": Architecture(_PLAIN | _BERT, samples.text),
    "NystromformerForMaskedLM": Architecture(
        _PLAIN | _BERT | dict(num_landmarks=4, segment_means_seq_len=LENGTH), samples.text
    ),
    "RobertaForMaskedLM": Architecture(_PLAIN | _BERT, samples.text),
    "SqueezeBertForMaskedLM": Architecture(_PLAIN | _BERT | dict(embedding_size=32), samples.text),
    "XLMRobertaForTokenClassification": Architecture(_PLAIN | _BERT, samples.tagged),
    "XLNetLMHeadModel": Architecture(
        dict(vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=64, dropout=0.0),
        samples.text,
    ),
}
_SEQUENCES: dict[str, Architecture] = {
    "BartForConditionalGeneration": Architecture(_TWO_STACKS, samples.text),
    "LongT5ForConditionalGeneration": Architecture(_T5 | dict(local_radius=4), samples.text),
    "M2M100ForConditionalGeneration": Architecture(_TWO_STACKS, samples.text),
    "MarianMTModel": Architecture(_TWO_STACKS | dict(decoder_vocab_size=VOCABULARY), samples.text),
    "MT5ForConditionalGeneration": Architecture(_T5, samples.text),
    "PegasusForConditionalGeneration": Architecture(_TWO_STACKS, samples.text),
    "T5ForConditionalGeneration": Architecture(_T5, samples.text),
    "WhisperForConditionalGeneration": Architecture(
        _TWO_STACKS | dict(num_mel_bins=8, max_source_positions=16, max_target_positions=32),
        samples.speech,
    ),
}
_OTHERS: dict[str, Architecture] = {
    "BeitForImageClassification": Architecture(
        _PATCHES | dict(drop_path_rate=0.0, out_indices=[0, 1], use_relative_position_bias=True),
        samples.images,
    ),
    "BlipForConditionalGeneration": Architecture(_TOWERS, samples.captions),
    "CLIPModel": Architecture(_TOWERS | dict(projection_dim=16), samples.pairs),
    "ConvNextForImageClassification": Architecture(_CONVOLUTIONS, samples.larger_images),
    "ConvNextV2ForImageClassification": Architecture(_CONVOLUTIONS, samples.larger_images),
    "DeiTForImageClassification": Architecture(_PATCHES, samples.images),
    "Dinov2ForImageClassification": Architecture(_PATCHES, samples.images),
    "HubertForCTC": Architecture(_AUDIO, samples.transcripts),
    "MobileNetV2ForImageClassification": Architecture(
        dict(image_size=32, depth_multiplier=0.25, classifier_dropout_prob=0.0),
        samples.larger_images,
    ),
    "PatchTSTForPrediction": Architecture(
        dict(num_input_channels=2, context_length=32, patch_length=8, patch_stride=8, d_model=16)
        | dict(num_hidden_layers=2, num_attention_heads=4, ffn_dim=32, prediction_length=8),
        samples.series,
    ),
    "RegNetForImageClassification": Architecture(
        _STAGES | dict(groups_width=8), samples.larger_images
    ),
    "ResNetForImageClassification": Architecture(
        _STAGES | dict(layer_type="basic"), samples.larger_images
    ),
    "SegformerForSemanticSegmentation": Architecture(
        _BERT
        | dict(num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32])
        | dict(patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2])
        | dict(decoder_hidden_size=16, drop_path_rate=0.0, classifier_dropout_prob=0.0),
        samples.segmented,
    ),
    "SiglipModel": Architecture(_TOWERS, samples.pairs),
    "SwinForImageClassification": Architecture(_WINDOWS, samples.larger_images),
    "Swinv2ForImageClassification": Architecture(_WINDOWS, samples.larger_images),
    "ViltForQuestionAnswering": Architecture(
        _PLAIN | _PATCHES | dict(num_labels=4), samples.visual_questions
    ),
    "ViTForImageClassification": Architecture(_PATCHES, samples.images),
    "ViTMAEForPreTraining": Architecture(
        _PATCHES
        | dict(decoder_hidden_size=16, decoder_num_hidden_layers=1)
        | dict(decoder_num_attention_heads=2, decoder_intermediate_size=32),
        samples.masked_images,
    ),
    "Wav2Vec2ForSequenceClassification": Architecture(_AUDIO, samples.sounds),
}
ARCHITECTURES: dict[str, Architecture] = {
    **{name: Architecture(config, samples.text) for name, config in _DECODERS.items()},
    **_ENCODERS,
    **_SEQUENCES,
    **_OTHERS,
}
