"""The benchmark: what it measures, what it keeps, and how it goes on."""

from __future__ import annotations

import csv
import html
import json
import math
import random
import re
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from anydraft.backends.toy import ToyModel
from anydraft.cli.main import main
from anydraft.errors import CacheError, RequestError
from anydraft.measure import bench, bench_predict, bench_results, bench_stats, report
from anydraft.measure.bench_machine import EnergyMeter
from anydraft.measure.bench_plan import (
    Contender,
    PairSpec,
    Plan,
    parse_lengths,
    parse_sampling,
    plan_from_dict,
)
from anydraft.measure.bench_run import turns
from anydraft.measure.timed import TimedModel
from anydraft.model import GreedyModel
from anydraft.speed import Curve, SpeedModel
from cli_toys import Tool, toy
from made_results import MadePair, made_results

PAIR = PairSpec("toy", "base")


@pytest.fixture
def tool(monkeypatch, capsys, tmp_path) -> Tool:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_predict, "PROBE_SECONDS", 0.01)
    monkeypatch.setattr(
        bench.gc, "collect", lambda: 0
    )  # toys are small, and it takes half the time
    return Tool(monkeypatch, capsys)


def prompts(*texts: str) -> str:
    """A file of prompts in the current folder."""
    rows = [json.dumps({"id": f"p{i}", "kind": "k", "text": t}) for i, t in enumerate(texts)]
    Path("prompts.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return "prompts.jsonl"


def options(*texts: str) -> list[str]:
    """Of a short benchmark of toy and base over these prompts."""
    return ["bench", "--target", "toy", "--draft", "base", "--prompts", prompts(*texts or ("Hi",)),
            "--num-draft-tokens", "1,2", "--max-tokens", "12", "--no-predict", "-q"]  # fmt: skip


def stored(path: str = "bench.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found


# --- a whole run ----------------------------------------------------------------------------------


def test_every_contender_takes_a_turn_on_every_prompt(tool):
    ran = tool(*options("One", "Two"), "--sampling", "greedy", "--sampling", "temperature=0.9")
    assert ran.code == 0, ran.err
    results = stored()
    assert results["complete"] is True
    keys = [
        (r["sampling"], r["prompt"], r["contender"], r["num_draft_tokens"]) for r in results["runs"]
    ]
    assert sorted(keys) == sorted(
        (sampling, prompt, contender, length)
        for sampling in ("greedy", "temperature=0.9")
        for prompt in ("p0", "p1")
        for contender, length in (("plain", 0), ("draft", 1), ("draft", 2))
    )
    assert [r["slot"] for r in results["runs"][:3]] == [0, 1, 2]  # interleaved
    assert {r["identity"] for r in results["runs"]} == {"identical"}
    assert "toy + base, temperature=0.9" in ran.out
    assert "2 of 2" in ran.out


def test_passes_are_timed_whichever_way_they_go():
    class Greedy:
        def extend(self, batch):
            return [f"logits of {len(batch[0][1])}"]

        def extend_greedy(self, batch, forbidden):
            return [f"ids of {len(batch[0][1])} without {forbidden}"]

    timed = TimedModel(Greedy())
    assert isinstance(timed, GreedyModel)
    assert timed.extend([("state", [1, 2], 1)]) == ["logits of 2"]
    assert timed.extend_greedy([("state", [1], 1)], [[7]]) == ["ids of 1 without [[7]]"]
    assert [one.tokens for one in timed.passes] == [2, 1]
    assert not isinstance(TimedModel(ToyModel), GreedyModel)


def test_runs_hold_what_the_statistics_need(tool):
    assert tool(*options()).code == 0
    plain, drafted = stored()["runs"][0], stored()["runs"][-1]
    assert plain["drafted_at"] == []
    assert plain["passes"]["1"][0] == plain["rounds"] - 1
    assert drafted["num_draft_tokens"] == 2
    assert sum(count for count, _ in drafted["passes"].values()) == drafted["rounds"] - 1
    assert drafted["draft_n_accepted"] == sum(drafted["accepted_at"])
    later = sum(drafted[f"later_{part}_seconds"] for part in ("draft", "target", "overhead"))
    assert later == pytest.approx(drafted["seconds"] - drafted["first_seconds"], rel=0.5)
    assert stored()["pairs"][0]["memory"]["running"] > 0


def test_a_draft_that_breaks_is_seen_in_the_cell(tool):
    def fail(length: int) -> None:
        raise RuntimeError("broken")

    tool.models["base"] = toy(2, before=fail)
    assert tool(*options()).code == 0
    cell = stored()["cells"][1]
    assert cell["draft_errors"] == 1
    assert cell["identity"] == {"identical": 1}


def test_a_target_without_a_draft_is_measured_alone(tool):
    ran = tool("bench", "--target", "toy", "--prompts", prompts("Hi"), "-q")
    assert ran.code == 0, ran.err
    assert [c["contender"] for c in stored()["cells"]] == ["plain"]


def test_several_turns_go_on_from_what_plain_decoding_said(tool):
    row = {"question_id": 1, "category": "c", "turns": ["First", "Second"]}
    Path("q.jsonl").write_text(json.dumps(row))
    ran = tool("bench", "--target", "instruct", "--draft", "lookup", "--prompts", "q.jsonl",
               "--num-draft-tokens", "2", "--max-tokens", "9", "--no-predict", "-q")  # fmt: skip
    assert ran.code == 0, ran.err
    first, second = (r for r in stored()["runs"] if r["contender"] == "plain")
    assert (first["turn"], second["turn"]) == (0, 1)
    assert second["prompt_tokens"] > first["prompt_tokens"] + len("Second")
    assert "instruct + lookup" in ran.out


def test_a_prompt_that_does_not_fit_is_skipped_and_said(tool):
    ran = tool(*options("Hi", "long " * 200))
    assert ran.code == 0, ran.err
    (skipped,) = (r for r in stored()["runs"] if r.get("skipped"))
    assert "holds 400" in skipped["skipped"]
    assert "1 prompt was skipped" in ran.err
    assert {c["runs"] for c in stored()["cells"]} == {1}


def test_a_difference_is_judged_and_fails_the_benchmark(tool, monkeypatch):
    from anydraft import identity
    from anydraft.measure import bench_run

    original = bench_run._identity_of
    calls: list[int] = []

    def altered(ids: Any) -> dict[str, Any]:
        calls.append(1)
        return original([*ids, 1] if len(calls) == 5 else ids)  # after three to warm up

    monkeypatch.setattr(bench_run, "_identity_of", altered)
    report = identity.IdentityReport(
        False, (), (identity.Difference(0, 1, 2, math.inf, 0.1),), 0.1, 0
    )
    monkeypatch.setattr(identity, "compare_with_plain", lambda *_: report)
    ran = tool(*options())
    assert ran.code == 1
    assert [r["identity"] for r in stored()["runs"]] == ["identical", "violation", "identical"]


def test_predictions_are_made_before_and_kept_with_the_pair(tool):
    arguments = [a for a in options() if a != "--no-predict"]
    assert tool(*arguments, "--sampling", "greedy", "--sampling", "temperature=1").code == 0
    prediction = stored()["pairs"][0]["prediction"]
    assert set(prediction["sampling"]) == {"greedy", "temperature=1"}
    greedy = prediction["sampling"]["greedy"]
    assert greedy["speedup"]["0"] == 1.0
    assert greedy["speedup"]["2"] > 0
    assert 0 <= greedy["acceptance"][0] <= 1
    assert prediction["verify_seconds"]["1"] > 0
    assert prediction["draft_seconds"]["1"] > 0


class Clock:
    """A clock that only models move."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Paced:
    """A model whose passes take a set time: `first` seconds and `more` for each further token.

    Prompts take as long as one token.
    """

    origin: ClassVar[dict[str, Any]] = {}

    def __init__(self, model: Any, clock: Clock, first: float, more: float) -> None:
        self.model, self.clock, self.first, self.more = model, clock, first, more
        self.runtime, self.vocabulary = model.runtime, model.vocabulary
        self.name, self.vocab_size, self.max_length = model.name, model.vocab_size, None

    def new_state(self) -> Any:
        return self.model.new_state()

    def close(self) -> None:
        self.model.close()

    def extend(self, batch: Any) -> Any:
        width = len(batch[0][1])
        self.clock.now += self.first + self.more * (width - 1 if width < 30 else 0)
        return self.model.extend(batch)


def near(first: int, second: int, weight: float) -> ToyModel:
    """A toy that says mostly what toy `first` says: the more, the smaller the weight."""
    one, other = toy(first, None, eos=False), toy(second, None, eos=False)

    def logits(tokens: tuple[int, ...]) -> list[float]:
        both = zip(one.logits_fn(tokens), other.logits_fn(tokens), strict=True)
        return [a + weight * b for a, b in both]

    return ToyModel(one.vocabulary, logits, None, name="near")


def test_costs_are_measured_as_they_are_and_explain_the_speed(tool, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    tool.models["toy"] = Paced(toy(1, None, eos=False), clock, 0.02, 0.002)
    tool.models["near"] = Paced(near(1, 2, 0.4), clock, 0.003, 0.001)
    ran = tool("bench", "--target", "toy", "--draft", "near", "--num-draft-tokens", "1,3",
               "--max-tokens", "30", "--limit", "2", "--kinds", "writing,code,mathematics", "-q",
               "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    prediction = stored()["pairs"][0]["prediction"]
    assert prediction["sampling"]["greedy"]["row_cost"] == pytest.approx(0.1)
    verify, draft = (
        Curve({int(n): s for n, s in prediction[f"{name}_seconds"].items()})
        for name in ("verify", "draft")
    )
    for cell in ran.json["cells"][1:]:
        # The toys' answers are too much alike for other prompts to tell the acceptance.
        model = SpeedModel(acceptance=cell["acceptance"], verify=verify, draft=draft)
        length = cell["num_draft_tokens"]
        assert cell["speedup"]["geometric_mean"] > 1.1
        assert cell["speedup"]["geometric_mean"] == pytest.approx(model.speedup(length), rel=0.1)
        # The last rounds of an answer are shorter.
        assert cell["round_seconds"]["target"] == pytest.approx(verify(length + 1), rel=0.06)
        assert cell["round_seconds"]["overhead"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.slow
def test_the_runtimes_own_generation_takes_turns_too(tmp_path, monkeypatch, capsys):
    from torch_families import byte_tokenizer, stock_model

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_predict, "PROBE_SECONDS", 0.01)
    monkeypatch.setenv("ANYDRAFT_CACHE", str(tmp_path / "cache"))
    for name in ("one", "two"):
        stock_model("llama").save_pretrained(name)
        byte_tokenizer().save_pretrained(name)
    arguments = ["bench", "--target", "./one", "--draft", "./two", "--num-draft-tokens", "2,auto",
                 "--max-tokens", "14", "--prompts", prompts("One two", "Three"), "--native", "all",
                 "-q"]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0, capsys.readouterr().err
    results = stored()
    assert results["pairs"][0]["native"] == "measured"
    assert results["pairs"][0]["target"]["dtype"] == "float32"
    cells = {(c["contender"], c["num_draft_tokens"]): c for c in results["cells"]}
    assert set(cells) == {("plain", 0), ("draft", 2), ("draft", "auto"), ("native", 0),
                          ("native_draft", 2)}  # fmt: skip
    assert {v for c in cells.values() for v in c["identity"]} == {"identical"}
    assert cells["draft", 2]["acceptance"][0] == 1.0  # the draft is the target
    assert cells["native", 0]["speedup"] is not None
    assert "transformers' generate()" in html.unescape(report.html(results))


# --- interruption ---------------------------------------------------------------------------------


def interrupted(plan: Plan, after: int) -> dict[str, Any]:
    """Results of a benchmark that was stopped in the block after so many."""
    results = bench.begin(plan)
    saved: list[int] = []

    def save(found: dict[str, Any]) -> None:
        saved.append(len(found["runs"]))
        bench_results.write("bench.json", found)

    assert bench.run(plan, results, save, cancelled=lambda: len(saved) > after) is False
    return results


def plan_of(*texts: str) -> Plan:
    return Plan((PAIR,), (1, 2), max_tokens=12, predict=False, prompt_file=prompts(*texts))


def test_an_interrupted_benchmark_keeps_whole_prompts_and_goes_on(tool):
    interrupted(plan_of("One", "Two", "Three"), after=1)
    kept = stored()
    assert kept["complete"] is False
    assert {r["prompt"] for r in kept["runs"]} == {"p0"}
    assert len(kept["runs"]) == 3
    ran = tool("bench", "--resume", "bench.json", "-q")
    assert ran.code == 0, ran.err
    whole = stored()
    assert whole["runs"][:3] == kept["runs"]  # nothing measured twice, nothing lost
    assert [r["prompt"] for r in whole["runs"][3:]] == ["p1"] * 3 + ["p2"] * 3
    assert whole["complete"] is True
    assert whole["created"] == kept["created"]
    loads = tool.loads
    assert tool("bench", "--resume", "bench.json", "-q").code == 0
    assert tool.loads == loads  # nothing left to measure, so nothing is loaded


def test_ctrl_c_says_where_things_are_and_how_to_go_on(tool, monkeypatch):
    original = bench._turn

    def pressed(*arguments: Any) -> Any:
        if arguments[3]["prompt"] == "p1":
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(bench, "_turn", pressed)
    ran = tool(*options("One", "Two"), "--csv", "runs.csv")
    assert ran.code == 130
    assert "Go on: anydraft bench --resume bench.json" in ran.err
    assert {r["prompt"] for r in stored()["runs"]} == {"p0"}
    assert len(list(csv.DictReader(open("runs.csv")))) == 3


def test_a_draft_that_cannot_be_loaded_loses_nothing_that_is_there(tool):
    ran = tool(*options(), "--draft", "absent")
    assert ran.code == 3
    assert "no model 'absent'" in ran.err
    assert len(stored()["runs"]) == 3


def test_changed_prompts_cannot_be_gone_on_with(tool):
    interrupted(plan_of("One", "Two"), after=1)
    before = Path("bench.json").read_bytes()
    prompts("One", "Other")
    ran = tool("bench", "--resume", "bench.json", "-q")
    assert ran.code == 2
    assert "the prompts have changed since this benchmark began" in ran.err
    assert Path("bench.json").read_bytes() == before


def test_results_are_not_overwritten(tool):
    assert tool(*options()).code == 0
    before = Path("bench.json").read_bytes()
    ran = tool(*options())
    assert ran.code == 2
    assert "exists and is not overwritten: go on with it by --resume bench.json" in ran.err
    assert Path("bench.json").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "is damaged: it is not complete JSON"),
        (lambda text: "[]", "is not a result file of `anydraft bench`"),
        (lambda text: text.replace('"version": 1', '"version": 2', 1), "has version 2 of the"),
        (lambda text: text.replace('"runs": [', '"other": [', 1), "'runs' is missing"),
        (lambda text: text.replace('"repeat"', '"again"', 1), "is damaged: one of its runs lacks"),
        (lambda text: text.replace('"draft_options"', '"options"', 1), "plan .* is damaged"),
    ],
)
def test_files_that_are_no_results_are_refused_and_left_alone(tool, change, message):
    bench_results.write("bench.json", made_results())
    Path("bench.json").write_text(change(Path("bench.json").read_text()))
    before = Path("bench.json").read_bytes()
    ran = tool("bench", "--resume", "bench.json", "-q")
    assert ran.code == 2
    assert re.search(message, ran.err), ran.err
    assert Path("bench.json").read_bytes() == before


def test_a_disk_that_is_full_leaves_the_last_results(tmp_path, monkeypatch):
    results = made_results()
    file = tmp_path / "r.json"
    bench_results.write(file, results)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench_results.os, "fsync", full)
    with pytest.raises(CacheError, match="No space left on device"):
        bench_results.write(file, results)
    assert bench_results.read(file)["runs"] == results["runs"]
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "toy", "--kinds", "poetry"], "no workload 'poetry'"),
        (["--target", "toy", "--num-draft-tokens", "two"], "draft lengths look like"),
        (["--target", "toy", "--num-draft-tokens", "65"], "1 to 64 or auto"),
        (["--target", "toy", "--sampling", "warm"], "sampling is 'greedy' or e.g."),
        (["--target", "toy", "--sampling", "temperature=-1"], "temperature"),
        (["--target", "toy", "--native", "both"], "native must be one of"),
        (["--target", "toy", "--max-tokens", "0"], "max_tokens must be at least 1"),
        (["--target", "toy", "--target", "toy"], "is there twice"),
        (["--target", "toy", "--threads", "0"], "threads must be at least 1"),
        (["--target", "toy", "--output", "none/bench.json"], "its folder is missing"),
        ([], "give at least one --target"),
        (["--target", "toy", "--resume", "x.json"], "takes the models from the file"),
        (["--resume", "absent.json"], "cannot read absent.json: No such file"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_is_loaded(tool, arguments, message):
    ran = tool("bench", *arguments)
    assert ran.code == 2
    assert message in ran.err
    assert tool.loads == 0
    assert not Path("bench.json").exists()


def test_an_empty_prompt_file_is_said(tool):
    Path("empty.jsonl").write_text("")
    ran = tool("bench", "--target", "toy", "--prompts", "empty.jsonl")
    assert ran.code == 2
    assert "the prompt file empty.jsonl is empty" in ran.err


def test_lengths_and_sampling_are_read():
    assert parse_lengths("1-3,8,auto,2") == (1, 2, 3, 8, "auto")
    assert parse_lengths("0,1") == (1,)  # plain decoding is always measured
    assert parse_sampling("temperature=0.7, top_k=40") == {"temperature": 0.7, "top_k": 40}
    assert parse_sampling("greedy") == {}


def test_a_plan_survives_being_written():
    plan = Plan((PairSpec("a", "b", {"dtype": "float32"}, {"threads": 1}, note="n"),),
                (1, "auto"), kinds=("code",), chat=False)  # fmt: skip
    assert plan_from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_methods_differ_only_where_answers_are_sampled():
    plan = Plan((PAIR,), (2,), methods=("match", "tli+block"), sampling=("greedy", "top_p=0.9"))
    for sampling in ("greedy", "top_p=0.9"):  # the latter at temperature 0
        found = plan.contenders(PAIR, sampling, native=False)
        assert [str(c) for c in found] == ["plain", "draft K=2"]
    found = plan.contenders(PAIR, "temperature=1", native=True)
    assert [str(c) for c in found] == ["plain", "draft K=2", "draft tli+block K=2"]
    assert Contender("native") in plan.contenders(PAIR, "greedy", native=True)


def test_turns_rotate_and_plain_decoding_comes_again():
    contenders = [Contender("plain"), *(Contender("draft", "match", k) for k in range(1, 7))]
    first = [c.num_draft_tokens for c in turns(contenders, 0)]
    assert first == [0, 1, 2, 3, 4, 0, 5, 6]
    assert [c.num_draft_tokens for c in turns(contenders, 7)] == [0, 2, 3, 4, 5, 0, 6, 1]
    assert turns(contenders[:1], 3) == contenders[:1]


# --- statistics -----------------------------------------------------------------------------------


def test_cells_find_the_speeds_that_the_runs_were_made_with():
    results = made_results((MadePair("pair", 0.75, 0.004, 0.08),), (2, 4))
    plain, two, four = results["cells"]
    expected = 1.75 + 0.75**2
    assert two["tokens_per_round"] == pytest.approx(expected, rel=0.02)
    assert two["acceptance"] == pytest.approx([0.75, 0.75], abs=0.01)
    assert two["survival"] == pytest.approx([0.75, 0.5625], abs=0.01)
    seconds = 0.008 + 0.03 * 1.16
    assert two["speedup"]["geometric_mean"] == pytest.approx(0.03 * expected / seconds, rel=0.03)
    assert two["speedup"]["low"] < two["speedup"]["geometric_mean"] < two["speedup"]["high"]
    assert two["round_seconds"]["draft"] == pytest.approx(0.008)
    assert plain["speedup"]["geometric_mean"] == 1.0
    assert set(four["speedup_by_kind"]) == {"writing", "code"}
    cost = bench_stats.verify_cost(results["runs"], "pair")
    assert cost == pytest.approx({1: 0.03, 3: 0.03 * 1.16, 5: 0.03 * 1.32})


def test_ratios_are_taken_within_a_block():
    """A machine that is half as fast for one prompt changes no ratio."""
    results = made_results((MadePair("pair", 0.75, 0.004, 0.08),), (2,))
    before = results["cells"][1]["speedup"]
    for run in results["runs"]:
        if run["prompt"] == "p1":
            for name in ("seconds", "first_seconds"):
                run[name] *= 2
    assert bench_stats.summarise(results["runs"])[1]["speedup"] == pytest.approx(before)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    source = random.Random(1)
    hits = 0
    for _ in range(150):
        ratios = [math.exp(source.gauss(0.3, 0.2)) for _ in range(24)]
        found = bench_stats.spread(ratios)
        assert found is not None
        hits += found["low"] <= math.exp(0.3) <= found["high"]
    assert 0.86 <= hits / 150 <= 0.99


def test_short_answers_say_nothing_about_speed():
    results = made_results((MadePair("pair", 0.75, 0.004, 0.08),), (2,))
    for run in results["runs"]:
        if run["prompt"] == "p0":
            run["tokens"] = 5
    cell = bench_stats.summarise(results["runs"])[1]
    assert (cell["prompts"], cell["short_prompts"]) == (2, 1)
    assert bench_stats.spread([]) is None


# --- tables and energy ----------------------------------------------------------------------------


def test_tables_open_elsewhere(tmp_path):
    results = made_results()
    results["runs"][0]["prompt"] = "=1+1"
    bench_results.write_csv(tmp_path / "r.csv", results)
    with open(tmp_path / "r.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(results["runs"])
    assert rows[0]["prompt"] == "'=1+1"  # not a formula
    assert rows[1]["accepted_at"] == "75"
    parquet = pytest.importorskip("pyarrow.parquet")
    bench_results.write_parquet(tmp_path / "r.parquet", results)
    table = parquet.read_table(tmp_path / "r.parquet")
    assert table.num_rows == len(results["runs"])
    assert table.column("num_draft_tokens").to_pylist()[-1] == "8"
    assert table.column("seconds").to_pylist()[0] == results["runs"][0]["seconds"]


def test_parquet_without_pyarrow_is_said_before_measuring(tool, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    ran = tool(*options(), "--parquet", "r.parquet")
    assert ran.code == 2
    assert "pip install 'anydraft[report]'" in ran.err
    assert tool.loads == 0


def test_energy_is_read_where_the_machine_reports_it(tmp_path):
    def report(zone: str, microjoules: int) -> None:
        folder = tmp_path / zone
        folder.mkdir(exist_ok=True)
        (folder / "energy_uj").write_text(f"{microjoules}\n")
        (folder / "max_energy_range_uj").write_text("10000000\n")

    for zone in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0"):
        report(zone, 9_000_000)
    meter = EnergyMeter(tmp_path)
    report("intel-rapl:0", 9_500_000)
    report("intel-rapl:0:0", 9_900_000)  # a part of zone 0: not counted twice
    assert meter.read() == pytest.approx(0.5)
    report("intel-rapl:1", 1_000_000)  # the counter wrapped
    assert meter.read() == pytest.approx(2.0)
    assert EnergyMeter(tmp_path / "nothing").read() is None
    assert not EnergyMeter(tmp_path / "nothing").available


def test_unknown_methods_are_refused(tool):
    ran = tool(*options(), "--method", "guess")
    assert ran.code == 2
    assert "guess" in ran.err


def test_plan_refuses_nothing_to_measure():
    with pytest.raises(RequestError, match="at least one target"):
        Plan(())
