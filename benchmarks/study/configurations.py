"""What the study measures: five pairs, the isolation of verification, and lookup on two texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from padded import FACTOR, padded

from anydraft.measure.bench_plan import AUTO, PairSpec, Plan
from anydraft.measure.workloads import KINDS

SMOL, GEMMA = "smollm2-135m", "gemma3-270m"
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, AUTO)
PADDED_NOTE = (
    f"Depth-padded: {FACTOR} times the layers of SmolLM2-135M, the extra ones with zero output "
    "projections. It says what SmolLM2 says and takes longer: a stand-in for a big target."
)
SELF_NOTE = (
    "The draft is the target itself with weights of 4 bits, and the target's weights were 4 bits "
    "wide once: it agrees more often than other drafts would."
)
SERIAL_NOTE = (
    "The same pair with each drafted token verified in a pass of its own: what a runtime does that "
    "only looks parallel."
)
_FP32 = {"device": "cpu", "dtype": "float32"}
_INT4 = {"device": "cpu", "dtype": "int4"}
_GGUF = {"runtime": "llama_cpp"}


@dataclass(frozen=True)
class Configuration:
    """One configuration of the study.

    Attributes:
        name: of its result file.
        title: for tables.
        pair: with models in the runtimes that the study is about.
        torch_pair: the same idea in PyTorch alone, or None where there is no such.
        serial: verification is forced to be serial.
        padded: the target is the depth-padded model, which is made when it is needed.
        kinds, limit, max_tokens, lengths: over what it is measured.
    """

    name: str
    title: str
    pair: PairSpec
    torch_pair: PairSpec | None = None
    serial: bool = False
    padded: bool = False
    kinds: tuple[str, ...] = KINDS
    limit: int = 1
    max_tokens: int = 32
    lengths: tuple[Any, ...] = LENGTHS

    def plan(self, torch_only: bool = False, quick: bool = False) -> Plan:
        """The benchmark; `quick` only shows that it runs.

        Raises:
            LookupError: torch_only, and there is no such pair in PyTorch alone.
        """
        pair = self.torch_pair if torch_only else self.pair
        if pair is None:
            raise LookupError(f"{self.name} needs llama.cpp")
        return Plan(
            pairs=(replace(pair, name=self.title),),
            num_draft_tokens=(1, 2, AUTO) if quick else self.lengths,
            max_tokens=10 if quick else self.max_tokens,
            kinds=self.kinds[:2] if quick else self.kinds,
            limit=self.limit,
            native="none",
        )


def _torch_target(name: str, draft: str, options: dict[str, Any], note: str = "") -> PairSpec:
    return PairSpec(name, draft, _FP32, options, note=note)


CONFIGURATIONS = (
    Configuration(
        "smollm2_self",
        "SmolLM2 fp32 + itself in 4 bits",
        _torch_target(SMOL, "self:q4_0", {}, SELF_NOTE),
        _torch_target(SMOL, SMOL, _INT4, SELF_NOTE),
    ),
    Configuration(
        "gemma_smollm2",
        "Gemma fp32 + SmolLM2 Q4",
        _torch_target(GEMMA, SMOL, _GGUF),
        _torch_target(GEMMA, SMOL, _INT4),
    ),
    Configuration(
        "gemma_q4_smollm2",
        "Gemma Q4 + SmolLM2 Q4",
        PairSpec(GEMMA, SMOL, _GGUF, _GGUF),
    ),
    Configuration(
        "padded_smollm2",
        f"SmolLM2 padded x{FACTOR} + SmolLM2 Q4",
        _torch_target(SMOL, SMOL, _GGUF, PADDED_NOTE),
        _torch_target(SMOL, SMOL, _INT4, PADDED_NOTE),
        padded=True,
    ),
    Configuration(
        "smollm2_gemma",
        "SmolLM2 fp32 + Gemma Q4",
        _torch_target(SMOL, GEMMA, _GGUF),
        _torch_target(SMOL, GEMMA, _INT4),
    ),
    Configuration(
        "smollm2_self_serial",
        "SmolLM2 fp32 + itself in 4 bits, verified serially",
        _torch_target(SMOL, "self:q4_0", {}, f"{SERIAL_NOTE} {SELF_NOTE}"),
        _torch_target(SMOL, SMOL, _INT4, f"{SERIAL_NOTE} {SELF_NOTE}"),
        serial=True,
    ),
    Configuration(
        "lookup_copy",
        "Gemma fp32 + lookup, text that repeats",
        PairSpec(GEMMA, "lookup", _FP32),
        PairSpec(GEMMA, "lookup", _FP32),
        kinds=("code_edit", "retrieval"),
        limit=3,
        max_tokens=64,
        lengths=(1, 2, 4, 8, AUTO),
    ),
    Configuration(
        "lookup_ordinary",
        "Gemma fp32 + lookup, ordinary text",
        PairSpec(GEMMA, "lookup", _FP32),
        PairSpec(GEMMA, "lookup", _FP32),
        kinds=("writing", "question_answering"),
        limit=3,
        max_tokens=64,
        lengths=(1, 2, 4, 8, AUTO),
    ),
)
FIVE = tuple(c for c in CONFIGURATIONS[:5])


def by_name(name: str) -> Configuration:
    """The configuration of this name.

    Raises:
        LookupError: there is none.
    """
    for configuration in CONFIGURATIONS:
        if configuration.name == name:
            return configuration
    known = ", ".join(c.name for c in CONFIGURATIONS)
    raise LookupError(f"there is no configuration {name!r}; there are: {known}")


Loader = Callable[[PairSpec, Plan], Any]


def loader(configuration: Configuration) -> Loader:
    """How the benchmark opens a configuration's pair."""

    def load(pair: PairSpec, plan: Plan) -> Any:
        from serial import SerialTarget

        from anydraft.engine import load as load_engine
        from anydraft.measure.bench_load import from_engine

        engine = load_engine(
            str(padded()) if configuration.padded else pair.target,
            pair.draft,
            draft_options=dict(pair.draft_options),
            **dict(pair.target_options),
        )
        if configuration.serial:
            engine.target = SerialTarget(engine.target)
        return from_engine(pair, plan, engine)

    return load
