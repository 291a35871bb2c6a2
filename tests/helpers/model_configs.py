"""A tiny configuration of every served architecture, and of its variants. Names begin with the architecture's."""

from transformers import (
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

VOCABULARY, POSITIONS = 61, 256
NAMES = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
BARE = {"vocab_size": VOCABULARY, "initializer_range": 0.25, **NAMES}
SHAPE = BARE | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": POSITIONS,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.01 * i for i in range(8)],
    "long_factor": [1.5 + 0.3 * i for i in range(8)],
    "original_max_position_embeddings": 64,
}


def rope(rope_type: str, **options: float) -> dict:
    return {"rope_type": rope_type, "rope_theta": 1e4, **options}


# for architectures whose heads are as wide as the hidden size allows
WIDE = {name: value for name, value in SHAPE.items() if name != "head_dim"} | {"hidden_size": 64}


CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama, llama3": LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "llama, linear": LlamaConfig(**SHAPE, rope_parameters=rope("linear", factor=4.0)),
    "llama, yarn": LlamaConfig(**SHAPE, rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama, dynamic": LlamaConfig(**SHAPE, rope_parameters=rope("dynamic", factor=2.0)),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "mistral, window": MistralConfig(**SHAPE, sliding_window=7),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, sliding_window=9),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2, window": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": Qwen3Config(**SHAPE),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS),
    "phi": PhiConfig(**WIDE, partial_rotary_factor=0.5),
    "phi3": Phi3Config(**WIDE, sliding_window=11),
    "phi3, longrope": Phi3Config(
        **WIDE,
        original_max_position_embeddings=64,
        rope_parameters=LONG,
    ),
    "gemma2": Gemma2Config(**SHAPE, sliding_window=8, attn_logit_softcapping=2.0, query_pre_attn_scalar=16),
    "gemma3_text": Gemma3TextConfig(
        **SHAPE | {"num_hidden_layers": 3},
        sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        query_pre_attn_scalar=16,
    ),
    "olmo2": Olmo2Config(**WIDE),
    "granite": GraniteConfig(**WIDE, attention_multiplier=0.1, residual_multiplier=0.5),
    "smollm3": SmolLM3Config(**WIDE, no_rope_layers=[1, 0]),
    "gpt_neox": GPTNeoXConfig(
        **{name: value for name, value in WIDE.items() if name != "num_key_value_heads"},
        rope_parameters=rope("default", partial_rotary_factor=0.25),
    ),
    "gpt_oss": GptOssConfig(
        **SHAPE,
        sliding_window=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=64),
    ),
    "falcon": FalconConfig(
        **BARE, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=POSITIONS
    ),
    "falcon, grouped": FalconConfig(
        **BARE,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
        max_position_embeddings=POSITIONS,
    ),
    "falcon, alibi": FalconConfig(
        **BARE,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        multi_query=False,
        alibi=True,
        max_position_embeddings=POSITIONS,
    ),
    "mpt": MptConfig(**BARE, d_model=64, n_heads=4, n_layers=2, max_seq_len=POSITIONS),
    "bloom": BloomConfig(**BARE, hidden_size=96, n_head=6, n_layer=2, seq_length=POSITIONS),
    "gpt2": GPT2Config(**BARE, n_embd=64, n_head=4, n_layer=2, n_positions=POSITIONS),
    "opt": OPTConfig(
        **BARE | {"initializer_range": None},
        init_std=0.25,
        hidden_size=64,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=64,
        max_position_embeddings=POSITIONS,
    ),
}
