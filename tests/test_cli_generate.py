"""`anydraft generate`, with toy models in this process and real ones in another."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import anydraft
import anydraft.profile
from anydraft.cli import render
from anydraft.drafter import Draft
from anydraft.drafters import cross_vocabulary, draft_model
from anydraft.engine import Chunk
from anydraft.vocabulary import Vocabulary
from cli_toys import END, WORDS, Tool, toy

DRAFT = ("--target", "toy", "--draft", "base")
SHORT = ("--prompt", "a steam", "--max-tokens", "20")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    return Tool(monkeypatch, capsys)


def plain_answer(prompt: str = "a steam", **fields: Any) -> Any:
    return anydraft.Engine(toy()).generate(prompt, max_tokens=20, **fields)


def test_answer_to_stdout_and_statistics_to_stderr(tool: Tool) -> None:
    ran = tool("generate", *DRAFT, *SHORT)
    assert ran.code == 0
    assert ran.out == plain_answer().text + "\n"
    for words in (
        "20 tokens in",
        "tokens/s",
        "prompt of 3 tokens",
        "draft base:",
        "rounds",
        "tokens per round",
        "acceptance by position:",
        "time: target",
    ):
        assert words in ran.err
    assert "seed" not in ran.err  # nothing was drawn


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Toys have no files to be known by; here their profiles are kept all the same."""

    def path(target: Any, draft: Any = None) -> Path:
        return tmp_path / f"{'target' if draft is None else 'pair'}.json"

    monkeypatch.setattr(anydraft.profile, "profile_path", path)
    return tmp_path / "pair.json"


def test_costs_are_measured_once_where_auto_decides(tool: Tool, kept: Path) -> None:
    note = "measuring what passes cost"
    assert note not in tool("generate", *DRAFT, *SHORT, "--num-draft-tokens", "2").err
    assert note not in tool("generate", "--target", "toy", "--draft", "lookup", *SHORT).err
    assert not kept.exists()
    first = tool("generate", *DRAFT, *SHORT)
    assert note in first.err
    assert first.out == plain_answer().text + "\n"
    assert kept.exists()
    assert note not in tool("generate", *DRAFT, *SHORT).err
    kept.unlink()
    assert tool("generate", *DRAFT, *SHORT, "--quiet").err == ""
    assert kept.exists()


def test_quiet_and_plain(tool: Tool) -> None:
    assert tool("generate", *DRAFT, *SHORT, "--quiet").err == ""
    plain = tool("generate", "--target", "toy", *SHORT)
    assert "draft" not in plain.err
    assert plain.out == plain_answer().text + "\n"


def test_prompts_from_a_file_and_from_stdin(tool: Tool, tmp_path: Path) -> None:
    expected = tool("generate", *DRAFT, *SHORT, "--quiet").out
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"a steam\r\n")
    rest = (*DRAFT, "--max-tokens", "20", "--quiet")
    assert tool("generate", *rest, "--prompt-file", str(file)).out == expected
    assert tool("generate", *rest, "--prompt-file", "-", stdin="a steam\n").out == expected
    assert tool("generate", *rest, stdin="a steam").out == expected
    # only one line end is dropped: the others belong to the prompt
    two = tool("generate", *rest, stdin="a steam\n\n").out
    assert two == tool("generate", *rest, "--prompt", "a steam\n").out != expected


def test_json_is_one_object_with_the_documented_names(tool: Tool) -> None:
    ran = tool("generate", *DRAFT, *SHORT, "--json", "--logprobs", "2", "--show-draft")
    result = ran.json
    answer = plain_answer(logprobs=2)
    assert ran.out.count("\n") == 1
    assert result["text"] == answer.text
    assert result["token_ids"] == answer.token_ids
    assert result["finish_reason"] == "length"
    assert result["seed"] is None
    assert set(result["stats"]) >= {
        "tokens_per_second",
        "rounds",
        "draft_n",
        "draft_n_accepted",
        "acceptance",
        "draft_seconds",
        "target_seconds",
        "overhead_seconds",
    }
    assert "choices" not in result
    assert len(result["from_draft"]) == len(result["logprobs"]) == 20
    for entry, expected in zip(result["logprobs"], answer.logprobs, strict=True):
        assert entry["token_id"] == expected.token_id
        assert entry["logprob"] == pytest.approx(expected.logprob)
        assert [top["token_id"] for top in entry["top"]] == [i for i, _ in expected.top]
        assert entry["top"][0]["token"] == WORDS[entry["top"][0]["token_id"]].decode(
            "utf-8", "replace"
        )


