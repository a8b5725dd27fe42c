"""The command line's frame (errors, exit codes, help) and `pull`, `list`, `rm`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from anydraft import __version__, store
from anydraft.cli.main import COMMANDS, main
from anydraft.errors import AnydraftError, CacheError, StateError


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Run the tool in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("ANYDRAFT_CACHE", str(tmp_path / "cache"))

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        code = caught.value.code
        shown = capsys.readouterr()
        return (code if isinstance(code, int) else 0), shown.out, shown.err

    return call


def test_help_names_every_command(run):
    code, out, _ = run("--help")
    assert code == 0
    commands = out.split("Commands:")[1]
    assert [line.split()[0] for line in commands.splitlines() if line.strip()] == list(COMMANDS)
    for _, line in COMMANDS.values():
        assert line in out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run, command):
    code, out, err = run(command, "--help")
    assert code == 0 and err == ""
    assert out.startswith(f"Usage: anydraft {command}")


def test_version(run):
    assert run("--version") == (0, f"anydraft {__version__}\n", "")


def test_usage_errors_exit_with_2(run):
    assert run()[0] == 2
    code, out, err = run("nonsense")
    assert code == 2 and out == "" and "No such command 'nonsense'" in err
    assert run("pull")[0] == 2
    assert run("list", "--nonsense")[0] == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (AnydraftError("what\nwas wrong"), 1),
        (CacheError("what was wrong"), 4),
        (StateError("what was wrong"), 5),
    ],
)
def test_errors_are_one_line_with_their_exit_code(run, monkeypatch, error, code):
    def fail():
        raise error

    monkeypatch.setattr(store, "list_models", fail)
    assert run("list") == (code, "", "anydraft: what was wrong\n")
    for arguments in (("--debug", "list"), ("list", "--debug")):
        with pytest.raises(type(error)):
            main(arguments)


def test_an_unexpected_error_is_one_line_too(run, monkeypatch):
    def fail():
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(store, "list_models", fail)
    code, out, err = run("list")
    assert (code, out) == (1, "")
    assert err.endswith("ZeroDivisionError: division by zero\n") and err.count("\n") == 1


def test_ctrl_c_exits_with_130(run, monkeypatch):
    def fail():
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "list_models", fail)
    assert run("list")[0] == 130


def test_a_closed_pipe_is_quiet(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "anydraft.cli.main", "list"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert done.stderr == ""


def test_list_shows_what_can_be_pulled(run):
    code, out, err = run("list")
    assert code == 0 and err == ""
    assert [line.split()[:2] for line in out.splitlines()] == [
        ["smollm2-135m", "available"],
        ["gemma3-270m", "available"],
    ]
    assert "anydraft pull gemma3-270m" in out
    rows = [json.loads(line) for line in run("list", "--json")[1].splitlines()]
    assert [row["name"] for row in rows] == ["smollm2-135m", "gemma3-270m"]
    assert all(row["bytes"] == 0 and row["licence"] and row["weights"] for row in rows)


def test_pull_prints_the_folder_on_stdout(run, tmp_path, monkeypatch):
    calls = []

    def pull(name, progress, revision):
        calls.append((name, progress, revision))
        return tmp_path / name

    monkeypatch.setattr(store, "pull", pull)
    assert run("pull", "a", "b", "-q") == (0, f"{tmp_path / 'a'}\n{tmp_path / 'b'}\n", "")
    assert run("pull", "o/n", "--revision", "v1")[0] == 0
    assert calls == [("a", False, None), ("b", False, None), ("o/n", True, "v1")]
    code, _, err = run("pull", "a", "b", "--revision", "v1")
    assert code == 2 and err.startswith("anydraft: --revision")


def test_pull_of_an_unknown_name(run):
    code, out, err = run("pull", "gemma")
    assert code == 3 and out == ""
    assert err.startswith("anydraft: no model 'gemma'") and "gemma3-270m" in err


def test_rm_goes_on_after_a_name_that_is_not_there(run, tmp_path):
    folder = tmp_path / "cache" / "models" / "gemma3-270m"
    folder.mkdir(parents=True)
    (folder / "x").write_bytes(b"0" * 2_000_000)
    code, out, err = run("rm", "nonsense", "gemma3-270m")
    assert code == 3
    assert out == "gemma3-270m: 2 MB freed\n"
    assert err == "anydraft: the cache holds no 'nonsense'; it holds gemma3-270m\n"
    assert not folder.exists()
