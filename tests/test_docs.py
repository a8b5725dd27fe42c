"""The documents say what is so: their code runs, their files exist, the commands are described."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from anydraft.cli.main import COMMANDS, main
from anydraft.engine import GenerationRequest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def python_blocks(document: Path) -> list[str]:
    return _BLOCK.findall(document.read_text(encoding="utf-8"))


def files_in_tree(block: str, folder: str) -> list[str]:
    """The paths that a drawn file tree names: `name   what it is` per line."""
    found = []
    for line in block.splitlines():
        names = re.match(r"\s+((?:[\w.*/-]+, )*[\w.*/-]+)\s{2,}\S", line)
        if names:
            found += [folder + name for name in names[1].split(", ")]
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        if not link.startswith("http"):
            assert (document.parent / link).exists(), f"{document.name} links to {link}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document: Path) -> None:
    """Paths in backticks that begin at the root of the repository."""
    text = document.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:src|tests|benchmarks|docs|examples|scripts)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), f"{document.name} names {path}"


def test_files_of_the_readme_exist() -> None:
    tree = (ROOT / "README.md").read_text().split("## Files")[1].split("```")[1]
    names = [line.split()[0] for line in tree.splitlines() if line.strip()]
    assert len(names) > 8
    for name in names:
        assert (ROOT / name).exists(), name


def test_files_of_the_architecture_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text().split("## Files")[1].split("```")[1]
    names = files_in_tree(text.split("\nbenchmarks/")[0], "src/anydraft/")
    assert len(names) > 15
    for name in names:
        assert list(ROOT.glob(name)), name
    named = set(names)
    for module in (ROOT / "src/anydraft").iterdir():
        known = any(module in ROOT.glob(name) for name in named)
        assert known or module.name in ("py.typed", "__pycache__"), f"{module.name} has no line"


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    start = (ROOT / "README.md").read_text().split("## Start")[1].split("## ")[0]
    commands = re.findall(r"^make (\w+)", start, re.MULTILINE)
    assert commands == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    for command in commands:
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)


def test_commands_and_options_are_described(capsys: pytest.CaptureFixture[str]) -> None:
    described = (ROOT / "docs/cli.md").read_text()
    for command in COMMANDS:
        assert f"`anydraft {command}`" in described
        with pytest.raises(SystemExit):
            main([command, "--help"])
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out)) - {"--help"}
        missing = {option for option in options if option not in described}
        assert not missing, f"docs/cli.md says nothing of {command} {sorted(missing)}"


def test_options_in_the_documents_exist(capsys: pytest.CaptureFixture[str]) -> None:
    known = {"--help", "--debug", "--version"}
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        known |= set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))
    for name in ("README.md", "docs/cli.md", "docs/concepts.md", "docs/lossless.md"):
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (ROOT / name).read_text()))
        assert named <= known, f"{name}: {sorted(named - known)}"


def test_request_fields_are_described() -> None:
    described = (ROOT / "docs/python.md").read_text()
    for field in GenerationRequest.__dataclass_fields__:
        assert f"`{field}`" in described or f"`{field}=" in described, field


def test_exit_codes_are_described() -> None:
    from anydraft import errors

    described = (ROOT / "docs/cli.md").read_text().split("## Exit codes")[1]
    codes = {
        value.exit_code
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.AnydraftError)
    }
    for code in codes:
        assert f"| {code} |" in described


def test_the_example_without_weights_runs() -> None:
    block = next(b for b in python_blocks(ROOT / "docs/python.md") if "ToyModel" in b)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(block, "docs/python.md", "exec"), {})
    ids, acceptance = said.getvalue().rsplit(" [", 1)
    assert len(json.loads(ids)) == 20
    # The draft is the target: it draws with the same noise, so every candidate stands.
    assert all(rate == 1.0 for rate in json.loads("[" + acceptance))


@pytest.mark.parametrize(
    "block",
    [b for path in DOCUMENTS for b in python_blocks(path)],
    ids=lambda block: block.split("\n")[0][:40],
)
def test_python_in_the_documents_compiles(block: str) -> None:
    compile(block, "a document", "exec")


@pytest.mark.slow
def test_the_example_of_the_readme_runs(gemma_path: Path, smollm_path: Path) -> None:
    import anydraft

    (block,) = python_blocks(ROOT / "README.md")
    assert len([line for line in block.splitlines() if line.strip()]) <= 5
    said = io.StringIO()
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(said):
        exec(compile(block, "README.md", "exec"), names)
    engine = names["engine"]
    assert isinstance(engine, anydraft.Engine)
    with engine:
        plain = engine.plain().generate("The steam engine", max_tokens=64)
    assert said.getvalue() == plain.text
    assert len(plain.text) > 100


def test_prompt_files_are_sound() -> None:
    """What the benchmarks read: unique ids, varied prompts, copies that hold their text twice."""
    lines = {
        path.stem: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in (ROOT / "benchmarks/prompts").glob("*.jsonl")
    }
    assert set(lines) == {"general", "copy", "calibration"}
    rows = [row for group in lines.values() for row in group]
    assert len({row["id"] for row in rows}) == len(rows)
    assert len({row["text"] for row in rows}) == len(rows)
    assert len(lines["general"]) >= 20
    kinds = {"prose", "question", "list", "code", "numbers", "script"}
    assert {row["kind"] for row in lines["general"]} == kinds
    assert len(lines["copy"]) >= 3
    for row in lines["copy"]:
        again = "\n\nThe same text again:\n\n"
        first, second, rest = row["text"].split(again)
        assert first == second and rest == ""
