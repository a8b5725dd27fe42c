"""Whatever is wrong with what was typed: one clear line, the right exit code, no traceback.

Models are tiny Llamas with random weights, in folders that are then damaged.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from anydraft import store
from cli_toys import Ran, Tool, toy
from tokenizers_for_tests import byte_level

USAGE, MODEL, CACHE = 2, 3, 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that works."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = byte_level()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def damaged(tiny: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    return Tool(monkeypatch, capsys)


class RealTool(Tool):
    """The real loader."""

    def _load(self, spec: Any, **options: Any) -> Any:
        from anydraft.backends.torch_hf import load

        return load(spec, **options)


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    return RealTool(monkeypatch, capsys)


def generate(tool: Tool, target: Any, *more: str) -> Ran:
    return tool("generate", "--target", str(target), "--prompt", "a", "--max-tokens", "4", *more)


def refused(ran: Ran, code: int, *words: str) -> None:
    assert ran.code == code, ran.err
    assert ran.out == ""
    lines = ran.err.splitlines()
    assert len(lines) == 1, ran.err
    assert lines[0].startswith("anydraft: ")
    assert "Traceback" not in ran.err and "unexpected error" not in ran.err
    for word in words:
        assert word in ran.err, ran.err


def test_the_model_works_undamaged(real: Tool, tiny: Path) -> None:
    ran = generate(real, tiny, "--draft", str(tiny), "--verify-plain", "--ignore-eos")
    assert ran.code == 0, ran.err
    assert "identical: yes" in ran.err


# --- models ---------------------------------------------------------------------------------------


def test_unknown_models(real: Tool, tiny: Path) -> None:
    refused(
        generate(real, "gema3-270m"), MODEL, "no model 'gema3-270m'", "Did you mean gemma3-270m"
    )
    refused(generate(real, tiny, "--draft", "no-such-model"), MODEL, "no-such-model")
    refused(generate(real, ""), MODEL, "name is empty")


def test_a_folder_without_a_model(real: Tool, tmp_path: Path) -> None:
    refused(generate(real, tmp_path), MODEL, "config.json")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 64, b"PK\x03\x04"])
def test_a_broken_gguf(real: Tool, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    refused(generate(real, file), MODEL, "model.gguf")


def test_a_truncated_safetensors_file(real: Tool, damaged: Path) -> None:
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    refused(generate(real, damaged), MODEL, "safetensors")


def test_no_weights(real: Tool, damaged: Path) -> None:
    (damaged / "model.safetensors").unlink()
    refused(generate(real, damaged), MODEL)


def test_no_tokenizer(real: Tool, damaged: Path) -> None:
    (damaged / "tokenizer.json").unlink()
    (damaged / "tokenizer_config.json").unlink()
    refused(generate(real, damaged), MODEL, "tokenizer")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "no-such-kind"}'])
def test_a_broken_config(real: Tool, damaged: Path, text: str) -> None:
    (damaged / "config.json").write_text(text)
    refused(generate(real, damaged), MODEL)


def test_an_encoder_model(real: Tool, damaged: Path) -> None:
    from transformers import BertConfig

    config = BertConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(damaged)
    refused(generate(real, damaged), MODEL, "BertForMaskedLM", "causal")


def test_a_vocabulary_without_an_end_token(real: Tool, damaged: Path) -> None:
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        values = json.loads((damaged / name).read_text())
        values["eos_token_id"] = values["eos_token"] = None
        (damaged / name).write_text(json.dumps(values))
    ran = generate(real, damaged, "--draft", "lookup", "--verify-plain")
    assert ran.code == 0, ran.err
    assert "no end token; the answer ends at --max-tokens (4)" in ran.err


def test_devices_and_dtypes(real: Tool, tiny: Path) -> None:
    refused(generate(real, tiny, "--dtype", "float3"), MODEL, "float3", "bfloat16")
    refused(generate(real, tiny, "--device", "nonsense"), MODEL, "nonsense")


# --- prompts and parameters -----------------------------------------------------------------------


def test_an_empty_prompt(tool: Tool) -> None:
    tool.models["rootless"] = toy(bos=False)
    empty = ("--prompt", "", "--max-tokens", "4")
    refused(tool("generate", "--target", "rootless", *empty), USAGE, "the prompt is empty")
    ran = tool("generate", "--target", "toy", *empty)
    assert ran.code == 0 and ran.out.strip()
    assert "note: the prompt is empty; the model begins at its start token" in ran.err


def test_no_prompt_at_all(tool: Tool) -> None:
    tool.terminal = True
    refused(tool("generate", "--target", "toy"), USAGE, "no prompt: give --prompt")


def test_prompts_that_cannot_be_read(tool: Tool, tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    flags = ("generate", "--target", "toy")
    refused(tool(*flags, "--prompt-file", missing), USAGE, missing, "No such file")
    refused(tool(*flags, "--prompt-file", str(tmp_path)), USAGE, "directory")
    refused(tool(*flags, "--prompt", "a", "--prompt-file", missing), USAGE, "either")
    refused(tool(*flags, "--chat", stdin=b"\xff\xfe"), USAGE, "UTF-8")
    refused(tool(*flags, "--chat", "--prompt", "a"), USAGE, "no chat template")
    assert tool.loads == 1  # only the last needed a model to know


def test_a_prompt_beyond_the_context(tool: Tool, real: Tool, tiny: Path) -> None:
    long = ("--prompt", "a" * 1000, "--max-tokens", "4")
    words = ("tokens and the context of", "shorten it by at least")
    refused(real("generate", "--target", str(tiny), *long), USAGE, *words)
    small = real("generate", "--target", str(tiny), "--context-length", "8", *long)
    refused(small, USAGE, "holds 8;")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--max-tokens", "0"),
        ("--max-tokens", "-5"),
        ("--max-tokens", "99999999999"),
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--temperature", "1e9"),
        ("--top-k", "-1"),
        ("--top-p", "0"),
        ("--top-p", "1.5"),
        ("--min-p", "-0.1"),
        ("--min-p", "2"),
        ("--repetition-penalty", "0"),
        ("--repetition-penalty", "-1"),
        ("--frequency-penalty", "nan"),
        ("--presence-penalty", "1e6"),
        ("--min-tokens", "-1"),
        ("--n", "0"),
        ("--n", "100000"),
        ("--stop", ""),
        ("--num-draft-tokens", "-1"),
        ("--num-draft-tokens", "100000"),
        ("--num-draft-tokens", "many"),
        ("--num-draft-tokens", "2.5"),
    ],
)
def test_parameters_out_of_range(tool: Tool, flag: str, value: str) -> None:
    ran = tool("generate", "--target", "toy", "--draft", "base", "--prompt", "a", flag, value)
    refused(ran, USAGE, flag[2:].replace("-", "_").removesuffix("_"))
    assert tool.loads == 0  # said before anything is loaded
    if flag not in ("--n",):
        refused(tool("chat", "--target", "instruct", flag, value), USAGE)


def test_logprobs_out_of_range(tool: Tool) -> None:
    flags = ("generate", "--target", "toy", "--prompt", "a", "--logprobs")
    refused(tool(*flags, "-1", "--json"), USAGE, "logprobs")
    refused(tool(*flags, "2"), USAGE, "--json")


def test_flags_that_do_not_go_together(tool: Tool) -> None:
    flags = ("generate", "--target", "toy", "--prompt", "a")
    refused(tool(*flags, "--verify-plain"), USAGE, "--draft")
    refused(tool(*flags, "--system", "x", "--raw"), USAGE, "--raw")
    refused(tool(*flags, "--color", "pink"), USAGE, "--color")


@pytest.mark.parametrize("option", ["--threads", "--context-length"])
@pytest.mark.parametrize("value", ["0", "-3"])
def test_runtime_options_out_of_range(real: Tool, tiny: Path, option: str, value: str) -> None:
    refused(generate(real, tiny, option, value), USAGE, option[2:].replace("-", "_"))


@pytest.mark.parametrize("value", ["x", "1.5", ""])
def test_what_is_no_number(tool: Tool, value: str) -> None:
    ran = tool("generate", "--target", "toy", "--prompt", "a", "--max-tokens", value)
    assert ran.code == USAGE
    assert "--max-tokens" in ran.err and "Traceback" not in ran.err


def test_a_missing_target_and_an_unknown_flag(tool: Tool) -> None:
    ran = tool("generate", "--prompt", "a")
    assert ran.code == USAGE and "--target" in ran.err
    ran = tool("generate", "--target", "toy", "--prompt", "a", "--max-token", "3")
    assert ran.code == USAGE and "--max-tokens" in ran.err  # with a suggestion


# --- the cache ------------------------------------------------------------------------------------


def test_an_unwritable_cache(tool: Tool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ANYDRAFT_CACHE", str(tmp_path / "file" / "cache"))
    refused(tool("pull", "smollm2-135m", "-q"), CACHE, "cannot use the cache folder")


def test_a_full_disk(tool: Tool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ANYDRAFT_CACHE", str(tmp_path))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    refused(tool("pull", "smollm2-135m", "-q"), CACHE, "smollm2-135m needs", "1 MB are free")


def test_a_model_that_was_not_pulled(
    real: Tool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ANYDRAFT_CACHE", str(tmp_path))
    refused(generate(real, "smollm2-135m"), MODEL, "run `anydraft pull smollm2-135m`")
