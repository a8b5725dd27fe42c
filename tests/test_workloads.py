"""Prompts of the benchmark: ours, the user's own, and those of two known benchmarks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from anydraft.errors import RequestError
from anydraft.measure.workloads import KINDS, builtin, calibration, from_file


def lines(path: Path, *values: object) -> Path:
    path.write_text("\n".join(json.dumps(value) for value in values) + "\n", encoding="utf-8")
    return path


def test_there_are_several_prompts_of_each_of_the_eight_kinds():
    prompts = builtin()
    assert len(KINDS) == 8
    assert len({p.id for p in prompts}) == len(prompts)
    for kind in KINDS:
        own = [p for p in prompts if p.kind == kind]
        lengths = [len(p.turns[0]) for p in own]
        assert len(own) >= 4
        assert max(lengths) > 1.3 * min(lengths), kind


def test_kinds_are_chosen_and_limited():
    assert {p.kind for p in builtin(["code", "writing"])} == {"code", "writing"}
    assert len(builtin(["code"], limit=2)) == 2
    with pytest.raises(RequestError, match=r"no workload 'poetry'; there are: writing, "):
        builtin(["poetry"])


def test_predictions_come_from_other_prompts_of_every_kind():
    assert {p.kind for p in calibration()} == set(KINDS)
    assert not {p.turns for p in calibration()} & {p.turns for p in builtin()}
    for one in calibration():
        for other in builtin():
            sentences = {s for s in one.turns[0].split("\n") if len(s) > 60}
            assert not sentences & set(other.turns[0].split("\n"))


def test_own_prompts_as_json_lines_and_as_a_text(tmp_path):
    file = lines(tmp_path / "own.jsonl", {"text": "One"}, {"prompt": "Two", "id": 7, "kind": "k"})
    first, second = from_file(file)
    assert (first.turns, first.kind) == (("One",), "own")
    assert (second.id, second.turns, second.kind) == ("7", ("Two",), "k")
    text = tmp_path / "essay.txt"
    text.write_text("Once upon a time\n\nthere was", encoding="utf-8")
    assert [p.turns for p in from_file(text)] == [("Once upon a time\n\nthere was",)]


def test_the_form_of_spec_bench(tmp_path):
    file = lines(
        tmp_path / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]},
        {"question_id": 81, "category": "rag", "turns": ["Read."], "reference": ["x"]},
    )
    first, second = from_file(file)
    assert (first.id, first.kind, first.turns) == ("81", "writing", ("Write.", "Rewrite."))
    assert second.id != first.id  # ids that occur twice are told apart
    assert len(from_file(file, limit=1)) == 2  # of each kind


def test_the_form_of_speed_bench(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {"question_id": "a", "category": "coding", "sub_category": "x", "turns": ["Code."],
         "source": "s", "src_id": "1", "difficulty": "low", "multiturn": False}
    ]  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "qualitative.parquet")
    (prompt,) = from_file(tmp_path / "qualitative.parquet")
    assert (prompt.id, prompt.kind, prompt.turns) == ("a", "coding", ("Code.",))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(RequestError, match=r"cannot read the prompt file .*broken\.parquet"):
        from_file(tmp_path / "broken.parquet")


def test_parquet_without_pyarrow_names_the_install_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(RequestError, match=r"pip install 'anydraft\[report\]'"):
        from_file(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", "is empty: it holds no prompt"),
        ("blank.txt", b" \n\n", "is empty: it holds no prompt"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": ', r"broken\.jsonl, line 2 is not JSON"),
        ("list.jsonl", b"[1]\n", r"line 1 is not an object with a prompt but list"),
        ("without.jsonl", b'{"id": 1}\n', "line 1 has no prompt: give text, prompt, or turns"),
        ("void.jsonl", b'{"text": ""}\n', "line 1 has no prompt"),
        ("turns.jsonl", b'{"turns": []}\n', "turns must be a list with at least one text"),
        ("bytes.txt", b"\xff\xfe\xff", "is not UTF-8 text"),
    ],
)
def test_files_without_prompts_are_refused_in_words(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RequestError, match=message):
        from_file(tmp_path / name)


def test_a_missing_file_is_said():
    with pytest.raises(RequestError, match=r"cannot read the prompt file /nowhere: No such file"):
        from_file("/nowhere")
