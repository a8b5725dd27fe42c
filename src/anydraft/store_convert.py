"""A GGUF file as a model folder that transformers reads: fp32 safetensors, config and tokenizer.

transformers can load GGUF too, but takes half a minute, and the tokenizer that it derives differs
from the original: SmolLM2's loses the splitting of digits, Gemma's the runs of spaces. Here both
come from the file's own metadata: token types decide what is special, `tokenizer.ggml.pre` how text
is split. Written for the architectures of the catalogue ("llama", "gemma3"); others raise
UnsupportedModelError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from anydraft.errors import ModelFileError, UnsupportedModelError

CONVERSION = 1
"""Version of what this module writes; a folder written by another is converted again."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of `tokenizer.ggml.token_type`."""

_LLAMA_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAMES = {
    "llama": _LLAMA_NAMES,
    "gemma3": {
        **_LLAMA_NAMES,
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_TOP_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}
# What ends a generation besides `tokenizer.ggml.eos_token_id`, by spelling.
_END_SPELLINGS = ("<eos>", "<end_of_turn>", "<|endoftext|>", "<|im_end|>")
# Gemma 3: five sliding layers, then a full one; sliding layers keep a RoPE base of their own.
_GEMMA3_PATTERN = 6
_GEMMA3_LOCAL_ROPE = 10000.0


def convert(gguf_path: Path, folder: Path, progress: Callable[[int, int], None]) -> None:
    """Write model.safetensors (fp32), configs, tokenizer and chat template into `folder`.

    Args:
        gguf_path: the source.
        folder: an existing folder; files in it are overwritten.
        progress: called with (tensors done, tensors in all).

    Raises:
        ModelFileError: the file is no readable GGUF file.
        UnsupportedModelError: an architecture or tokenizer that this module does not know.
        OSError: a file cannot be written.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(gguf_path)
    except (ValueError, KeyError, IndexError) as error:
        raise ModelFileError(f"{gguf_path} is not a readable GGUF file: {error}") from error
    meta = {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")
    }
    architecture = meta.get("general.architecture")
    if architecture not in _LAYER_NAMES:
        raise UnsupportedModelError(
            f"{gguf_path}: cannot convert GGUF architecture {architecture!r}"
        )
    write_tokenizer(meta, folder)
    ends = end_ids(meta)
    _write_json(folder / "config.json", model_config(meta, ends))
    _write_json(folder / "generation_config.json", {**_special_ids(meta), "eos_token_id": ends})
    write_weights(reader.tensors, meta, folder / "model.safetensors", progress)


# --- weights --------------------------------------------------------------------------------------


def write_weights(
    tensors: Iterable[Any], meta: dict[str, Any], path: Path, progress: Callable[[int, int], None]
) -> None:
    """Dequantise `tensors` (of a GGUFReader) to float32 and save them under transformers' names."""
    import gguf
    import numpy as np
    from safetensors.numpy import save_file

    architecture = meta["general.architecture"]
    tensors = list(tensors)
    weights = {}
    for done, tensor in enumerate(tensors, start=1):
        array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if architecture == "gemma3" and tensor.name.endswith("norm.weight"):
            array = array - np.float32(1)  # stored as 1 + w; transformers adds the 1 itself
        if architecture == "llama" and tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            key = "head_count" if tensor.name.endswith("attn_q.weight") else "head_count_kv"
            array = _unpermute(array, meta[f"llama.attention.{key}"])
        weights[_weight_name(tensor.name, architecture)] = np.ascontiguousarray(array)
        progress(done, len(tensors))
    save_file(weights, path, metadata={"format": "pt"})


def _weight_name(name: str, architecture: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _LAYER_NAMES[architecture]:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[architecture][parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _TOP_NAMES:
        return f"model.{_TOP_NAMES[parts[0]]}.{parts[1]}"
    raise UnsupportedModelError(f"cannot convert GGUF tensor {name!r} of a {architecture} model")


def _unpermute(array: Any, heads: int) -> Any:
    """GGUF interleaves the halves of each rotary pair; transformers keeps them apart."""
    half = array.shape[0] // heads // 2
    return array.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(array.shape)


# --- config ---------------------------------------------------------------------------------------


def model_config(meta: dict[str, Any], ends: list[int]) -> dict[str, Any]:
    """config.json of a llama or gemma3 model, from GGUF metadata."""
    architecture = meta["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        return meta.get(f"{architecture}.{key}", default)

    heads = get("attention.head_count")
    config = {
        "dtype": "float32",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length", get("embedding_length") // heads),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": True,
        "use_cache": True,
        **_special_ids(meta),
        "eos_token_id": ends,
    }
    theta = get("rope.freq_base", 10000.0)
    if architecture == "llama":
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **config,
            "hidden_act": "silu",
            "mlp_bias": False,
            "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        }
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **config,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["head_dim"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window": get("attention.sliding_window"),
        "layer_types": [
            "full_attention" if (layer + 1) % _GEMMA3_PATTERN == 0 else "sliding_attention"
            for layer in range(config["num_hidden_layers"])
        ],
        "rope_parameters": {
            "full_attention": {"rope_theta": theta, "rope_type": "default"},
            "sliding_attention": {"rope_theta": _GEMMA3_LOCAL_ROPE, "rope_type": "default"},
        },
    }


def end_ids(meta: dict[str, Any]) -> list[int]:
    """All ids that end a generation: the file's eos and the control tokens spelled like an end."""
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    ends = {meta["tokenizer.ggml.eos_token_id"]} if "tokenizer.ggml.eos_token_id" in meta else set()
    ends |= {
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == CONTROL and token in _END_SPELLINGS
    }
    return sorted(ends)


def _special_ids(meta: dict[str, Any]) -> dict[str, int]:
    names = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
    return {
        name: meta[f"tokenizer.ggml.{key}"]
        for name, key in names.items()
        if f"tokenizer.ggml.{key}" in meta
    }


# --- tokenizer ------------------------------------------------------------------------------------


def write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and, if there is one, chat_template.jinja."""
    kind = (meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre"))
    if kind == ("gpt2", "smollm"):
        pipeline = _byte_level_with_digits(meta)
    elif kind[0] == "llama" and not meta.get("tokenizer.ggml.add_space_prefix", True):
        pipeline = _sentencepiece_bpe(meta)
    else:
        raise UnsupportedModelError("cannot convert GGUF tokenizer {!r}, split {!r}".format(*kind))
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(meta),
        **pipeline,
    }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    tokens = meta["tokenizer.ggml.tokens"]
    spelling = {
        f"{name}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items()
        if f"tokenizer.ggml.{key}_token_id" in meta
    }
    _write_json(
        folder / "tokenizer_config.json",
        {
            # A class of its own would rebuild the pipeline and drop what tokenizer.json says.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": meta[f"{meta['general.architecture']}.context_length"],
            "clean_up_tokenization_spaces": False,
            **spelling,
        },
    )
    if template := meta.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _added_tokens(meta: dict[str, Any]) -> list[dict[str, Any]]:
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def _byte_level_with_digits(meta: dict[str, Any]) -> dict[str, Any]:
    """GPT-2's byte-level BPE where every digit is a pre-token of its own (SmolLM, SmolLM2)."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    merges = [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]]
    return {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": _bpe(meta, merges, unk_token=None),
    }


def _sentencepiece_bpe(meta: dict[str, Any]) -> dict[str, Any]:
    """SentencePiece BPE with byte fallback and no dummy prefix (Gemma)."""
    tokens = meta["tokenizer.ggml.tokens"]
    post_processor = None
    if meta.get("tokenizer.ggml.add_bos_token"):
        bos_id = meta["tokenizer.ggml.bos_token_id"]
        bos = tokens[bos_id]
        single: list[dict[str, Any]] = [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ]
        second = [
            {"SpecialToken": {"id": bos, "type_id": 1}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ]
        post_processor = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": single + second,
            "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
        }
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": post_processor,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": _bpe(
            meta,
            merges_from_scores(meta),
            unk_token=tokens[meta["tokenizer.ggml.unknown_token_id"]],
            byte_fallback=True,
            fuse_unk=True,
        ),
    }


def _bpe(meta: dict[str, Any], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    vocab = {token: index for index, token in enumerate(meta["tokenizer.ggml.tokens"])}
    return {
        "type": "BPE",
        "dropout": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocab,
        "merges": merges,
    }


def merges_from_scores(meta: dict[str, Any]) -> list[list[str]]:
    """BPE merges of a SentencePiece vocabulary: every split of a piece, best score first.

    Only ordinary pieces take part: SentencePiece matches the user-defined ones before it merges.
    Ties between splits of one piece are ordered as transformers' own converter does.
    """
    rows = zip(
        meta["tokenizer.ggml.tokens"],
        meta["tokenizer.ggml.scores"],
        meta["tokenizer.ggml.token_type"],
        strict=True,
    )
    scores = {token: score for token, score, kind in rows if kind == NORMAL}
    ids = {token: index for index, token in enumerate(meta["tokenizer.ggml.tokens"])}
    merges = []
    for piece, score in scores.items():
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        found = [(left, right) for left, right in splits if left in scores and right in scores]
        found.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += [(left, right, score) for left, right in found]
    merges.sort(key=lambda merge: (merge[2], len(merge[0]), len(merge[1])), reverse=True)
    return [[left, right] for left, right, _ in merges]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
