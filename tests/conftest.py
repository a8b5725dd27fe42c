"""Fixtures that every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from anydraft import store
from anydraft.errors import CacheError

# The same commit has the same result; `--hypothesis-profile explore` looks for new examples.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=5000, deadline=None)
settings.load_profile("fixed")


def _pulled(name: str) -> Path:
    """The model's folder, fetched if need be; a skip with the reason if that fails."""
    try:
        return store.pull(name, progress=False)
    except CacheError as error:
        pytest.skip(f"{name} is needed and cannot be fetched: {error}")


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Gemma 3 270M as a folder that torch_hf loads. For tests marked `slow` or `verify`."""
    return _pulled("gemma3-270m")


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    """SmolLM2-135M-Instruct, likewise."""
    return _pulled("smollm2-135m")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that takes the models must be marked, or `make check` would need them."""
    for item in items:
        needs = {"gemma_path", "smollm_path"} & set(getattr(item, "fixturenames", ()))
        if needs and not any(item.get_closest_marker(mark) for mark in ("slow", "verify")):
            raise pytest.UsageError(
                f"{item.nodeid} needs {', '.join(needs)}: mark it slow or verify"
            )
