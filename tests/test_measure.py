"""Profiles, probes, followed answers and advice, on toy models."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import anydraft
from anydraft.backends.toy import ToyModel
from anydraft.choice import Choice
from anydraft.drafter import DraftSettings
from anydraft.drafters import make_drafter
from anydraft.drafters.lookup import LookupDrafter
from anydraft.engine import Engine
from anydraft.errors import RequestError
from anydraft.measure.advise import (
    Advice,
    DraftAdvice,
    Expectation,
    changes,
    expect,
    plain_answers,
    rank,
    verdict,
    why_not,
)
from anydraft.measure.follow import Answer, Counts, follow
from anydraft.measure.probe import TEXT, probe
from anydraft.measure.prompts import OWN, REPEATING, read_prompts
from anydraft.methods import MATCH
from anydraft.profile import (
    DraftProfile,
    Profile,
    Quiet,
    TargetProfile,
    Timing,
    files_hash,
    load_profile,
    profile_path,
    save_profile,
)
from anydraft.speed import Curve, SpeedModel
from cli_toys import Tool, toy
from toys import oracle_drafter, toy_target


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANYDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def timing(seconds: float) -> Timing:
    return Timing(seconds, 0.98 * seconds, 1.02 * seconds, 9)


def profile_of(verify: dict[int, float], draft: dict[int, float]) -> Profile:
    return Profile(
        target=TargetProfile(
            facts={"name": "t"},
            verify={64: {n: timing(s) for n, s in verify.items()}},
            overhead=timing(0.001),
        ),
        draft=DraftProfile(
            facts={"name": "d"}, draft={64: {k: timing(s) for k, s in draft.items()}}
        ),
        quiet=Quiet(0.02, 0.0),
        created="2026-01-01T00:00:00+00:00",
    )


PARALLEL = {1: 0.05, 17: 0.09}
SERIAL = {1: 0.05, 17: 0.8}


# ---- profiles


def test_a_profile_is_kept_under_what_decides_the_costs(cache: Path, tmp_path: Path) -> None:
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"GGUF" + bytes(300_000))
    target = toy_target()
    target.origin = {"path": str(weights), "options": {"dtype": "float32"}}  # type: ignore[attr-defined]
    profile = profile_of(PARALLEL, {1: 0.01})
    assert load_profile(target, "lookup") is None
    save_profile(profile, target, "lookup")
    assert load_profile(target, "lookup") == profile
    assert load_profile(target) is None  # another draft is another profile
    target.name = "under another name"
    assert load_profile(target, "lookup") == profile
    target.origin["options"]["dtype"] = "bfloat16"  # type: ignore[attr-defined]
    assert load_profile(target, "lookup") is None
    target.origin["options"]["dtype"] = "float32"  # type: ignore[attr-defined]
    before = files_hash(weights)
    weights.write_bytes(b"GGUF" + bytes(150_000) + b"x" + bytes(149_999))
    assert files_hash(weights) != before
    assert load_profile(target, "lookup") is None  # stale: the files have changed


def test_a_profile_belongs_to_how_the_draft_drafts(cache: Path, tmp_path: Path) -> None:
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"GGUF")
    target, draft = toy_target(), toy_target(2)
    for model in (target, draft):
        model.origin = {"path": str(weights)}  # type: ignore[attr-defined]
    profile = profile_of(PARALLEL, {1: 0.01})

    def drafter(**settings: Any) -> Any:
        return make_drafter(draft, target.vocabulary, DraftSettings(**settings))

    save_profile(profile, target, drafter(min_confidence=0.4))
    assert load_profile(target, drafter(min_confidence=0.4)) == profile
    for other in ({}, {"min_confidence": 0.2}, {"min_confidence": 0.4, "vocabulary": 5}):
        assert load_profile(target, drafter(**other)) is None
    stopping = Engine(target, drafter(min_confidence=0.4))
    assert stopping.experience().passes.known
    assert not Engine(target, drafter()).experience().passes.known


def test_a_profile_that_cannot_be_read_is_no_profile(cache: Path, tmp_path: Path) -> None:
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"GGUF")
    target = toy_target()
    target.origin = {"path": str(weights)}  # type: ignore[attr-defined]
    path = save_profile(profile_of(PARALLEL, {1: 0.01}), target)
    assert path is not None and path == profile_path(target)
    data = json.loads(path.read_text())
    for broken in ("", "{", "[]", json.dumps(data | {"version": 99}), json.dumps({"version": 1})):
        path.write_text(broken)
        assert load_profile(target) is None
    assert profile_path(toy_target()) is None  # a model made in memory has no files to know it by
    assert save_profile(profile_of(PARALLEL, {1: 0.01}), toy_target()) is None


def test_costs_between_two_context_lengths_lie_between() -> None:
    table = {
        64: {1: timing(1.0), 4: timing(2.0)},
        512: {1: timing(2.0), 4: timing(4.0)},
    }
    made = TargetProfile(facts={}, verify=table, overhead=timing(0.0))
    profile = Profile(target=made)
    assert profile.verify_curve(64)(4) == 2.0
    assert profile.verify_curve(288)(4) == pytest.approx(3.0)
    assert profile.verify_curve(10_000)(1) == 2.0
    assert profile.draft_curve()(3) == 0.0


@pytest.mark.parametrize("draft", ["model", "lookup", None])
def test_a_probe_measures_every_width_and_survives_the_cache(draft: str | None) -> None:
    target = toy_target()
    engine = anydraft.load(target, draft=toy_target(2) if draft == "model" else draft)
    told: list[float] = []
    found = probe(
        engine, seconds=0.05, contexts=(16, 40), widths=range(1, 6),
        progress=lambda what, share: told.append(share),
    )  # fmt: skip
    assert Profile.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert list(found.target.verify) == [16, 40]
    for row in found.target.verify.values():
        assert sorted(row) == [1, 2, 3, 4, 5]
        assert all(0 < t.low <= t.median <= t.high and t.count >= 3 for t in row.values())
    assert told == sorted(told)
    if draft is None:
        assert found.draft is None
    else:
        assert found.draft is not None and found.draft.draft[16].keys() == {1, 2, 4}
        assert bool(found.draft.step) == (draft == "model")
        assert (found.draft.passes[4] > 3) == (draft == "model")  # some end early


def test_a_probe_sees_what_a_row_and_a_draft_step_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only models move: 10 + 2 per row for the target, 3 per token for the draft."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def charging(model: ToyModel, fixed: float, per_token: float) -> ToyModel:
        inner = model.extend

        def extend(batch: Any) -> Any:
            now[0] += fixed + per_token * sum(len(ids) for _, ids, _ in batch)
            return inner(batch)

        model.extend = extend  # type: ignore[method-assign]
        return model

    engine = anydraft.load(
        charging(toy_target(), 10.0, 2.0), draft=charging(toy_target(2), 0.0, 3.0)
    )
    found = probe(engine, seconds=1.0, contexts=(16,), widths=range(1, 10))
    assert [found.verify_curve()(n) for n in (1, 2, 9)] == [12.0, 14.0, 28.0]
    assert found.draft is not None
    # Two tokens of text to read, the first of which gives the first candidate's logits.
    first, fourth = (found.draft.draft[16][k].median for k in (1, 4))
    assert fourth - first == pytest.approx(3 * 3.0)
    assert found.draft.step[16].median == 3.0
    assert found.target.read == pytest.approx((10 + 2 * 16) / 16)


def test_a_draft_that_foresees_the_text_costs_what_it_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Candidates left over from a longer draft before would make a short one look free."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    target = toy_target()
    text = target.vocabulary.encode_prompt(TEXT)

    def knows(tokens: Any) -> list[float]:
        ahead = text[len(tokens) % len(text)]
        return [float(token_id == ahead) for token_id in range(target.vocab_size)]

    draft = ToyModel(target.vocabulary, knows)
    for model, per_token in ((target, 1.0), (draft, 3.0)):
        inner = model.extend

        def extend(batch: Any, inner: Any = inner, per_token: float = per_token) -> Any:
            now[0] += per_token * sum(len(ids) for _, ids, _ in batch)
            return inner(batch)

        model.extend = extend  # type: ignore[method-assign]
    found = probe(anydraft.load(target, draft=draft), contexts=(16,), widths=(1, 2, 5, 17))
    assert found.draft is not None
    costs = {k: t.low for k, t in found.draft.draft[16].items()}
    assert costs[1] >= 3.0 and costs[4] >= 12.0 and costs[16] >= 48.0


def test_passes_without_logits_are_measured_beside_those_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Greedy(ToyModel):
        def extend(self, batch: Any) -> Any:
            now[0] += 10.0 + sum(len(ids) for _, ids, _ in batch)
            return super().extend(batch)

        def extend_greedy(self, batch: Any, forbidden: Any) -> Any:
            now[0] += 4.0 + sum(len(ids) for _, ids, _ in batch)
            return super().extend(batch)

    target = toy_target()
    engine = anydraft.load(Greedy(target.vocabulary, target.logits_fn), draft="lookup")
    found = probe(engine, seconds=1.0, contexts=(16,), widths=range(1, 6))
    assert [found.verify_curve()(n) for n in (1, 2, 5)] == [5.0, 6.0, 9.0]
    assert [found.verify_curve(sampled=True)(n) for n in (1, 2, 5)] == [11.0, 12.0, 15.0]
    assert found.speed_model([0.5], sampled=True).round_seconds(0) == 11.0
    assert Profile.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert engine.experience() is not engine.experience(sampled=True)


def test_an_engine_starts_from_the_kept_profile(cache: Path, tmp_path: Path) -> None:
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"GGUF")
    target = toy_target()
    target.origin = {"path": str(weights)}  # type: ignore[attr-defined]
    save_profile(profile_of(PARALLEL, {1: 0.01, 8: 0.08}), target, "lookup")
    engine = Engine(target, LookupDrafter())
    assert engine.experience().passes.mean(1) == pytest.approx(0.05)
    assert engine.experience().sources[0].costs.known
    fresh = Engine(toy_target(), LookupDrafter())
    assert fresh.experience().passes.count(1) == 0


# ---- how often a draft is right


def test_following_an_answer_counts_what_a_real_run_counts() -> None:
    plain = Engine(toy_target(seed=4))
    request = {"prompt": [0, 3], "max_tokens": 60, "ignore_eos": True}
    answer = plain.generate(**request)
    drafter = oracle_drafter(plain, request, wrong_every=4)
    real = Engine(plain.target, drafter, 3).generate(**request).stats
    (counts,) = follow(drafter, [Answer([0, 3], answer.token_ids)], 3)
    assert counts.acceptance[0] == pytest.approx(real.acceptance[0], abs=0.05)
    assert counts.rounds == pytest.approx(real.rounds, abs=1)
    assert counts.offers == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_following_draws_with_the_noise_of_the_answer(temperature: float) -> None:
    """A draft model that is the target for half of its scores; real rounds say how often."""
    target, draft = toy(5, max_length=None), toy(5, max_length=None)
    scores = draft.logits_fn
    draft.logits_fn = lambda tokens: scores(tokens if len(tokens) % 3 else tokens[:-1])
    engine = anydraft.load(target, draft=draft, num_draft_tokens=3)
    fields = {"temperature": temperature, "seed": 7}
    answers = plain_answers(engine, OWN[:3], max_tokens=40, **fields)
    counts = follow(engine.drafter, answers, 3)  # type: ignore[arg-type]
    for answer, count in zip(answers, counts, strict=True):
        real = engine.generate(list(answer.prompt_ids), max_tokens=40, ignore_eos=True, **fields)
        assert real.token_ids == answer.token_ids
        assert 0 < real.stats.draft_n_accepted < real.stats.draft_n
        # The last round may be asked for less, since it ends with the answer.
        assert abs(sum(count.accepted) - real.stats.draft_n_accepted) <= 3
        assert abs(count.rounds - real.stats.rounds) <= 1


def test_candidates_that_do_not_come_count_as_not_accepted() -> None:
    counts = Counts()
    counts.add(asked=3, offered=1, accepted=1)
    counts.add(asked=3, offered=0, accepted=0)
    assert counts.reached == [2, 1, 0] and counts.accepted == [1, 0, 0]
    assert counts.acceptance[0] == 0.5
    assert counts.offers == [0.5, 0.0, 0.0]
    other = Counts()
    other.add(asked=1, offered=1, accepted=1)
    other.merge(counts)
    assert other.reached == [3, 1, 0] and other.rounds == 3


# ---- advice


@pytest.mark.parametrize(
    ("acceptance", "verify", "draft", "reason"),
    [
        ([0.9], SERIAL, {0: 0.0, 1: 0.001}, "verification serial"),
        ([0.8], PARALLEL, {0: 0.0, 1: 0.06}, "draft too slow"),
        ([0.05], PARALLEL, {0: 0.0, 1: 0.005}, "acceptance too low"),
        ([0.02], PARALLEL, {0: 0.0}, "acceptance too low"),
    ],
)
def test_each_reason_is_told_from_the_others(
    acceptance: list[float], verify: dict[int, float], draft: dict[int, float], reason: str
) -> None:
    model = SpeedModel(acceptance=acceptance, verify=Curve(verify), draft=Curve(draft))
    assert model.speedup(max(range(1, 9), key=model.speedup)) < 1.03
    assert why_not(model) == reason


def advice_of(*speedups: float) -> Advice:
    drafts = []
    for index, speedup in enumerate(speedups):
        model = SpeedModel(
            acceptance=[0.5], verify=Curve(PARALLEL), draft=Curve({0: 0.0, 1: 0.01 * (index + 1)})
        )
        expectation = Expectation(
            "ordinary text", 2, speedup, speedup - 0.1, speedup + 0.1, 0.5,
            "" if speedup >= 1.03 else "draft too slow", model,
        )  # fmt: skip
        drafts.append(
            DraftAdvice(
                f"draft{index}",
                profile_of(PARALLEL, {1: 0.01}),
                [expectation],
                Choice(MATCH, "why"),
            )
        )
    return Advice("target", rank(drafts), 20.0)


def test_the_verdict_comes_first_and_names_the_best() -> None:
    said = verdict(advice_of(0.9, 1.4, 1.2))
    assert said.startswith("Use draft1 with 2 draft tokens: 1.40x")
    assert "1.30 to 1.50" in said
    doubtful = verdict(advice_of(1.05))
    assert "may gain nothing" in doubtful
    none = advice_of(0.8, 0.9)
    assert verdict(none).startswith("None of these drafts pays for target here: draft too slow")
    assert len(changes(none)) == 2
    assert verdict(advice_of(0.8)).startswith("Do not use draft0 for target here")
    assert advice_of(0.8).to_dict()["use"] is None
    assert advice_of(1.4).to_dict()["num_draft_tokens"] == 2


def test_expectations_come_from_counts_and_costs_by_kind_of_text() -> None:
    target = toy(1, max_length=None)
    engine = anydraft.load(target, draft=toy(1, max_length=None))
    answers = plain_answers(engine, OWN, max_tokens=12)
    profile = profile_of(PARALLEL, {1: 0.002, 8: 0.016})
    ordinary, repeating = expect(engine, profile, OWN, answers)
    assert repeating.kind == REPEATING
    assert ordinary.acceptance == 1.0  # the draft is the target
    assert ordinary.pays and ordinary.sure and ordinary.num_draft_tokens == 8
    assert ordinary.low <= ordinary.speedup <= ordinary.high
    model = profile.speed_model([1.0])
    assert ordinary.speedup == pytest.approx(model.speedup(8))


def test_prompt_files_of_both_forms(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text('one prompt\n\n{"text": "two"}\n{"prompt": "three"}\n{a brace\n')
    assert [p.text for p in read_prompts(path)] == ["one prompt", "two", "three", "{a brace"]
    path.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    assert read_prompts(path)[0].fields() == {"messages": ({"role": "user", "content": "hi"},)}
    for empty in ("", "\n\n"):
        path.write_text(empty)
        with pytest.raises(RequestError, match="is empty; put one prompt on each line"):
            read_prompts(path)
    path.write_text('{"question": "?"}')
    with pytest.raises(RequestError, match="line 1 of"):
        read_prompts(path)
    with pytest.raises(RequestError, match="cannot read the prompt file"):
        read_prompts(tmp_path / "missing")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    return Tool(monkeypatch, capsys)


def test_advise_says_the_verdict_first_and_ranks_drafts(
    tool: Tool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anydraft.cli.advise._QUICK_SECONDS", 0.5)
    flags = ("advise", "--target", "toy", "--draft", "base", "--draft", "instruct", "--quick")
    ran = tool(*flags)
    assert ran.code == 0, ran.err
    first = ran.out.splitlines()[0]
    assert first.startswith(("Use ", "None of these drafts pays for toy1 here: "))
    for name in ("base", "instruct", "lookup"):
        assert f"{name}, ordinary text: acceptance" in ran.out
        assert f"{name}, method match: it alone gives the tokens of plain decoding" in ran.out
    assert "Plain decoding:" in ran.out
    result = tool(*flags, "--json").json
    assert {d["draft"] for d in result["drafts"]} == {"base", "instruct", "lookup"}
    speedups = [d["expectations"][0]["speedup"] for d in result["drafts"]]
    assert speedups == sorted(speedups, reverse=True)
    for draft in result["drafts"]:
        for expected in draft["expectations"]:
            assert len(expected["table"]) == 9
            low, high = expected["speedup_interval"]
            assert low <= high


def test_advise_on_an_empty_prompt_file_loads_nothing(tool: Tool, tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("\n")
    ran = tool("advise", "--target", "toy", "--prompts", str(path))
    assert ran.code == 2 and tool.loads == 0
    assert "is empty" in ran.err


def test_a_noisy_machine_is_said() -> None:
    noisy = Quiet(spread=0.4, drift=0.3, load=0.6)
    assert not noisy.ok
    said = noisy.why_not()
    assert "varied by 40%" in said and "+30%" in said and "60% of the CPUs" in said
    assert Quiet(0.05, 0.02, 0.01).why_not() == ""
