"""`anydraft chat`, driven through standard input, with toy models."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import anydraft
from cli_toys import Ran, Tool, toy

FLAGS = ("chat", "--target", "instruct", "--draft", "base", "--max-tokens", "12")
FLAGS += ("--num-draft-tokens", "4")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    return Tool(monkeypatch, capsys)


def expected_answers(*questions: str, system: str | None = None, **fields: Any) -> list[str]:
    """What plain decoding says, each turn from the whole conversation."""
    engine = anydraft.Engine(toy(3, chat=True))
    messages = [{"role": "system", "content": system}] if system else []
    answers = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        text = engine.generate(messages=messages, **({"max_tokens": 12} | fields)).text
        messages.append({"role": "assistant", "content": text})
        answers.append(text)
    return answers


def shown(answers: list[str]) -> str:
    return "".join(answer + "\n" for answer in answers)


def test_turns_see_what_came_before(tool: Tool) -> None:
    ran = tool(*FLAGS, stdin="a steam\nruns\n\nwater")
    assert ran.code == 0, ran.err
    assert ran.out == shown(expected_answers("a steam", "runs", "water"))
    assert ran.err.count(" tokens/s") == 3
    assert tool(*FLAGS, "--quiet", stdin="a\n").err == ""


def test_sampling_and_system(tool: Tool) -> None:
    ran = tool(*FLAGS, "--temperature", "1", "--seed", "9", "--system", "Be a.", stdin="on\non")
    expected = expected_answers("on", "on", system="Be a.", temperature=1.0, seed=9)
    assert ran.out == shown(expected)


def test_the_kv_of_the_conversation_is_kept(tool: Tool) -> None:
    tool("chat", "--target", "instruct", "--max-tokens", "12", stdin="a steam\n" * 6)
    processed = tool.models["instruct"].tokens_processed
    again = toy(3, chat=True)
    engine = anydraft.Engine(again)
    messages: list[dict[str, str]] = []
    longest = 0
    for answer in expected_answers(*["a steam"] * 6):
        messages.append({"role": "user", "content": "a steam"})
        longest = len(engine.encode(anydraft.GenerationRequest(messages=messages))) + 12
        messages.append({"role": "assistant", "content": answer})
    # Each token once, but for what the text of an answer is cut into anew.
    assert processed < 1.5 * longest


def test_commands(tool: Tool, tmp_path: Path) -> None:
    file = tmp_path / "saved.json"
    lines = [
        "/stats", "/system", "a steam", "/stats", "/system Be a.", "runs", f"/save {file}", "/save",
        f"/save {tmp_path}/no/such/folder", "/what", "/help", "/reset", "a steam", "/exit", "never",
    ]  # fmt: skip
    ran = tool(*FLAGS, stdin="\n".join(lines))
    assert ran.code == 0
    first = expected_answers("a steam")
    engine = anydraft.Engine(toy(3, chat=True))
    messages = [
        {"role": "system", "content": "Be a."},
        {"role": "user", "content": "a steam"},
        {"role": "assistant", "content": first[0]},
        {"role": "user", "content": "runs"},
    ]
    second = engine.generate(messages=messages, max_tokens=12).text
    # /reset forgets the turns and keeps the system message
    third = expected_answers("a steam", system="Be a.")
    assert ran.out == shown([*first, second, *third])
    saved = json.loads(file.read_text(encoding="utf-8"))["messages"]
    assert saved == [*messages, {"role": "assistant", "content": second}]
    for words in (
        "nothing has been said yet",
        "there is no system message",
        "acceptance by position:",
        "5 messages saved",
        "/save needs the name of a file",
        "No such file or directory",
        "unknown command /what",
        "Ctrl-C stops an answer",
        "begins anew",
    ):
        assert words in ran.err, words
    assert "Traceback" not in ran.err


def test_the_oldest_turns_go_when_the_context_is_full(tool: Tool) -> None:
    tool.models["instruct"] = toy(3, max_length=120, chat=True)
    ran = tool(*FLAGS, stdin="\n".join(f"steam {i}" for i in range(8)))
    assert ran.code == 0, ran.err
    assert ran.out.count("\n") >= 8
    gone = [line for line in ran.err.splitlines() if "no longer sees" in line]
    assert gone and gone[0].endswith("the turn that began: steam 0")
    assert [line[-1] for line in gone] == [str(i) for i in range(len(gone))]
    assert "context of 120 tokens" in gone[0]


def test_a_message_beyond_the_context_is_refused_and_the_chat_goes_on(tool: Tool) -> None:
    tool.models["instruct"] = toy(3, max_length=120, chat=True)
    ran = tool(*FLAGS, stdin="a steam\n" + "on " * 200 + "\nruns")
    assert ran.code == 0
    assert "anydraft: the prompt has" in ran.err
    assert ran.err.count(" tokens/s") == 2


def test_ctrl_c_keeps_the_answer_and_the_chat(tool: Tool) -> None:
    whole = expected_answers("a steam")[0]
    question = anydraft.GenerationRequest(messages=[{"role": "user", "content": "a steam"}])
    asked = len(anydraft.Engine(toy(3, chat=True)).encode(question))
    pressed: list[int] = []

    def before(length: int) -> None:
        if length == asked + 5 and not pressed:
            pressed.append(length)
            os.kill(os.getpid(), signal.SIGINT)

    tool.models["instruct"] = toy(3, before=before, chat=True)
    ran: Ran = tool(*FLAGS, stdin="a steam\nruns")
    assert ran.code == 0 and pressed
    assert "interrupted" in ran.err
    kept = next(n for n in range(len(whole), 0, -1) if ran.out.startswith(whole[:n] + "\n"))
    assert kept < len(whole)
    engine = anydraft.Engine(toy(3, chat=True))
    messages = [
        {"role": "user", "content": "a steam"},
        {"role": "assistant", "content": whole[:kept]},
        {"role": "user", "content": "runs"},
    ]
    assert ran.out == shown([whole[:kept], engine.generate(messages=messages, max_tokens=12).text])


def test_a_base_model_cannot_chat(tool: Tool) -> None:
    ran = tool("chat", "--target", "base", stdin="a steam")
    assert ran.code == 2
    assert "base has no chat template" in ran.err and "anydraft generate" in ran.err
    assert ran.err.count("\n") == 1


DRIVER = """
import sys
sys.path.insert(0, {tests!r})
from cli_toys import toy
from anydraft import backends
from anydraft.cli.main import main
backends.load_model = lambda spec, **options: toy(3, chat=True)
main(["chat", "--target", "instruct", "--draft", "lookup", "--max-tokens", "12", "--show-draft"])
"""


def test_on_a_terminal(tmp_path: Path) -> None:
    """A prompt, Ctrl-C at it, an answer, Ctrl-D."""
    code = DRIVER.format(tests=str(Path(__file__).parent))
    controller, terminal = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(terminal)
    seen = b""

    def wait_for(text: bytes, typing: bytes = b"") -> None:
        """Read until `text` comes; what is typed is typed again while nothing does."""
        nonlocal seen
        until = time.monotonic() + 60
        while text not in seen:
            assert time.monotonic() < until, (text, seen)
            if typing:
                os.write(controller, typing)
            if select.select([controller], [], [], 5)[0]:
                seen += os.read(controller, 4096)
                typing = b""
        seen = seen.partition(text)[2]

    try:
        wait_for(b"is listening")
        wait_for(b"> ")
        # Between showing its prompt and waiting for keys, readline overlooks a Ctrl-C.
        wait_for(b"/exit or Ctrl-D leaves", typing=b"\x03")
        wait_for(b"> ")
        os.write(controller, b"a steam\n")
        wait_for(b"12 tokens,")
        wait_for(b"> ")
        os.write(controller, b"\x04")
        assert running.wait(timeout=60) == 0
    finally:
        running.kill()
        running.wait()
        os.close(controller)


@pytest.mark.slow
def test_with_real_models(gemma_path: Path, smollm_path: Path) -> None:
    """SmolLM2 answers, Gemma (without a template of its own) drafts."""
    ran = subprocess.run(
        [
            sys.executable, "-m", "anydraft.cli.main", "chat", "--target", "smollm2-135m",
            "--draft", "gemma3-270m", "--max-tokens", "16",
        ],
        input="What is the capital of France?\nAnd of Italy?\n/stats\n",
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "Paris" in ran.stdout
    assert "drafted tokens accepted" in ran.stderr
