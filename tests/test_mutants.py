"""Every planted breakage of losslessness is caught by some test."""

from __future__ import annotations

import pytest

from mutants import MUTANTS, Mutant, killer


@pytest.mark.verify
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_mutant_dies(mutant: Mutant) -> None:
    assert killer(mutant) is not None
