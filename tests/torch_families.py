"""Small random models of each family, and a tokenizer for them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

VOCAB = 96
WINDOW = 12
_SMALL: dict[str, int] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 640,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def small_config(family: str) -> Any:
    """A tiny config of a family, with what is peculiar to it switched on."""
    import transformers as t

    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    if family == "llama":
        return t.LlamaConfig(**_SMALL, attention_bias=True, mlp_bias=True)
    if family == "llama3_rope":
        rope = {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        }  # fmt: skip
        return t.LlamaConfig(**_SMALL, rope_parameters=rope)
    if family == "mistral":
        return t.MistralConfig(**_SMALL, sliding_window=WINDOW)
    if family == "qwen2":
        return t.Qwen2Config(
            **_SMALL, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
        )
    if family == "qwen3":
        return t.Qwen3Config(**_SMALL, head_dim=16)
    if family == "gemma3":
        return t.Gemma3TextConfig(
            **_SMALL, head_dim=16, sliding_window=WINDOW, layer_types=kinds,
            query_pre_attn_scalar=16, final_logit_softcapping=9.0,
        )  # fmt: skip
    if family == "gemma2":  # capped attention scores: no fused pass, no SDPA
        return t.Gemma2Config(
            **_SMALL, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=16,
            attn_logit_softcapping=2.0,
        )  # fmt: skip
    if family == "gpt_oss":  # sinks and experts
        return t.GptOssConfig(
            **_SMALL, head_dim=16, sliding_window=WINDOW, num_local_experts=4,
            num_experts_per_tok=2, layer_types=kinds,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )  # fmt: skip
    if family == "gpt2":
        return t.GPT2Config(
            vocab_size=VOCAB, n_positions=640, n_embd=48, n_layer=3, n_head=4,
            bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
    if family == "gpt_neox":
        small = {k: v for k, v in _SMALL.items() if k != "num_key_value_heads"}
        return t.GPTNeoXConfig(**small)
    if family == "bloom":  # ALiBi: its attention takes no other implementation
        return t.BloomConfig(
            vocab_size=VOCAB, hidden_size=48, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2
        )
    raise ValueError(family)


@cache
def stock_model(family: str) -> Any:
    """Random weights, large enough that positions and windows matter."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(small_config(family), attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.6 if "embed" in name or "wte" in name else 0.25)
    return model.eval()


@cache
def byte_tokenizer() -> Any:
    """A fast tokenizer with VOCAB entries, enough for Vocabulary.from_hf."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 3]
    entries = {"<pad>": 0, "<s>": 1, "</s>": 2} | {c: i + 3 for i, c in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=entries, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
