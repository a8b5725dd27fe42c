"""What is llama_cpp's own: growing, sharing prompts, one pass for many, and pairs across runtimes.

The contract itself is in tests/conformance, refused files in test_llama_cpp_files.py.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("llama_cpp", reason="the extra llama-cpp is not installed")

import anydraft
from anydraft.backends import llama_cpp, llama_library
from anydraft.backends.llama_context import MOST_OUTPUTS
from anydraft.drafters import make_drafter
from anydraft.engine import Conversation, Engine
from anydraft.errors import NumericsError
from identity_runs import Identity
from tiny_gguf import gemma_gguf, llama_gguf
from toys import random_drafter

F32 = {"threads": 1, "type_k": "f32", "type_v": "f32"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: Any) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    return {
        "llama": llama_gguf(folder / "llama.gguf", context=4096, kind="F32", scale=0.2),
        "gemma": gemma_gguf(folder / "gemma.gguf", context=4096, kind="F32", scale=0.2),
        "gemma-q8": gemma_gguf(folder / "gemma-q8.gguf", context=4096, scale=0.2),
    }


@pytest.fixture
def model(paths: dict[str, Path]) -> Iterator[llama_cpp.LlamaModel]:
    opened = llama_cpp.load(paths["gemma"], **F32)
    yield opened
    opened.close()


def ids(count: int, start: int = 0) -> list[int]:
    return [10 + (start + 7 * n * n) % 250 for n in range(count)]


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    # Float32 throughout, but passes of 64 tokens and more take another attention kernel.
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=0.05)


def counted(model: llama_cpp.LlamaModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of every llama_decode from here on."""
    sizes: list[int] = []
    decode = model._context.decode
    monkeypatch.setattr(
        model._context,
        "decode",
        lambda tokens, *rest: sizes.append(len(tokens)) or decode(tokens, *rest),
    )
    return sizes


