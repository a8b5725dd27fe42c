"""What must stay true of the package as a whole: light imports, exact names, one version."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import anydraft
from anydraft.cli import main as cli

ROOT = Path(__file__).parent.parent
HEAVY = {
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "gguf",
    "safetensors",
    "accelerate",
    "huggingface_hub",
    "llama_cpp",
    "fastapi",
    "uvicorn",
    "prometheus_client",
    "matplotlib",
    "jinja2",
    "typer",
    "rich",
    "psutil",
}
COMMAND_LINE = {"typer", "rich"}
COMMAND_MODULES = ["main", *sorted({module for module, _ in cli.COMMANDS.values()})]


def loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after running `code`."""
    report = "; import sys; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code + report], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_import_anydraft_loads_nothing_heavy():
    assert loaded_by("import anydraft") & HEAVY == set()


@pytest.mark.parametrize("module", ["errors", "model", "drafter", "store"])
def test_contracts_and_store_load_nothing_heavy(module):
    assert loaded_by(f"import anydraft.{module}") & HEAVY == set()


@pytest.mark.parametrize("module", COMMAND_MODULES)
def test_the_command_line_loads_nothing_heavy_before_it_runs(module):
    assert loaded_by(f"import anydraft.cli.{module}") & (HEAVY - COMMAND_LINE) == set()


def test_public_names_are_exact():
    assert anydraft.__all__ == sorted(anydraft.__all__)
    assert anydraft.__all__ == [
        "AnydraftError",
        "Chunk",
        "Engine",
        "Generation",
        "GenerationRequest",
        "SamplingParams",
        "Stats",
        "Vocabulary",
        "compare",
        "load",
    ]
    assert dir(anydraft) == sorted([*anydraft.__all__, "__version__"])


def test_public_names_resolve():
    for name in anydraft.__all__:
        assert getattr(anydraft, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = anydraft.nonsense


def test_changelog_and_package_have_one_version():
    versions = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == anydraft.__version__


def test_help_answers_within_half_a_second():
    def once() -> float:
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "anydraft.cli.main", "--help"], capture_output=True, check=True
        )
        return time.perf_counter() - start

    assert min(once() for _ in range(5)) < 0.5  # the best of five: the machine may be busy


def test_makefile_reads_the_torch_pin():
    pins = re.findall(r"^torch==[\d.]+$", (ROOT / "constraints.txt").read_text(), re.M)
    assert len(pins) == 1  # scripts/install_torch.sh takes it from this line
