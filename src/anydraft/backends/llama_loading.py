"""Opening GGUF files: options by llama.cpp's names, and every reason to refuse said beforehand."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anydraft.backends.llama_library import Handle, library, load_model
from anydraft.errors import ModelError, UnsupportedModelError
from anydraft.gguf_file import GgufHeader, read_model_header
from anydraft.vocabulary_gguf import ARRAYS, check_tokenizer

_ENCODERS = (
    "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2",
    "jina-bert-v3", "eurobert", "gemma-embedding", "llama-embed", "t5encoder",
)  # fmt: skip
_HEADS = ("eagle3", "dflash", "gemma4-assistant")
_FLASH = {"auto": -1, "off": 0, "on": 1}
_KV_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32,
             "q5_0": 22 / 32, "q4_1": 20 / 32, "q4_0": 18 / 32}  # fmt: skip


EXACT = {
    # Repacked weights have kernels for four rows, and others for one.
    "use_extra_bufts": False,
    # From 8 rows on K-quants take another kernel; from 64 on attention does.
    "n_ubatch": 7,
    # Alone in its context a state's keys lie in the order of their positions, and are summed so.
    "cache_prompt": False,
    # With keys and values of one type, attention over more than 512 keys is split among threads
    # in passes of one token, and only in those.
    "flash_attn": "on",
    "type_k": "f16",
    "type_v": "bf16",
}
"""What exact mode sets, and what else would depend on the width of a pass (llama.cpp, CPU)."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model runs; names as llama.cpp has them.

    Attributes:
        n_ctx: tokens that all states hold together. None: grows as needed, while memory lasts.
        n_seq_max: most states at once.
        n_batch, n_ubatch: most tokens of one llama_decode, and of one pass inside it.
        threads, threads_batch: CPU threads for passes of one token, and of several.
        n_gpu_layers: layers on the GPU; None: all, where the library was built for one.
        type_k, type_v: how keys and values are stored.
        flash_attn: "on", "off" or "auto".
        use_mmap, use_mlock: map the file; keep it in memory.
        use_extra_bufts: repack weights for quicker kernels. None: where that is safe, see
            `safe_to_repack`.
        main_gpu: which one.
        cache_prompt: keep the KV of closed states, and share what a new prompt has in common.
        exact: only kernels whose rows have the same bits at any width of a pass; checked at load.
    """

    n_ctx: int | None = None
    n_seq_max: int = 256
    n_batch: int = 512
    n_ubatch: int = 512
    threads: int | None = None
    threads_batch: int | None = None
    n_gpu_layers: int | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: str = "auto"
    use_mmap: bool = True
    use_mlock: bool = False
    use_extra_bufts: bool | None = None
    main_gpu: int = 0
    cache_prompt: bool = True
    exact: bool = False

    def __post_init__(self) -> None:
        for name in ("n_seq_max", "n_batch", "n_ubatch"):
            _at_least_one(name, getattr(self, name))
        for name in ("n_ctx", "threads", "threads_batch"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        for name in ("type_k", "type_v"):
            _one_of(name, getattr(self, name), _KV_BYTES)
        _one_of("flash_attn", self.flash_attn, _FLASH)
        if self.exact:
            for name, value in EXACT.items():
                object.__setattr__(self, name, value)
        if self.type_v not in ("f32", "f16", "bf16") and self.flash_attn == "off":
            raise ModelError(f"type_v {self.type_v} needs flash attention: leave flash_attn on")


def _at_least_one(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{name} must be a whole number of at least 1, not {value!r}")


def _one_of(name: str, value: Any, known: Any) -> None:
    if value not in known:
        raise ModelError(f"unknown {name} {value!r}; known: {', '.join(known)}")


def open_file(
    path: Path, name: str, options: Options, *, with_tokenizer: bool = True
) -> tuple[GgufHeader, Handle]:
    """Check a file and load it.

    Args:
        with_tokenizer: it must have one.

    Raises:
        ModelFileError, UnsupportedModelError, VocabularyError, ModelError: in words.
    """
    header = read_model_header(path, ARRAYS)
    refuse_unfit(header, name)
    if with_tokenizer:
        check_tokenizer(header, name)
    api = library()
    if options.n_seq_max > (most := api.llama_max_parallel_sequences()):
        raise ModelError(f"n_seq_max is {options.n_seq_max}, and llama.cpp allows {most}")
    _check_memory(header, name, options)
    handle = load_model(path, name, _model_params(options))
    _refuse_stateful(handle, header, name)
    return header, handle


def refuse_unfit(header: GgufHeader, name: str) -> None:
    """Raises UnsupportedModelError for what is no causal language model."""
    kind, architecture = header.meta.get("general.type", "model"), header.architecture
    if architecture == "clip" or kind == "mmproj":
        raise UnsupportedModelError(
            f"{name} is the projector of a multimodal model, not a language model: name the "
            "model's own GGUF file"
        )
    if kind in ("adapter", "imatrix"):
        raise UnsupportedModelError(f"{name} holds no model: it is a file of kind {kind!r}")
    if not architecture:
        raise UnsupportedModelError(f"{name} does not say its architecture; it is no model file")
    if (
        architecture in _ENCODERS
        or header.get("pooling_type", 0)
        or header.get("attention.causal") is False
    ):
        raise UnsupportedModelError(
            f"{name} is an embedding model or encoder ({architecture}): it does not predict the "
            "next token"
        )
    if architecture in _HEADS:
        raise UnsupportedModelError(
            f"{name} is a drafting head ({architecture}), which runs only inside its own target"
        )


def _refuse_stateful(handle: Handle, header: GgufHeader, name: str) -> None:
    api = library()
    if api.llama_model_has_encoder(handle.pointer):
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder model ({header.architecture}); anydraft runs "
            "decoder-only (causal) language models"
        )
    if api.llama_model_is_diffusion(handle.pointer):
        raise UnsupportedModelError(
            f"{name} is a diffusion model ({header.architecture}): it does not go token by token"
        )
    if api.llama_model_is_recurrent(handle.pointer) or api.llama_model_is_hybrid(handle.pointer):
        raise UnsupportedModelError(
            f"{name} has recurrent layers ({header.architecture}): rejected tokens cannot be taken "
            "out of their state, so drafts cannot be undone. anydraft runs attention-only models"
        )


def _model_params(options: Options) -> Any:
    api = library()
    params = api.llama_model_default_params()
    params.load_mode = int(options.use_mmap) + 2 * int(options.use_mlock)  # none, mmap, mlock, both
    repack = options.use_extra_bufts
    params.use_extra_bufts = safe_to_repack() if repack is None else repack
    params.main_gpu = options.main_gpu
    if options.n_gpu_layers is not None:
        params.n_gpu_layers = options.n_gpu_layers
    return params


def safe_to_repack() -> bool:
    """False where the library's repacked kernels use AMX.

    Some virtual machines announce AMX and then fault on its first instruction, which ends the
    process; it cannot be tried out from inside.
    """
    return b"AMX_INT8 = 1" not in library().llama_print_system_info()


def context_params(options: Options, cells: int, sequences: int, outputs: int) -> Any:
    """llama_context_params for so many KV cells, sequences and rows of logits."""
    from gguf import GGMLQuantizationType

    api = library()
    params = api.llama_context_default_params()
    params.n_ctx, params.n_seq_max = cells, sequences
    params.n_batch, params.n_ubatch = options.n_batch, min(options.n_batch, options.n_ubatch)
    params.n_outputs_max = max(outputs, sequences)
    threads = options.threads or default_threads()
    params.n_threads = threads
    params.n_threads_batch = options.threads_batch or threads
    for side in ("type_k", "type_v"):
        setattr(params, side, int(GGMLQuantizationType[getattr(options, side).upper()]))
    params.flash_attn_type = _FLASH[options.flash_attn]
    # Every key of a sliding layer is kept, so that rolling back past the window is exact.
    params.swa_full = True
    params.kv_unified = True
    params.no_perf = True
    return params


def default_threads() -> int:
    """One per physical core that this process may use."""
    import psutil

    cores = psutil.cpu_count(logical=False) or 1
    try:
        return max(1, min(cores, len(os.sched_getaffinity(0))))
    except AttributeError:  # not on this system
        return cores


# --- memory ---------------------------------------------------------------------------------------


def cell_bytes(header: GgufHeader, options: Options) -> float:
    """Memory of one token's keys and values, in bytes; 0 where the metadata does not say."""
    layers = int(header.get("block_count", 0) or 0)
    heads = header.get("attention.head_count", 0) or 0
    kv_heads = header.get("attention.head_count_kv", heads)
    embedding = int(header.get("embedding_length", 0) or 0)
    most = max(heads) if isinstance(heads, list) else int(heads)
    per_head = embedding // most if most else 0
    key = int(header.get("attention.key_length", per_head))
    value = int(header.get("attention.value_length", per_head))
    if header.get("attention.kv_lora_rank"):  # latent attention: one compressed row per layer
        kv_heads, value = 1, 0
        key = int(header.get("attention.kv_lora_rank")) + int(header.get("rope.dimension_count", 0))
    total = sum(kv_heads) if isinstance(kv_heads, list) else int(kv_heads) * layers
    return total * (key * _KV_BYTES[options.type_k] + value * _KV_BYTES[options.type_v])


def free_memory() -> int:
    """Bytes that may be used without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)


def _check_memory(header: GgufHeader, name: str, options: Options) -> None:
    """Refuse an n_ctx whose keys and values cannot fit, before the system kills the process."""
    if options.n_ctx is None or options.n_gpu_layers or library().llama_supports_gpu_offload():
        return
    needed = int(options.n_ctx * cell_bytes(header, options))
    if needed > (free := free_memory()):
        raise ModelError(
            f"{name}: n_ctx {options.n_ctx:,} needs {needed / 1e9:.1f} GB for keys and values, and "
            f"{free / 1e9:.1f} GB are free: choose at most "
            f"{int(options.n_ctx * free / needed):,}, or a smaller type_k and type_v"
        )
