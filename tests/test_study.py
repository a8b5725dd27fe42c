"""The study's scripts: padded and serial targets are what they claim, and the check can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from made_results import PAIRS, MadePair, made_results
from toys import toy_target

ROOT = Path(__file__).parent.parent
STUDY = ROOT / "benchmarks" / "study"


@pytest.fixture(autouse=True)
def study_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDY))


def test_a_serial_target_says_the_same_in_passes_of_one():
    import torch
    from serial import SerialTarget

    passes: list[int] = []
    model = toy_target()

    class Watched(SerialTarget):
        def __init__(self) -> None:
            super().__init__(self)
            self.model = self

        def extend(self, batch: Any) -> Any:
            passes.extend(len(ids) for _, ids, _ in batch)
            return model.extend(batch)

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

    target = SerialTarget(Watched())
    one, other = model.new_state(), model.new_state()
    prompt = [0, 1, 2] * 20
    for ids, wanted in ((prompt, 1), ([3, 4, 5, 6], 4), ([1], 1), ([2, 0, 1], 2), ([2, 2], 0)):
        expected = model.extend([(one, ids, wanted)])[0]
        assert torch.equal(target.extend([(other, ids, wanted)])[0], expected)
    assert one.length == other.length
    assert passes == [60, *[1] * 4, 1, *[1] * 3, *[1] * 2]


def test_arg_maxes_of_a_serial_target_take_passes_of_one_too():
    import torch
    from serial import SerialTarget

    from anydraft.model import GreedyModel

    class Greedy:
        def __init__(self) -> None:
            self.passes: list[list[int]] = []

        def extend_greedy(self, batch: Any, forbidden: Any) -> list[torch.Tensor]:
            [(state, ids, wanted)] = batch
            self.passes.append(list(ids))
            return [
                torch.tensor([10 * i + forbidden[0][0] for i in ids][-wanted:] if wanted else [])
            ]

    model = Greedy()
    target = SerialTarget(model)
    assert isinstance(target, GreedyModel)
    assert not isinstance(SerialTarget(toy_target()), GreedyModel)
    state = toy_target().new_state()
    assert target.extend_greedy([(state, [3, 4, 5], 2)], [[7]])[0].tolist() == [47, 57]
    assert model.passes == [[3], [4], [5]]


def test_an_interrupted_serial_pass_leaves_the_length_as_it_was():
    from serial import SerialTarget

    model = toy_target()
    state = model.new_state()
    target = SerialTarget(model)
    target.extend([(state, [0, 1], 1)])
    with pytest.raises(Exception, match="vocabulary"):
        target.extend([(state, [2, 3, 999], 3)])
    assert state.length == 2


@pytest.mark.slow
def test_a_padded_model_says_what_the_model_says(tmp_path, monkeypatch):
    import torch
    from padded import padded
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    monkeypatch.setenv("ANYDRAFT_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    source = tmp_path / "small"
    model.save_pretrained(source)
    weights = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.chdir(tmp_path)
    deep = AutoModelForCausalLM.from_pretrained(padded("small", 3)).eval()
    assert deep.config.num_hidden_layers == 6
    ids = torch.randint(0, 60, (1, 9))
    with torch.no_grad():
        assert torch.equal(deep(ids).logits, model(ids).logits)
        deep.model.layers[4].mlp.down_proj.weight += 1  # the extra layers do run
        assert not torch.equal(deep(ids).logits, model(ids).logits)
    assert padded("small", 3).is_dir()  # made once


def stored(folder: Path, **changes: MadePair) -> Path:
    """Results of configurations under their names, each made of one pair."""
    for name, pair in changes.items():
        (folder / f"{name}.json").write_text(json.dumps(made_results((pair,))))
    return folder


def test_good_predictions_pass(tmp_path):
    import check

    names = dict(zip(("smollm2_self", "gemma_smollm2", "smollm2_gemma"), PAIRS, strict=False))
    result = check.verdict(check.load(stored(tmp_path, **names)))
    assert result["num_cells"] == 18
    assert result["median_error"] == pytest.approx(0.05, abs=0.02)  # as they were made
    assert result["share_within_20_percent"] == 1.0
    assert result["passed"] is True
    assert result["signs"]["smollm2_self"]["adaptive_over_best_fixed"] == pytest.approx(
        1.0, abs=0.1
    )
    assert "gemma_q4_smollm2" in result["missing"]
    assert "| quick draft |" in check.markdown(result)
    assert "18 cells" in check.show(result)


def test_a_wrong_sign_and_wrong_figures_do_not_pass(tmp_path):
    import check

    results = made_results((PAIRS[1],))
    expected = results["pairs"][0]["prediction"]["sampling"]["greedy"]
    expected["speedup"] = {k: v * 1.4 for k, v in expected["speedup"].items()}
    (tmp_path / "smollm2_gemma.json").write_text(json.dumps(results))
    result = check.verdict(check.load(tmp_path))
    assert result["signs"]["smollm2_gemma"]["right"] is False
    assert result["median_error"] > 0.3
    assert result["passed"] is False
    assert "WRONG: slow draft" in check.show(result)


def test_violations_do_not_pass(tmp_path):
    import check

    results = made_results((PAIRS[0],))
    results["runs"][1]["identity"] = "violation"
    (tmp_path / "smollm2_self.json").write_text(json.dumps(results))
    assert check.verdict(check.load(tmp_path))["passed"] is False


def test_a_tenth_is_measured_again_and_compared(tmp_path, monkeypatch):
    import check

    stored(tmp_path, smollm2_self=PAIRS[0], gemma_smollm2=PAIRS[2])
    found = check.load(tmp_path)
    asked = []

    def again(configuration: Any, path: Path, own: Any) -> dict[int, float]:
        asked.extend((configuration.name, c.num_draft_tokens) for c in own)
        return {c.num_draft_tokens: c.measured * 1.3 for c in own}

    monkeypatch.setattr(check, "_measure", again)
    redone = check.redo(tmp_path, found, seed=3)
    assert len(redone) == len(asked) == 1  # of twelve cells
    assert redone[0]["difference"] == pytest.approx(0.3)
    assert redone[0]["agrees"] is False
    assert len({check.redo(tmp_path, found, s)[0]["num_draft_tokens"] for s in range(12)}) > 3


@pytest.mark.slow
def test_scripts_say_what_is_wrong(tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )

    none = run(str(STUDY / "check.py"), "--results", str(tmp_path))
    assert (none.returncode, "run run.py first" in none.stderr) == (1, True)
    (tmp_path / "smollm2_self.json").write_text("{")
    broken = run(str(STUDY / "check.py"), "--json", "--results", str(tmp_path))
    assert (broken.returncode, "is damaged" in broken.stderr) == (1, True)
    unknown = run(str(STUDY / "run.py"), "--config", "nothing")
    assert (unknown.returncode, "there is no configuration" in unknown.stderr) == (2, True)


def test_configurations_cover_what_the_study_is_about():
    from configurations import CONFIGURATIONS, FIVE

    assert len({c.name for c in CONFIGURATIONS}) == len(CONFIGURATIONS)
    assert len(FIVE) == 5
    for configuration in FIVE:
        plan = configuration.plan()
        assert set(range(1, 9)) <= set(plan.num_draft_tokens)
    parallel = next(c for c in CONFIGURATIONS if c.name == "smollm2_self")
    serial = next(c for c in CONFIGURATIONS if c.name == "smollm2_self_serial")
    assert replace(parallel.pair, note="") == replace(serial.pair, note="")
    assert serial.serial
    assert not parallel.serial
    with pytest.raises(LookupError, match=r"needs llama\.cpp"):
        next(c for c in FIVE if c.torch_pair is None).plan(torch_only=True)


def test_the_document_is_made_of_the_results(tmp_path):
    import check
    import document

    stored(tmp_path, smollm2_self=PAIRS[0], smollm2_self_serial=PAIRS[2])
    text = document.document(check.load(tmp_path), "a machine")
    assert "Machine: a machine." in text
    assert "### quick draft\n\nIt pays:" in text
    assert "### serial target\n\nIt does not pay:" in text
    assert "At K = 3 the parallel target reaches 1.69, the serial one 0." in text
    assert "Whether drafting pays was foretold rightly for every configuration." in text
    assert text.count("| quick draft |") == 1