def test_one_decode_for_all_states(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [model.new_state() for _ in range(5)]
    sizes = counted(model, monkeypatch)
    rows = model.extend([(s, ids(n + 1, n), n % 2) for n, s in enumerate(states)])
    assert sizes == [1 + 2 + 3 + 4 + 5]
    assert [tuple(r.shape) for r in rows] == [(n % 2, model.vocab_size) for n in range(5)]


@pytest.mark.parametrize("exact", [False, True])
def test_the_best_ids_are_the_arg_max_of_the_logits(paths: dict[str, Path], exact: bool) -> None:
    """Whatever may not win, whoever else wants logits, in more rows than one pass gives."""
    model = llama_cpp.load(paths["gemma-q8"], threads=1, exact=exact, cache_prompt=False)
    one, other = model.new_state(), model.new_state()
    count = MOST_OUTPUTS + 3
    batch = [(one, ids(count), count), (other, ids(9, 3), 4)]
    logits = model.extend(batch)

    def again(*forbidden: list[int] | None) -> list[torch.Tensor]:
        one.rollback(0)
        other.rollback(0)
        return model.extend_greedy(batch, forbidden)

    first, second = [rows.argmax(1) for rows in logits]
    best = again([], first.unique().tolist())
    assert best[0].tolist() == first.tolist()
    logits[1][:, first.unique()] = -torch.inf
    assert best[1].tolist() == logits[1].argmax(1).tolist() != second.tolist()
    mixed = again([], None)
    assert mixed[1].shape == (4, model.vocab_size)  # logits where they are wanted
    with pytest.raises(NumericsError, match="no best id"):
        again([], list(range(model.vocab_size)))
    assert (one.length, other.length) == (0, 0)
    model.close()


@pytest.mark.slow
def test_growing_keeps_every_state(model: Any) -> None:
    """More cells and more sequences than there were at first, prompts shared or not."""
    states = [model.new_state() for _ in range(3)]
    prompts = [ids(1500, n) for n in range(2)] + [ids(1400, 0)]
    model.extend([(s, p, 1) for s, p in zip(states, prompts, strict=True)])
    assert model._context.cells > llama_cpp._FIRST_CELLS
    more = [model.new_state() for _ in range(llama_cpp._FIRST_SEQUENCES)]
    assert model._context.sequences > llama_cpp._FIRST_SEQUENCES
    [got] = model.extend([(states[0], [33, 34], 2)])
    fresh = llama_cpp.load(model.header.path, **F32, cache_prompt=False)
    [expected] = fresh.extend([(fresh.new_state(), [*prompts[0], 33, 34], 2)])
    close(got, expected)
    for state in [*states, *more]:
        state.close()
    fresh.close()


@pytest.mark.slow
@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_growing_without_flash_attention(paths: Any, flash_attn: str) -> None:
    """Values lie transposed then; saving and restoring them takes another path."""
    model = llama_cpp.load(paths["gemma"], **F32, flash_attn=flash_attn)
    state = model.new_state()
    model.extend([(state, ids(2000), 0)])
    model.extend([(state, ids(300, 5), 0)])
    [got] = model.extend([(state, [40], 1)])
    fresh = llama_cpp.load(paths["gemma"], **F32, n_ctx=4096)
    [expected] = fresh.extend([(fresh.new_state(), [*ids(2000), *ids(300, 5), 40], 1)])
    close(got, expected)
    model.close()
    fresh.close()


def test_a_prompt_is_not_processed_twice(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = ids(300)
    state = model.new_state()
    [cold] = model.extend([(state, prompt, 2)])
    sizes = counted(model, monkeypatch)
    other = model.new_state()
    [warm] = model.extend([(other, prompt, 2)])  # from a state that lives
    assert sizes == [2]
    close(warm, cold)
    state.rollback(10)  # the two share cells: neither may lose what the other gives up
    model.extend([(state, ids(40, 3), 1)])
    state.close()
    [row] = model.extend([(other, [55], 1)])
    other.close()
    third = model.new_state()
    del sizes[:]
    [again] = model.extend([(third, [*prompt, 55], 1)])  # from one that was closed
    assert sizes == [1]
    close(again, row)
    [elsewhere] = model.extend([(model.new_state(), [*prompt[:100], 77, 78], 1)])
    assert sizes == [1, 2]
    fresh = llama_cpp.load(model.header.path, **F32)
    close(elsewhere, fresh.extend([(fresh.new_state(), [*prompt[:100], 77, 78], 1)])[0])
    fresh.close()


def test_a_prompt_in_common_is_processed_once_within_a_batch(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = ids(200)
    batch = [(model.new_state(), [*system, 20 + n, 30 + n], 1) for n in range(4)]
    sizes = counted(model, monkeypatch)
    rows = model.extend(batch)
    assert sizes == [200, 8]
    fresh = llama_cpp.load(model.header.path, **F32)
    for got, (_, prompt, _) in zip(rows, batch, strict=True):
        close(got, fresh.extend([(fresh.new_state(), prompt, 1)])[0])
    fresh.close()


def test_sharing_can_be_switched_off(paths: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama_cpp.load(paths["gemma"], **F32, cache_prompt=False)
    sizes = counted(model, monkeypatch)
    for _ in range(2):
        state = model.new_state()
        model.extend([(state, ids(100), 1)])
        state.close()
    assert sizes == [100, 100]
    model.close()


def test_an_interrupt_leaves_every_state_as_it_was(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, other = model.new_state(), model.new_state()
    model.extend([(state, ids(30), 0), (other, ids(5, 3), 0)])
    decode = model._context.decode

    def interrupted(*arguments: Any) -> Any:
        decode(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model._context, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.extend([(state, [41, 42], 1), (other, [43], 1)])
    assert (state.length, other.length) == (30, 5)
    [row, _] = model.extend([(state, [44], 1), (other, [45], 1)])
    fresh = llama_cpp.load(model.header.path, **F32)
    close(row, fresh.extend([(fresh.new_state(), [*ids(30), 44], 1)])[0])
    fresh.close()


def test_log_lines_go_to_our_logger(
    paths: Any, caplog: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The command line, tested in the same process, sends our log to stderr instead.
    monkeypatch.setattr(logging.getLogger("anydraft"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("anydraft"), "propagate", True)
    with caplog.at_level(logging.DEBUG, logger="anydraft.llama_cpp"):
        llama_cpp.load(paths["llama"], **F32).close()
    said = [record.message for record in caplog.records if record.name == "anydraft.llama_cpp"]
    assert any("n_ctx_seq" in line for line in said)
    assert all(record.levelno < logging.WARNING for record in caplog.records)
    assert capfd.readouterr().err == ""
    assert llama_library.log.name == "anydraft.llama_cpp"


# --- in the engine --------------------------------------------------------------------------------


def torch_gemma(folder: Path) -> Any:
    """The small Gemma in torch: the same weights, converted as the store does it."""
    from anydraft import store_convert
    from anydraft.backends import torch_hf

    source = gemma_gguf(folder / "gemma.gguf", context=4096, kind="F32", scale=0.2)
    (folder / "torch").mkdir()
    store_convert.convert(source, folder / "torch", lambda done, of: None)
    return torch_hf.load(folder / "torch")


PROMPT = "the then a then the then a 1234"


@pytest.mark.slow
@pytest.mark.parametrize("law", [{}, {"temperature": 0.7}])
def test_pairs_across_runtimes_change_nothing(paths: Any, tmp_path: Path, law: Any) -> None:
    in_torch = torch_gemma(tmp_path)
    in_llama = llama_cpp.load(paths["gemma"], **F32)
    other = llama_cpp.load(paths["llama"], **F32)
    request = {"prompt": PROMPT, "max_tokens": 24, "seed": 3, "ignore_eos": True, **law}
    for target, draft in ((in_torch, in_llama), (in_llama, in_torch), (in_torch, other)):
        identity = Identity(target)
        drafter = make_drafter(draft, target.vocabulary)
        for count in (1, 3, 4, 7):
            got = identity.check(drafter, count, **request)
            if draft is not other:  # the same weights on both sides
                assert got.stats.draft_n_accepted >= 0.9 * got.stats.draft_n
    for model in (in_torch, in_llama, other):
        model.close()


@pytest.mark.parametrize("law", [{}, {"temperature": 0.7}])
def test_random_ids_change_nothing(paths: Any, law: Any) -> None:
    """Exact arithmetic up to near-ties: float32 throughout, rollback in every round."""
    model = llama_cpp.load(paths["gemma"], **F32)
    identity = Identity(model)
    for count in (1, 3, 4, 7):
        request = {"prompt": PROMPT, "max_tokens": 40, "seed": 3, "ignore_eos": True, **law}
        identity.check(random_drafter(model.vocab_size, count), count, **request)
    assert identity.near_ties == []
    model.close()


def test_eight_at_once_say_what_each_says_alone(paths: Any) -> None:
    model = llama_cpp.load(paths["gemma"], **F32)
    identity = Identity(model)
    prompts = [PROMPT[n:] for n in range(8)]
    identity.check_batch(None, 0, prompts, max_tokens=16, ignore_eos=True)
    identity.check_batch(random_drafter(model.vocab_size, 5), 4, prompts, max_tokens=16)
    assert identity.near_ties == []
    model.close()


def test_a_conversation_goes_on_where_it_was(paths: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama_cpp.load(paths["gemma"], **F32, cache_prompt=False)
    engine, conversation = Engine(model), Conversation()
    request = {"max_tokens": 8, "ignore_eos": True}
    prompt = ids(60)
    first = engine.generate(prompt, conversation=conversation, **request)
    sizes = counted(model, monkeypatch)
    longer = [*prompt, *first.token_ids, 25, 26]
    warm = engine.generate(longer, conversation=conversation, **request)
    assert sizes[0] <= 4 and max(sizes) <= 4
    conversation.close()
    assert engine.generate(longer, **request).token_ids == warm.token_ids
    engine.close()


def test_load_from_python_and_by_name(paths: Any) -> None:
    with anydraft.load(
        paths["gemma"], draft=paths["llama"], threads=1, draft_options={"threads": 1, "n_batch": 64}
    ) as engine:
        assert engine.target.runtime == "llama_cpp"
        answer = engine.generate(PROMPT, max_tokens=12)
        assert answer.token_ids == engine.plain().generate(PROMPT, max_tokens=12).token_ids


def generate(capsys: pytest.CaptureFixture[str], *flags: Any) -> tuple[int, str, str]:
    from anydraft.cli.main import main

    with pytest.raises(SystemExit) as done:
        main(["generate", "--prompt", PROMPT, "--max-tokens", "8", *map(str, flags)])
    said = capsys.readouterr()
    return int(done.value.code or 0), said.out, said.err


def test_from_the_command_line(paths: Any, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--target", paths["gemma-q8"], "--draft", "lookup", "--threads", 1, "--json"]
    code, out, err = generate(
        capsys, *flags, "--exact", "--verify-plain", "--set", "n_ctx=512", "--set", "use_mmap=false"
    )
    assert code == 0, err
    assert json.loads(out)["verify_plain"]["identical"] is True
    code, _, err = generate(capsys, *flags, "--set", "n_ctx")
    assert code == 2 and "--set takes NAME=VALUE, not 'n_ctx'" in err
    code, _, err = generate(capsys, *flags, "--set", "cells=3")
    assert code == 3 and "unknown option 'cells' of llama_cpp" in err
    code, _, err = generate(capsys, *flags, "--runtime", "onnx")
    assert code == 3 and "unknown runtime 'onnx'" in err
    code, _, err = generate(capsys, "--target", "gemma3-270m", "--exact")
    assert code == 2 and "--exact is for targets in llama_cpp" in err


def test_the_dtype_of_a_torch_target_is_not_the_gguf_drafts(
    paths: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["--target", paths["gemma"], "--draft", paths["llama"], "--threads", 1]
    code, _, err = generate(capsys, *both, "--draft-dtype", "float32")
    assert code == 3 and "cannot be chosen for a GGUF file" in err
    code, _, err = generate(capsys, *both, "--draft-threads", 1, "--draft-set", "n_batch=64")
    assert code == 0, err
