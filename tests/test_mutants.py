"""Every planted breakage of losslessness is caught by some test."""

from __future__ import annotations

import pytest

from mutants import MUTANTS, Mutant, changed, killer


def test_mutants_can_be_planted() -> None:
    """The lines that they change move with the code; noticed here, not only in the long run."""
    for mutant in MUTANTS:
        compile(changed(mutant), mutant.file, "exec")


@pytest.mark.verify
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_mutant_dies(mutant: Mutant) -> None:
    assert killer(mutant) is not None
