"""`anydraft verify` is silent on sound builds and names what is wrong with broken ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import anydraft
from anydraft.measure.faults import FIRST, PAIR
from anydraft.measure.gtest import pool
from anydraft.measure.law_tests import LawLab, LawPlan
from anydraft.measure.lossless import QUICK, LosslessReport, _engines, prefixes, verify
from anydraft.measure.replay import Replay
from broken_builds import BROKEN, MODELS, VARIABLE, Broken, planted
from cli_toys import Tool
from test_gtest import kolmogorov_smirnov

SMALL = replace(QUICK, laws=LawPlan(2, (384, 192, 96), 1), max_tokens=16)


def run(draft: str | None, modes: Any = None, seed: int = 0) -> LosslessReport:
    source = draft if draft in (None, "lookup") else MODELS[str(draft)]()
    with anydraft.load(MODELS["toy"](), draft=source) as engine:
        return verify(engine, SMALL, seed=seed, modes=modes)


@pytest.mark.parametrize(
    "draft",
    [
        None,
        "lookup",
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
        assert pool(result.first).draws == again * (2 * 576 + 96)
        if mode != "plain":
            assert 0.1 < result.accepted / result.drafted < 0.98, mode


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(b, marks=() if b.name in ("ratio inverted", "KV one too long") else
                     pytest.mark.slow, id=b.name.replace(" ", "-"))
        for b in BROKEN
    ],
)  # fmt: skip
def test_broken_builds_are_found_and_named(broken: Broken) -> None:
    with planted(broken.name):
        report = run(broken.draft, broken.modes)
    assert not report.passed
    assert report.verdict.startswith("VIOLATION")
    first = report.diagnosis[0]
    assert first.startswith(broken.kind), report.diagnosis
    assert broken.says in first, first
