"""Pulling a hub id from a small hub on this machine: the real client, real HTTP, no internet."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights" * 1000,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"the same weights, as a pickle",
    "onnx/model.onnx": b"the same weights once more",
}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as a download needs, for one repository and a branch."""

    asked: list[str]

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        self.asked.append(path)
        api = "/api/models/someone/something"
        if path in {f"{api}/revision/{name}" for name in ("main", "v1", COMMIT)}:
            siblings = [{"rfilename": name} for name in FILES]
            info = {"id": "someone/something", "sha": COMMIT, "siblings": siblings}
            return self.send(json.dumps(info).encode(), body)
        if path.startswith(f"{api}/tree/"):
            rows = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in FILES.items()
            ]
            return self.send(json.dumps(rows).encode(), body)
        prefix = f"/someone/something/resolve/{COMMIT}/"
        if path.startswith(prefix) and path.removeprefix(prefix) in FILES:
            return self.send(FILES[path.removeprefix(prefix)], body)
        code = "RevisionNotFound" if path.startswith(api) else "RepoNotFound"
        self.send(b"{}", body, status=404, error=code)

    def send(self, data: bytes, body: bool, status: int = 200, error: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def pull(tmp_path):
    """Run `anydraft pull` against the small hub; the requests so far are in `pull.asked`."""
    asked: list[str] = []
    handler = type("Handler", (Hub,), {"asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "ANYDRAFT_CACHE": str(tmp_path / "cache"),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "NO_PROXY": "127.0.0.1",
    }

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "anydraft.cli.main", "pull", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    run.asked = asked
    yield run
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_hub_id_is_fetched_once_without_what_is_not_needed(pull, tmp_path):
    first = pull("someone/something")
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    assert folder.is_relative_to(tmp_path / "cache" / "hub")
    names = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert {path.name for path in folder.iterdir()} == names
    for name in names:
        assert (folder / name).read_bytes() == FILES[name]

    count = len(pull.asked)
    again = pull("someone/something", "--quiet")
    assert (again.returncode, again.stdout, again.stderr) == (0, first.stdout, "")
    assert len(pull.asked) == count


def test_quiet_is_quiet_and_revisions_are_taken(pull):
    for arguments in (("someone/something@v1",), ("someone/something", "--revision", "v1")):
        done = pull("--quiet", *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.strip().endswith(COMMIT)


def test_what_the_hub_does_not_have_is_said(pull):
    done = pull("no/such", "--quiet")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("anydraft: the model hub shows no no/such")
    done = pull("someone/something@v9", "--quiet")
    assert done.returncode == 3
    assert "shows no someone/something at revision v9" in done.stderr


def test_one_gguf_file_of_a_hub_model(pull, tmp_path):
    FILES.update(
        {
            "something-Q4_K_M.gguf": b"GGUF four bits",
            "something-Q8_0-00001-of-00002.gguf": b"GGUF eight bits",
            "something-Q8_0-00002-of-00002.gguf": b"GGUF, their rest",
            "mmproj-something.gguf": b"a projector",
        }
    )
    try:
        first = pull("someone/something:q4_k_m", "--quiet")
        assert first.returncode == 0, first.stderr
        path = Path(first.stdout.strip())
        assert path.name == "something-Q4_K_M.gguf"
        assert [p.name for p in path.parent.iterdir()] == [path.name]
        count = len(pull.asked)
        assert pull("someone/something:*Q4_K_M.gguf", "-q").stdout == first.stdout
        assert len(pull.asked) == count  # from the cache
        split = Path(pull("someone/something@v1:Q8_0", "-q").stdout.strip())
        assert split.name == "something-Q8_0-00001-of-00002.gguf"
        assert (split.parent / "something-Q8_0-00002-of-00002.gguf").is_file()
        several = pull("someone/something:something", "-q")
        assert several.returncode == 3 and "several GGUF files; choose one" in several.stderr
        none = pull("someone/something:Q2_K", "-q")
        assert none.returncode == 3 and "no GGUF file fits 'Q2_K'" in none.stderr
        assert "something-Q4_K_M.gguf" in none.stderr and "mmproj" not in none.stderr
    finally:
        for name in [name for name in FILES if name.endswith(".gguf")]:
            del FILES[name]
