"""A model folder (config.json, safetensors) as a GGUF file that llama.cpp runs: weights only.

There is no tokenizer in the file: it is made for a draft that shares its target's vocabulary, and a
wrong one could only do harm. Weights keep their own type; quantising is the next step's business.
Attention windows of models that llama.cpp runs without one (Mistral, Qwen) are not written: beyond
them such a copy says something else than its source, which costs a draft acceptance, no more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from anydraft.errors import ModelFileError, UnsupportedModelError

_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
"""`model_type` of a config -> architecture in llama.cpp."""
_ROPES = ("default", "linear", "llama3")
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.",
                "model.multi_modal_projector.")  # fmt: skip


def write_gguf(folder: Path, path: Path, name: str) -> None:
    """Write the weights of `folder` to `path`.

    Args:
        name: what the model is called in messages.

    Raises:
        UnsupportedModelError: an architecture or a part of it that this module cannot write.
        ModelFileError: tensors are missing or not readable.
        OSError: `path` cannot be written.
    """
    import gguf

    config = _config(folder, name)
    architecture = _ARCHITECTURES[config.model_type]
    kinds = {
        torch.float32: gguf.GGMLQuantizationType.F32,
        torch.float16: gguf.GGMLQuantizationType.F16,
        torch.bfloat16: gguf.GGMLQuantizationType.BF16,
    }
    writer = gguf.GGUFWriter(path, architecture)
    try:
        _write_config(writer, config, architecture)
        for written, tensor in _tensors(folder, config, architecture, name, shapes_only=True):
            dtype = _stored(tensor)
            writer.add_tensor_info(
                written,
                list(tensor.shape),
                None,
                tensor.numel() * dtype.itemsize,
                raw_dtype=kinds[dtype],
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, tensor in _tensors(folder, config, architecture, name):
            stored = tensor.to(_stored(tensor)).contiguous()
            bits = stored.view(torch.int16) if stored.dtype == torch.bfloat16 else stored
            writer.write_tensor_data(bits.numpy())
    finally:
        writer.close()


def _stored(tensor: torch.Tensor) -> torch.dtype:
    """Vectors (norms, biases) are kept in float32, which is what llama.cpp computes them in."""
    return torch.float32 if tensor.dim() < 2 else tensor.dtype


# --- config ---------------------------------------------------------------------------------------


def _config(folder: Path, name: str) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError(f"{name} is quantised already; a self draft needs its weights")
    config = config.get_text_config()
    if config.model_type not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"a quantised copy of {name} cannot be made here: its architecture is "
            f"{config.model_type}, and those that can are {', '.join(_ARCHITECTURES)}. Convert it "
            "with llama.cpp's convert_hf_to_gguf.py and llama-quantize, and give that file as draft"
        )
    for rope in _ropes(config).values():
        if (kind := rope.get("rope_type", "default")) not in _ROPES:
            raise UnsupportedModelError(
                f"a quantised copy of {name} cannot be made here: its positions are of type "
                f"{kind!r}, and those that can be written are {', '.join(_ROPES)}"
            )
    return config


def _ropes(config: Any) -> dict[str, dict[str, Any]]:
    """Kind of layer -> RoPE parameters; one kind, "full_attention", where all layers are alike."""
    found = dict(config.rope_parameters)
    return found if "full_attention" in found else {"full_attention": found}


def _head_dim(config: Any) -> int:
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


def _write_config(writer: Any, config: Any, architecture: str) -> None:
    import gguf

    head = _head_dim(config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    ropes = _ropes(config)
    rope = ropes["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([k == "sliding_attention" for k in config.layer_types])
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
        if config.final_logit_softcapping:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_tokenizer_model("none")


def _frequency_factors(config: Any) -> torch.Tensor | None:
    """By how much each rotary frequency is divided (Llama 3.1's long contexts)."""
    rope = _ropes(config)["full_attention"]
    if rope.get("rope_type") != "llama3":
        return None
    head, old = _head_dim(config), rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    factors = []
    for pair in range(0, head, 2):
        turns = old / (2 * math.pi * rope["rope_theta"] ** (pair / head))  # within the old context
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(factors)


# --- weights --------------------------------------------------------------------------------------


def _tensors(
    folder: Path, config: Any, architecture: str, name: str, shapes_only: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values as llama.cpp wants them, one at a time.

    Args:
        shapes_only: values are on the meta device: nothing is read.
    """
    import gguf
    from safetensors import SafetensorError, safe_open

    names = gguf.get_tensor_name_map(
        next(a for a, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture),
        config.num_hidden_layers,
    )
    if (factors := _frequency_factors(config)) is not None:
        yield "rope_freqs.weight", factors.to("meta" if shapes_only else "cpu")
    for file in weight_files(folder, name):
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():
                    if key.startswith(_OTHER_PARTS):
                        continue
                    plain = key.replace("language_model.", "", 1)
                    if plain == "lm_head.weight" and config.tie_word_embeddings:
                        continue
                    written = names.get_name(plain, try_suffixes=(".weight", ".bias"))
                    if written is None:
                        raise UnsupportedModelError(
                            f"a quantised copy of {name} cannot be made here: its tensor {key} is "
                            "not known of this architecture"
                        )
                    if shapes_only:
                        yield written, _outline(opened.get_slice(key))
                    else:
                        yield written, _changed(opened.get_tensor(key), written, config)
        except SafetensorError as error:
            raise ModelFileError(f"{file} cannot be read: {error}") from error


def weight_files(folder: Path, name: str) -> list[Path]:
    """The safetensors files of a model folder.

    Raises:
        ModelFileError: there are none, or not all.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [folder / file for file in sorted(set(places.values()))]
    else:
        files = [folder / "model.safetensors"]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelFileError(
            f"a quantised copy of {name} is made from safetensors, and {folder} holds no "
            + ", ".join(missing[:3])
        )
    return files


def _outline(part: Any) -> torch.Tensor:
    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    kind = kinds.get(part.get_dtype())
    if kind is None:
        raise UnsupportedModelError(
            f"weights of type {part.get_dtype()} cannot be copied; F32, F16 and BF16 can"
        )
    return torch.empty(part.get_shape(), dtype=kind, device="meta")


def _changed(tensor: torch.Tensor, written: str, config: Any) -> torch.Tensor:
    """What llama.cpp stores differently."""
    architecture = _ARCHITECTURES[config.model_type]
    part = written.split(".")[-2]
    if architecture == "gemma3" and part.endswith("norm"):
        return tensor.float() + 1  # transformers adds the 1 when it runs
    if architecture == "llama" and part in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
        # The halves of each rotary pair lie apart in transformers, side by side in llama.cpp.
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, -1)
        return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor
