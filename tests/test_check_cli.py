"""`anydraft check`, from tokenizers on disk to its advice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from anydraft.cli.main import main
from anydraft.vocabulary_report import kind_of
from tokenizers_for_tests import MAKERS

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the tool in this process: (exit code, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        code = caught.value.code
        shown = capsys.readouterr()
        return (code if isinstance(code, int) else 0), shown.out, shown.err

    return call


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with a tokenizer and a config, and no weights."""
    root = tmp_path_factory.mktemp("models")
    paths = {}
    for name in ("byte_level", "sentencepiece_bpe", "wordpiece", "unigram_nfkc"):
        tokenizer: PreTrainedTokenizerBase = MAKERS[name]()
        path: Path = root / name
        tokenizer.save_pretrained(path)
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512}
        (path / "config.json").write_text(json.dumps(config))
        paths[name] = str(path)
    return paths


def test_two_vendors(run: Run, models: dict[str, str]) -> None:
    code, out, err = run(
        "check", "--target", models["byte_level"], "--draft", models["sentencepiece_bpe"]
    )
    assert code == 0 and err == ""
    assert "draft_model       no: only " in out and "cross_vocabulary  yes" in out
    assert "end_of_turn <|im_end|> = </s>" in out
    assert "Tokens of the target that are not one of the draft: " in out
    assert out.rstrip().splitlines()[-1].startswith("Advice: Translated through bytes")


def test_json_says_the_same(run: Run, models: dict[str, str]) -> None:
    code, out, _ = run(
        "check", "--json", "--target", models["byte_level"], "--draft", models["sentencepiece_bpe"]
    )
    result = json.loads(out)
    assert code == 0 and not result["same"]
    assert result["methods"]["cross_vocabulary"] == {"applies": True, "reason": None}
    target = result["target"]
    kinds = sum(target[kind] for kind in ("ordinary", "added", "control", "padding"))
    assert kinds == target["size"] == 512
    lacking = sum(group["count"] for group in target["not_in_the_other"])
    assert lacking == round((1 - target["overlap"]) * (target["ordinary"] + target["added"]))
    assert all(group["samples"] for group in target["not_in_the_other"] if group["count"] > 3)
    assert result["roles_matched"]["eos"] == {"target": "<|im_end|>", "draft": "</s>"}


def test_one_vocabulary(run: Run, models: dict[str, str]) -> None:
    code, out, _ = run("check", "--target", models["byte_level"], "--draft", models["byte_level"])
    assert code == 0 and "draft_model       yes" in out
    assert "Every token of the target is one of the draft." in out
    assert "Advice: One vocabulary" in out


def test_a_draft_that_cannot_serve(run: Run, models: dict[str, str]) -> None:
    code, out, _ = run("check", "--target", models["byte_level"], "--draft", models["wordpiece"])
    assert code == 1
    assert "cross_vocabulary  no: the bytes of the draft's tokens are not certain" in out
    assert "lookup            yes" in out and "--draft lookup" in out.splitlines()[-1]


def test_what_costs_acceptance_is_said(run: Run, models: dict[str, str]) -> None:
    _, out, _ = run("check", "--target", models["byte_level"], "--draft", models["unigram_nfkc"])
    assert "Note: the draft reads text rewritten by NFKC" in out
    assert "Note: the draft has no chat template" in out


def test_bad_input(run: Run, models: dict[str, str], tmp_path: Path) -> None:
    code, out, err = run("check", "--target", models["byte_level"], "--draft", "lookup")
    assert code == 2 and out == "" and "lookup" in err
    code, _, err = run("check", "--target", models["byte_level"], "--draft", str(tmp_path / "no"))
    assert code == 3 and "no" in err
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"], "vocab_size": 9}')
    code, _, err = run("check", "--target", str(tmp_path), "--draft", models["byte_level"])
    assert code == 3 and "needs a decoder" in err


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b" steam", "Latin"),
        ("мир".encode(), "Cyrillic"),
        ("蒸汽".encode(), "Han"),
        ("기관".encode(), "Korean"),
        (b"\xe4\xb8", "parts of a character"),
        (b"42", "digits"),
        (b"\n\n", "white space"),
        ("😀".encode(), "symbols"),
        (b" !=", "symbols"),
    ],
)
def test_kinds_of_tokens(data: bytes, kind: str) -> None:
    assert kind_of(data) == kind


@pytest.mark.slow
def test_the_real_pair(run: Run, gemma_path: Path, smollm_path: Path) -> None:
    code, out, _ = run("check", "--json", "--target", str(gemma_path), "--draft", str(smollm_path))
    result = json.loads(out)
    assert code == 0
    assert result["draft"]["overlap"] == pytest.approx(0.94, abs=0.01)
    assert result["target"]["overlap"] == pytest.approx(0.18, abs=0.01)
    kinds = [group["kind"] for group in result["target"]["not_in_the_other"]]
    assert {"Latin", "Han", "Cyrillic", "Devanagari"} <= set(kinds[:6])
