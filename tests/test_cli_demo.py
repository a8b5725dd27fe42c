"""`anydraft demo` and the examples."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from anydraft.cli import demo
from anydraft.cli.demo_cases import CASES
from cli_toys import Tool, toy

EXAMPLES = Path(__file__).parent.parent / "examples"
FLAGS = ("demo", "--target", "toy", "--draft", "base", "--max-tokens", "30")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    made = Tool(monkeypatch, capsys)
    made.models["toy"] = toy(max_length=None)
    return made


def test_three_cases_and_a_table(tool: Tool) -> None:
    ran = tool(*FLAGS)
    assert ran.code == 0, ran.err
    assert [c.lookup for c in CASES] == [False, True, False]
    assert CASES[2].fields["temperature"] > 0 and CASES[2].fields["seed"] is not None
    for number, case in enumerate(CASES, start=1):
        assert f"== {number}. {case.title}" in ran.out
    table = ran.out[ran.out.index("measured here") :]
    for row in ("plain", "drafted", "speed-up", "acceptance", "tokens per round"):
        assert row in table
    rows = {
        line.split("│")[1].strip(): line.split("│")[2:-1]
        for line in table.splitlines()
        if "│" in line
    }
    assert [cell.strip() for cell in rows["identical"]] == ["yes"] * 3
    assert "x" in rows["speed-up"][0]
    # plain and drafted take turns, the second time in the other order
    runs = re.findall(r"\[(plain|drafted).*tokens/s, (\d+) tokens\]", ran.out)
    assert [side for side, _ in runs] == ["plain", "drafted", "drafted", "plain"] * 3
    assert len({count for _, count in runs[:4]}) == 1
    assert "2 cores" in ran.out or "cores" in ran.out
    assert all(len(line) <= 80 for line in table.splitlines())


def test_a_fourth_case_across_runtimes(
    tool: Tool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the second runtime is installed and the draft has a file for it; else three cases."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "model.gguf").touch()
    tool.models[str(folder)] = tool.models["base"]
    flags = ("demo", "--target", "toy", "--draft", str(folder), "--max-tokens", "8")
    for installed in (True, False):
        monkeypatch.setattr(demo, "find_spec", lambda name, found=installed: found or None)
        ran = tool(*flags, "--repeats", "1")
        assert ran.code == 0, ran.err
        assert ("4. the draft in llama.cpp" in ran.out) == installed
        assert (tool.options[str(folder)].get("runtime") == "llama_cpp") == installed
        assert all(len(line) <= 80 for line in ran.out[ran.out.index("measured") :].splitlines())


def test_a_wrong_token_is_exit_code_1(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    from anydraft import decode

    def gullible(draft_ids: list[int], draw_row: Any) -> list[int]:
        return [*draft_ids, draw_row(len(draft_ids))] if draft_ids else [draw_row(0)]

    monkeypatch.setattr(decode, "match", gullible)
    ran = tool(*FLAGS, "--repeats", "1")
    assert ran.code == 1
    assert "NO" in ran.out and "this is a bug" in ran.out


def test_slower_is_said(tool: Tool) -> None:
    """A toy target costs nothing, so every draft of a toy model makes it slower."""
    assert "(slower)" in tool(*FLAGS).out


def test_models_that_are_not_there(
    tool: Tool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ANYDRAFT_CACHE", str(tmp_path))
    ran = tool("demo")
    assert ran.code == 3
    assert "run `anydraft pull smollm2-135m gemma3-270m`" in ran.err
    assert tool.loads == 0
    assert tool("demo", "--repeats", "0").code == 2


def test_on_a_terminal(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two panels, with what the draft foresaw in green."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    ran = tool(*FLAGS, "--repeats", "1")
    assert ran.code == 0, ran.err
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", ran.out)
    assert re.search(
        r"╭─ plain: [\d.]+ tokens/s ─*╮╭─ drafted, K = \d+: [\d.]+ tokens/s ─*╮", plain
    )
    assert "\x1b[32m" in ran.out
    assert "\x1b[?25h" in ran.out  # the cursor is back


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stream", "objects_in_memory"])
def test_examples(
    name: str, gemma_path: Path, smollm_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    if name == "stream":
        assert len(said) > 100
    else:
        assert "8, 10, 12" in said and "identical: True" in said


@pytest.mark.slow
def test_demo_with_the_real_models(gemma_path: Path, smollm_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "anydraft.cli.main", "demo", "--repeats", "1", "--max-tokens", "48"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr + ran.stdout
    identical = next(line for line in ran.stdout.splitlines() if "│ identical" in line)
    cases = 3 if find_spec("llama_cpp") is None else 4
    assert identical.count("yes") + identical.count("near-tie") == cases
    assert ("4. the draft in llama.cpp" in ran.stdout) == (cases == 4)
    assert "fp32 weights dequantised from Q4" in ran.stdout