def test_every_request_field_reaches_the_engine(
    tool: Tool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Any] = {}
    stream = anydraft.Engine.stream

    def spy(self: Any, *args: Any, **fields: Any) -> Any:
        seen.update(fields)
        return stream(self, *args, **fields)

    monkeypatch.setattr(anydraft.Engine, "stream", spy)
    wanted = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.875,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.25,
        "presence_penalty": 0.75,
        "seed": 11,
        "n": 2,
        "min_tokens": 3,
        "num_draft_tokens": 2,
        "logprobs": 1,
    }
    flags = [w for name, v in wanted.items() for w in (f"--{name.replace('_', '-')}", str(v))]
    ran = tool(
        "generate", *DRAFT, "--prompt", "a", *flags, "--json", "--ignore-eos", "--stop", "x",
        "--stop", "y z",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert {name: seen[name] for name in wanted} == wanted
    assert seen["stop"] == ("x", "y z")
    assert seen["ignore_eos"] is True
    assert seen["prompt"] == b"a"
    fields = set(anydraft.GenerationRequest.__dataclass_fields__)
    assert set(seen) - {"cancelled"} <= fields  # one name for flag, field and argument


def test_runtime_options_reach_the_right_model(tool: Tool) -> None:
    ran = tool(
        "generate", *DRAFT, *SHORT, "--dtype", "float32", "--draft-dtype", "bfloat16",
        "--draft-device", "cpu", "--threads", "2", "--context-length", "99",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert tool.options["toy"] == {"dtype": "float32", "threads": 2, "context_length": 99}
    draft = {"role": "draft", "device": "cpu"}
    assert tool.options["base"] == {**draft, "dtype": "bfloat16", "threads": 2}
    tool("generate", *DRAFT, *SHORT, "--trust-remote-code", "--device", "cpu")
    both = {"device": "cpu", "trust_remote_code": True}
    assert tool.options == {"toy": both, "base": {**draft, **both}}


def test_a_drawn_seed_is_reported_and_gives_the_same_answer(tool: Tool) -> None:
    sampled = (*SHORT, "--temperature", "1")
    first = tool("generate", *DRAFT, *sampled, "--json")
    seed = first.json["seed"]
    assert f"seed: {seed}" in first.err
    again = tool("generate", "--target", "toy", *sampled, "--json", "--seed", str(seed)).json
    assert again["token_ids"] == first.json["token_ids"]
    seeds = {tool("generate", *DRAFT, *sampled, "--json").json["seed"] for _ in range(3)}
    assert len(seeds) == 3


def test_several_answers(tool: Tool) -> None:
    several = (*SHORT, "--temperature", "1", "--seed", "5", "--n", "3")
    result = tool("generate", *DRAFT, *several, "--json").json
    expected = plain_answer(temperature=1.0, seed=5, n=3)
    assert [choice["text"] for choice in result["choices"]] == [a.text for a in expected]
    assert {k: result[k] for k in result["choices"][0]} == result["choices"][0]
    shown = tool("generate", *DRAFT, *several).out
    assert shown == "\n".join(f"[{i}]\n{a.text}\n" for i, a in enumerate(expected, start=1))


def test_chat_template_only_when_asked_for(tool: Tool) -> None:
    rest = ("--target", "instruct", "--draft", "base", *SHORT, "--json")
    engine = anydraft.Engine(toy(3, chat=True))
    messages = [{"role": "user", "content": "a steam"}]
    system = [{"role": "system", "content": "Be a."}, *messages]
    assert (
        tool("generate", *rest).json["token_ids"]
        == engine.generate("a steam", max_tokens=20).token_ids
    )
    for flags, expected in ((["--chat"], messages), (["--system", "Be a."], system)):
        answer = engine.generate(messages=expected, max_tokens=20)
        result = tool("generate", *rest, *flags).json
        assert result["token_ids"] == answer.token_ids
        assert result["stats"]["prompt_tokens"] == answer.stats.prompt_tokens
    assert "--raw" in tool("generate", *rest, "--system", "Be a.", "--raw").err


# --- the draft in colour --------------------------------------------------------------------------


def test_draft_colours_follow_from_draft(tool: Tool) -> None:
    flags = ("generate", "--target", "toy", "--draft", "lookup", "--prompt", "a steam", "--quiet")
    many = (*flags, "--max-tokens", "80", "--num-draft-tokens", "10")
    marked = tool(*many, "--show-draft", "--color", "always").out
    result = tool(*many, "--show-draft", "--json").json
    token_bytes = toy().vocabulary.token_bytes
    assert any(result["from_draft"])
    assert re.sub(r"\x1b\[\d*m", "", marked) == result["text"] + "\n"
    # a half character's halves may have different origins; whole words tell
    green = "".join(re.findall(r"\x1b\[32m(.*?)\x1b\[0m", marked, re.S))
    drafted = b"".join(
        token_bytes[i] or b""
        for i, d in zip(result["token_ids"], result["from_draft"], strict=True)
        if d
    )
    for word in (" steam", " engine", " runs", " water"):
        assert green.count(word) == drafted.decode("utf-8", "replace").count(word)
    # not a terminal: no colour unless it is forced
    assert tool(*many, "--show-draft").out == result["text"] + "\n"
    assert tool(*many, "--color", "always").out == result["text"] + "\n"
    assert "--color" in tool(*many, "--show-draft", "--color", "perhaps").err


def test_spans_of_split_and_broken_characters() -> None:
    pieces = [
        b"a",
        "é".encode()[:1],
        "é".encode()[1:],
        b"\xff",
        "\N{REPLACEMENT CHARACTER}".encode(),
    ]
    vocabulary = Vocabulary.from_tokens(pieces)
    spans = render.DraftSpans(vocabulary)

    def split(ids: list[int], drafted: list[bool], text: str) -> list[tuple[str, bool]]:
        return spans.split(Chunk(tuple(ids), text, None, tuple(drafted), 0, 0))

    assert split([0, 1], [True, False], "a") == [("a", True)]
    assert split([2, 0], [True, True], "éa") == [("é", False), ("a", True)]
    assert split([3, 0], [True, False], "\ufffda") == [("\ufffd", True), ("a", False)]
    assert split([4, 3, 3], [False, True, False], "\ufffd" * 3) == [
        ("\ufffd", False),
        ("\ufffd", True),
        ("\ufffd", False),
    ]
    # half a character at the very end
    assert split([0, 1], [True, False], "a\ufffd") == [("a", True), ("\ufffd", False)]


def test_a_terminal_is_not_steered_by_the_model() -> None:
    assert render.visible("a\x1b[2J\x07\x9b\nb\tc") == "a␛[2J␇\ufffd\nb\tc"


# --- --verify-plain -------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [(), ("--temperature", "1", "--n", "2")])
def test_verify_plain_finds_the_same_tokens(tool: Tool, more: tuple[str, ...]) -> None:
    ran = tool("generate", *DRAFT, *SHORT, *more, "--verify-plain", "--json")
    assert ran.code == 0
    assert "identical: yes" in ran.err
    found = ran.json["verify_plain"]
    assert all(report["identical"] for report in (found if more else [found]))
    assert "plain decoding:" in ran.err


def test_verify_plain_finds_a_wrong_token(
    tool: Tool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A verification that accepts whatever the draft says must be caught."""
    from anydraft import decode

    def gullible(draft_ids: list[int], draw_row: Any) -> list[int]:
        return [*draft_ids, draw_row(len(draft_ids))] if draft_ids else [draw_row(0)]

    monkeypatch.setattr(decode, "match", gullible)
    ran = tool("generate", *DRAFT, *SHORT, "--verify-plain")
    assert ran.code == 1
    assert "identical: NO" in ran.err


def test_verify_plain_states_a_near_tie(
    tool: Tool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from anydraft import identity

    tie = identity.Difference(3, 1, 2, 1e-6, 1e-5)
    report = identity.IdentityReport(False, (tie,), (), 2e-6, 3)
    monkeypatch.setattr(identity, "compare_with_plain", lambda *_: report)
    ran = tool("generate", *DRAFT, *SHORT, "--verify-plain")
    assert ran.code == 0
    assert "near-tie" in ran.err and "1.0e-06" in ran.err


# --- trouble on the way ---------------------------------------------------------------------------


def press(at: int) -> Any:
    """A model that gets a Ctrl-C while it scores the token after `at` others."""
    pressed: list[int] = []

    def before(length: int) -> None:
        if length >= at and not pressed:
            pressed.append(length)
            os.kill(os.getpid(), signal.SIGINT)

    return toy(before=before)


def test_ctrl_c_keeps_the_answer(tool: Tool) -> None:
    whole = plain_answer()
    tool.models["toy"] = press(10)
    ran = tool("generate", *DRAFT, *SHORT)
    assert ran.code == 130
    said = ran.out.removesuffix("\n")
    assert said and whole.text.startswith(said) and said != whole.text
    assert "interrupted" in ran.err and "tokens/s" in ran.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    tool.models["toy"] = press(10)
    ran = tool("generate", *DRAFT, *SHORT, "--json", "--verify-plain")
    assert ran.code == 130
    assert ran.json["finish_reason"] == "interrupted"
    ids = ran.json["token_ids"]
    assert ids and ids == whole.token_ids[: len(ids)]
    assert ran.json["stats"]["generated_tokens"] == len(ids)
    assert "not compared" in ran.err


def test_a_second_ctrl_c_does_not_wait_for_the_round(tool: Tool) -> None:
    def twice(length: int) -> None:
        if length == 10:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    tool.models["toy"] = toy(before=twice)
    ran = tool("generate", *DRAFT, *SHORT, "--json")
    assert ran.code == 130
    assert ran.json["finish_reason"] == "interrupted"
    assert plain_answer().text.startswith(ran.json["text"])


def test_ctrl_c_before_the_first_token(tool: Tool) -> None:
    def twice(length: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    tool.models["toy"] = toy(before=twice)
    ran = tool("generate", *DRAFT, *SHORT, "--json", "--n", "2")
    assert ran.code == 130
    result = ran.json
    assert (result["text"], result["token_ids"], len(result["choices"])) == ("", [], 2)


@pytest.mark.parametrize("module", ["draft_model", "cross_vocabulary"])
def test_a_failing_draft_is_dropped_and_said(
    tool: Tool,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
) -> None:
    kind = {
        "draft_model": draft_model.DraftModelDrafter,
        "cross_vocabulary": cross_vocabulary.CrossVocabularyDrafter,
    }[module]
    if module == "cross_vocabulary":
        other = toy(2)
        other.vocabulary = Vocabulary.from_tokens([bytes([i]) for i in range(256)], name="bytes")
        other.vocab_size = 256
        tool.models["base"] = other
    calls = 0

    def fails(self: Any, batch: Any) -> list[Draft]:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise RuntimeError("the draft's card fell off\nthe bus")
        return [Draft() for _ in batch]

    monkeypatch.setattr(kind, "draft", fails)
    ran = tool("generate", *DRAFT, *SHORT, "--num-draft-tokens", "4", "--json")
    assert ran.code == 0
    assert ran.json["text"] == plain_answer().text
    assert "card fell off" in ran.json["stats"]["draft_error"]
    assert "the target went on alone" in ran.err
    assert "Traceback" not in ran.err
    assert calls == 4


def test_an_error_in_the_middle_keeps_what_was_said(tool: Tool) -> None:
    from anydraft.errors import NumericsError

    def breaks(length: int) -> None:
        if length == 10:
            raise NumericsError("the logits are not numbers")

    tool.models["toy"] = toy(before=breaks)
    ran = tool("generate", "--target", "toy", *SHORT)
    assert ran.code == 5
    assert ran.err.splitlines()[-1] == "anydraft: the logits are not numbers"
    assert ran.out.endswith("\n") and plain_answer().text.startswith(ran.out.removesuffix("\n"))


def test_help_needs_no_runtime() -> None:
    """Neither torch nor transformers is imported, which is what would make it slow."""
    for command in ("generate", "chat", "demo"):
        code = (
            "import sys\nfrom anydraft.cli.main import main\n"
            f"try: main(['{command}', '--help'])\nexcept SystemExit: pass\n"
            "print(sorted({'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules)))"
        )
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert ran.stdout.splitlines()[-1] == "[]", ran.stderr
        assert "--target" in ran.stdout


def test_end_token_ends_the_answer(tool: Tool) -> None:
    result = tool("generate", *DRAFT, "--prompt", "a", "--max-tokens", "300", "--json").json
    assert result["finish_reason"] == "stop"
    assert result["token_ids"][-1] == END


# --- real weights, in a process of their own ------------------------------------------------------


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "anydraft.cli.main", *arguments]


@pytest.mark.slow
def test_real_models_from_the_command_line(gemma_path: Path, smollm_path: Path) -> None:
    ran = subprocess.run(
        command(
            "generate", "--target", "gemma3-270m", "--draft", "smollm2-135m", "--prompt",
            "The steam engine", "--max-tokens", "24", "--temperature", "0.7", "--seed", "3",
            "--json", "--verify-plain",
        ),
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert len(result["token_ids"]) == 24
    assert result["verify_plain"]["passed"]
    assert result["stats"]["draft_n"] > 0


@pytest.mark.slow
def test_ctrl_c_and_a_closed_pipe_with_real_models(smollm_path: Path) -> None:
    arguments = command(
        "generate", "--target", "smollm2-135m", "--prompt", "One, two,", "--max-tokens", "2000",
        "--ignore-eos",
    )  # fmt: skip
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout and running.stderr
        first = os.read(running.stdout.fileno(), 10)
        assert first
        running.send_signal(signal.SIGINT)
        said, errors = running.communicate(timeout=120)
    assert running.returncode == 130
    assert said.endswith(b"\n")
    assert b"interrupted" in errors and b"Traceback" not in errors

    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout and running.stderr
        os.read(running.stdout.fileno(), 10)
        running.stdout.close()
        started = time.monotonic()
        errors = running.stderr.read()
        running.wait(timeout=120)
    assert time.monotonic() - started < 60
    assert running.returncode != 0
    assert b"Traceback" not in errors and b"BrokenPipe" not in errors
