"""Methods and guarantees on the command line."""

from __future__ import annotations

import pytest

from cli_toys import Tool

SAMPLED = (
    "generate", "--target", "toy", "--draft", "base", "--prompt", "a steam", "--max-tokens", "20",
    "--temperature", "0.9", "--seed", "3",
)  # fmt: skip


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    return Tool(monkeypatch, capsys)


def test_the_default_is_seed_identical(tool: Tool) -> None:
    plain = tool("generate", *[a for a in SAMPLED[1:] if a not in ("--draft", "base")], "--json")
    drafted = tool(*SAMPLED, "--json")
    assert drafted.json["token_ids"] == plain.json["token_ids"]
    assert (drafted.json["method"], drafted.json["guarantee"]) == ("match", "seed")
    assert "method" not in drafted.err


def test_a_method_by_name(tool: Tool) -> None:
    ran = tool(*SAMPLED, "--method", "same+block", "--json")
    assert ran.code == 0
    assert (ran.json["method"], ran.json["guarantee"]) == ("same+block", "distribution")
    assert ran.json["stats"]["draft_n"] > 0
    assert "method: same+block, distribution-identical" in ran.err
    greedy = tool(*SAMPLED, "--method", "same+block", "--temperature", "0", "--json")
    assert greedy.json["method"] == "match"


def test_auto_says_why(tool: Tool) -> None:
    ran = tool(*SAMPLED, "--guarantee", "distribution")
    assert ran.code == 0
    assert "method: " in ran.err and "-identical: " in ran.err
    assert "method" not in tool(*SAMPLED, "--guarantee", "seed").err


def test_the_drafts_settings(tool: Tool) -> None:
    fixed = (*SAMPLED, "--num-draft-tokens", "4")
    plain = tool(*fixed, "--json").json
    settings = ("--draft-temperature", "0.2", "--draft-min-confidence", "0.3")
    more = ("--draft-max-entropy", "2", "--draft-vocabulary", "60", "--json")
    other = tool(*fixed, *settings, *more).json
    assert other["token_ids"] == plain["token_ids"]
    assert other["stats"]["draft_n"] != plain["stats"]["draft_n"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--method", "tli+match"), "needs no law"),
        (("--method", "tli+rejection"), "use the law 'same'"),
        (("--method", "same+block", "--guarantee", "seed"), "does not give the tokens"),
        (("--method", "same+block", "--verify-plain"), "anydraft verify"),
        (("--guarantee", "text"), "guarantee must be"),
        (("--draft-vocabulary", "few"), "'shared' or a number"),
        (("--draft", "lookup", "--method", "same+block"), "goes with 'match'"),
    ],
)
def test_refusals(tool: Tool, options: tuple[str, ...], words: str) -> None:
    ran = tool(*SAMPLED, *options)
    assert ran.code == 2
    assert words in ran.err
    assert len(ran.err.strip().splitlines()) == 1
