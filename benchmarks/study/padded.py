"""A deeper SmolLM2 that says the same: extra layers whose output projections are zero.

Each extra layer is a copy of a real one except for the two matrices that write to the residual
stream (`o_proj`, `down_proj`), which are zero: it does all the work of a layer and adds nothing. So
a target that is several times as slow, for a draft that agrees with it, can be had from small
weights. It stands in for a big target and is always labelled as padded.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from anydraft import store

FACTOR = 4
_ZERO = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def padded(source: str = "smollm2-135m", factor: int = FACTOR) -> Path:
    """The folder of the padded model, made from a pulled one if it is not there yet.

    Args:
        source: a pulled name or folder of a Llama-like model with one safetensors file.
        factor: how many times as many layers.
    """
    folder = store.cache_dir() / "study" / f"{source}-padded-x{factor}"
    if (folder / "model.safetensors.index.json").exists():
        return folder
    build = folder.with_name(folder.name + ".partial")
    shutil.rmtree(build, ignore_errors=True)
    build.mkdir(parents=True)
    _write(store.resolve(source), build, factor)
    build.rename(folder)
    return folder


def _write(source: Path, build: Path, factor: int) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text())
    real = config["num_hidden_layers"]
    config["num_hidden_layers"] = real * factor
    (build / "config.json").write_text(json.dumps(config))
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja") and file.name not in ("config.json", "anydraft.json"):
            shutil.copy(file, build)
    weights = load_file(source / "model.safetensors")
    extra = {}
    for layer in range(real, real * factor):
        start = f"model.layers.{layer % real}."
        for name, tensor in weights.items():
            if name.startswith(start):
                part = name.removeprefix(start)
                copied = torch.zeros_like(tensor) if part in _ZERO else tensor.clone()
                extra[f"model.layers.{layer}.{part}"] = copied
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    try:
        os.link(source / "model.safetensors", build / first)
    except OSError:
        shutil.copy(source / "model.safetensors", build / first)
    save_file(extra, build / second, metadata={"format": "pt"})
    places = dict.fromkeys(weights, first) | dict.fromkeys(extra, second)
    (build / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
