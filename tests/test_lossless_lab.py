"""`anydraft verify` is silent on sound builds and names what is wrong with broken ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import anydraft
from anydraft.backends.toy import ToyModel
from anydraft.cli.verify import lines
from anydraft.measure.exact import ONE, TWO, prefix_law
from anydraft.measure.gtest import GTest, detectable_variation, pool
from anydraft.measure.law_memory import LawMemory
from anydraft.measure.law_tests import BATCH, LawLab, LawPlan, ModeLaw, Seen
from anydraft.measure.lossless import QUICK, LosslessReport, engines_of, prefixes, verify
from anydraft.measure.replay import Replay
from broken_builds import BROKEN, MODELS, VARIABLE, Broken, planted
from cli_toys import Tool
from test_gtest import kolmogorov_smirnov

NO_LIMIT = 1e9
SMALL = replace(
    QUICK,
    laws=LawPlan(2, (240, 144, 48), 1),
    max_tokens=16,
    identity_seconds=NO_LIMIT,
    law_seconds=NO_LIMIT,
    state_seconds=NO_LIMIT,
)
QUICKLY_FOUND = ("KV one too long",)  # the others run in `make test`


def run(
    draft: str | None, modes: Any = None, seed: int = 0, effort: int = 1, what: Any = SMALL
) -> LosslessReport:
    source = draft if draft in (None, "lookup") else MODELS[str(draft)]()
    one, two, untruncated = what.laws.draws
    laws = replace(what.laws, draws=(effort * one, effort * two, untruncated))
    with anydraft.load(MODELS["toy"](), draft=source) as engine:
        return verify(engine, replace(what, laws=laws), seed=seed, modes=modes)


@pytest.mark.parametrize(
    "draft",
    [
        None,
        pytest.param("lookup", marks=pytest.mark.slow),
        pytest.param("cousin", marks=pytest.mark.slow),
        pytest.param("stranger", marks=pytest.mark.slow),
    ],
)
def test_sound_builds_pass(draft: str | None) -> None:
    report = run(draft)
    assert report.passed, report.diagnosis
    assert report.verdict.startswith("LOSSLESS")
    assert report.same.identical == report.same.compared > 0
    modes = {
        None: {"plain"},
        "lookup": {"plain"},
        "cousin": {"plain", "same+rejection", "same+block"},
        "stranger": {"plain"}
        | {f"{law}+{v}" for law in ("union", "tli", "ttp") for v in ("rejection", "block")},
    }[draft]
    assert set(report.laws) == modes
    for mode, result in report.laws.items():
        again = 2 if mode in report.confirmed else 1
        assert len(result.first) == 5 and len(result.pair) == 4
        assert pool(result.first).draws == again * (2 * 384 + 48)
        if mode != "plain":
            assert 0.1 < result.accepted / result.drafted < 0.98, mode


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(
            b,
            marks=() if b.name in QUICKLY_FOUND else pytest.mark.slow,
            id=b.name.replace(" ", "-"),
        )
        for b in BROKEN
    ],
)
def test_broken_builds_are_found_and_named(broken: Broken) -> None:
    with planted(broken.name):
        report = run(broken.draft, broken.modes, effort=broken.effort)
    assert not report.passed
    assert report.verdict.startswith("VIOLATION")
    first = report.diagnosis[0]
    assert first.startswith(broken.kind), report.diagnosis
    assert broken.says in first, first


def test_time_is_kept_and_said() -> None:
    """Each part runs at least once, modes get the same number of draws, and the table says so."""
    hurried = replace(SMALL, identity_seconds=0, law_seconds=0, state_seconds=0)
    report = run("cousin", what=hurried)
    assert report.passed and report.law_prefixes == 1
    assert report.same.ended_early and report.same.compared == 2
    assert report.states.histories == 1
    assert {pool(r.first).draws for r in report.laws.values()} == {BATCH}
    text = "\n".join(lines(report))
    assert "time was up" in text and "1 prefixes" in text


def test_a_small_context_is_enough() -> None:
    sound = MODELS["toy"]()
    with anydraft.load(ToyModel(sound.vocabulary, sound.logits_fn, 64), draft="lookup") as engine:
        report = verify(engine, SMALL)
    assert report.passed, report.diagnosis
    assert report.states.histories == 2


def test_a_draft_that_fails_is_no_pass() -> None:
    class Failing(ToyModel):
        def extend(self, batch: Any) -> Any:
            raise RuntimeError("out of memory")

    sound = MODELS["cousin"]()
    draft = Failing(sound.vocabulary, sound.logits_fn, name="failing")
    with anydraft.load(MODELS["toy"](), draft=draft) as engine:
        report = verify(engine, SMALL, modes=["same+rejection"])
    assert not report.passed
    assert report.diagnosis[0].startswith("failure in match, same+rejection")
    assert "out of memory" in report.diagnosis[0]


# ---- the p-values themselves


def lab_of(engine: Any) -> tuple[LawLab, list[str], list[list[int]]]:
    target = Replay(engine.target)
    engines, draftable = engines_of(engine, target)
    return (
        LawLab(target, engines, draftable, seed=77),
        list(engines),
        prefixes(engine.vocabulary, 8),
    )


def repeats(
    lab: LawLab, mode: str, at: Sequence[Sequence[int]], setting: Any, count: int, draws: int
) -> tuple[list[GTest], list[GTest], GTest, GTest]:
    """Independent tests of first tokens and pairs in turn at these prefixes, and all pooled."""
    first_tests, pair_tests, first_all, pair_all = [], [], [], []
    with LawMemory():
        for prefix in at:
            law = prefix_law(lab.target, prefix, setting, lab.forbidden)
            first, pair = lab.cells(law, draws)
            assert pair is not None
            total: tuple[Counter[Any], Counter[Any]] = Counter(), Counter()
            for _ in range(count // len(at)):
                seen = Seen()
                for _ in range(draws // BATCH):
                    got = lab.draw(mode, prefix, setting, BATCH)
                    seen.add(setting.count, got, ModeLaw(mode))
                first_tests.append(first.test(seen.firsts))
                pair_tests.append(pair.test(seen.pairs))
                total[0].update(seen.firsts)
                total[1].update(seen.pairs)
            first_all.append(first.test(total[0]))
            pair_all.append(pair.test(total[1]))
    return first_tests, pair_tests, pool(first_all), pool(pair_all)


def check_uniform(tests: Sequence[GTest]) -> None:
    p_values = [t.p_value for t in tests]
    assert kolmogorov_smirnov(p_values) > 1e-3, sorted(p_values)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", "same+block"])
def test_p_values_of_200_repeats_are_uniform(mode: str) -> None:
    with anydraft.load(MODELS["toy"](), draft=MODELS["cousin"]()) as engine:
        lab, _, at = lab_of(engine)
        first, pair, _, _ = repeats(lab, mode, at[:2], TWO, 200, 48)
    assert len(first) == len(pair) == 200
    check_uniform(first)
    check_uniform(pair)


@pytest.mark.verify
@pytest.mark.parametrize("draft", ["cousin", "tiny stranger"])
def test_p_values_of_all_modes_are_uniform(draft: str) -> None:
    with anydraft.load(MODELS["toy"](), draft=MODELS[draft]()) as engine:
        lab, modes, at = lab_of(engine)
        for mode in modes:
            first, pair, first_all, pair_all = repeats(lab, mode, at[:4], TWO, 200, 96)
            check_uniform(first)
            check_uniform(pair)
            for pooled in (first_all, pair_all):
                assert pooled.p_value > 1e-4, (mode, pooled)
                assert detectable_variation(pooled.draws, pooled.df) < 0.02


@pytest.fixture(scope="module")
def real(gemma_path: Path, smollm_path: Path) -> Iterator[Any]:
    engine = anydraft.load(gemma_path, draft=smollm_path)
    yield lab_of(engine)
    engine.close()


LAWS = [f"{law}+{v}" for law in ("union", "tli", "ttp") for v in ("rejection", "block")]


@pytest.mark.verify
@pytest.mark.parametrize("mode", ["plain", *LAWS])
def test_laws_on_real_weights(mode: str, real: Any) -> None:
    """19,200 draws per mode, two thirds with one token drafted, the others with two.

    200 independent repeats have uniform p-values; pooled, a total variation of 0.02 would show.
    """
    lab, modes, at = real
    assert set(modes) == {"plain", *LAWS}
    single = repeats(lab, mode, at[:4], ONE, 132, 96)
    double = repeats(lab, mode, at[:4], TWO, 68, 96)
    for kind in (0, 1):
        check_uniform([*single[kind], *double[kind]])
        pooled = pool([single[2 + kind], double[2 + kind]])
        sees = detectable_variation(pooled.draws, pooled.df)
        uniform = kolmogorov_smirnov([t.p_value for t in [*single[kind], *double[kind]]])
        name = "pair" if kind else "first"
        print(
            f"{mode} {name}: {pooled.draws} draws, df {pooled.df}, p = {pooled.p_value:.3f}, "
            f"sees {sees:.4f}, KS {uniform:.3f}",
            flush=True,
        )
        assert pooled.p_value > 1e-4
        if kind == 0:
            assert sees < 0.02


# ---- the command


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    made = Tool(monkeypatch, capsys)
    made.models |= {name: make() for name, make in MODELS.items()}
    return made


def test_the_command_prints_a_verdict_and_a_table(tool: Tool) -> None:
    ran = tool("verify", "--target", "toy", "--quick")
    assert ran.code == 0
    head, *table = ran.out.splitlines()
    assert head.startswith("LOSSLESS: speaker 1: no violation")
    assert any(line.startswith("same tokens as plain decoding") for line in table)
    assert any(line.startswith("plain ") for line in table)
    assert "states: random histories" in ran.err


def test_the_command_gives_json_and_exit_code_1(tool: Tool) -> None:
    with planted("KV one too long"):
        ran = tool("verify", "--target", "toy", "--draft", "lookup", "--quick", "--json")
    assert ran.code == 1
    report = ran.json
    assert report["passed"] is False and report["draft"] == "lookup"
    assert report["diagnosis"][0].startswith("rollback")
    assert report["laws"][0]["mode"] == "plain"
    assert 0 <= report["laws"][0]["first_token"]["p"] <= 1


@pytest.mark.slow
def test_the_command_keeps_to_the_method_asked_for(tool: Tool) -> None:
    options = ["--target", "toy", "--draft", "cousin", "--quick", "--json"]
    ran = tool("verify", *options, "--method", "same+rejection")
    assert ran.code == 0
    assert [law["mode"] for law in ran.json["laws"]] == ["plain", "same+rejection"]
    assert ran.json["teacher_forced"]["violations"] == 0
    ran = tool("verify", *options, "--guarantee", "seed")
    assert [law["mode"] for law in ran.json["laws"]] == ["plain"]


def test_the_command_says_what_cannot_be_loaded(tool: Tool) -> None:
    ran = tool("verify", "--target", "nothing", "--quick")
    assert ran.code == 3 and "nothing" in ran.err


@pytest.mark.slow
@pytest.mark.parametrize(("broken", "code"), [("", 0), ("bonus from the draft", 1)])
def test_a_broken_build_behind_a_variable(broken: str, code: int) -> None:
    """The command line itself, in a process of its own."""
    environment = {**os.environ, VARIABLE: broken}
    script = Path(__file__).parent / "broken_builds.py"
    command = [sys.executable, str(script), "verify", "--target", "toy", "--draft", "cousin"]
    done = subprocess.run(
        [*command, "--quick"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stderr
    verdict = done.stdout.splitlines()[0]
    assert verdict.startswith("VIOLATION" if code else "LOSSLESS")
    assert not code or "law of the pair" in verdict
