"""What a benchmark is to measure: pairs, draft lengths, methods, sampling, prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

from anydraft.errors import RequestError
from anydraft.policy import MAX_DRAFT_TOKENS
from anydraft.sampling import SamplingParams

DraftLength: TypeAlias = "int | str"
"""A fixed number of draft tokens, or "auto": the adaptive policy."""

AUTO = "auto"
NATIVE = ("none", "plain", "all")
SEED_IDENTICAL = "match"


@dataclass(frozen=True, slots=True)
class PairSpec:
    """A target and what drafts for it, as the user names them.

    Attributes:
        target: what `anydraft.load` takes as a target.
        draft: the same for a draft, "lookup", or None for plain decoding only.
        target_options, draft_options: for their backends, e.g. dtype, device, threads, runtime.
        name: what tables call the pair; "" makes one of the two names.
        note: what a reader of the results must know of it, e.g. that a model is padded.
    """

    target: str
    draft: str | None
    target_options: Mapping[str, Any] = field(default_factory=dict)
    draft_options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    note: str = ""

    @property
    def label(self) -> str:
        """The name, unique within a plan."""
        return self.name or f"{_short(self.target)} + {_short(self.draft or 'no draft')}"


def _short(spec: str) -> str:
    """A path's last part; hub ids and names as they are."""
    path = Path(spec).expanduser()
    return path.name if path.is_absolute() or spec.startswith((".", "~")) else spec


@dataclass(frozen=True, slots=True)
class Contender:
    """One way of generating that takes its turn on every prompt.

    Attributes:
        kind: "plain", "draft", or "native" and "native_draft": the runtime's own generation.
        method: how drafts are verified.
        num_draft_tokens: 0 for plain decoding.
    """

    kind: str
    method: str = SEED_IDENTICAL
    num_draft_tokens: DraftLength = 0

    def __str__(self) -> str:
        if self.kind in ("plain", "native"):
            return self.kind
        method = "" if self.method == SEED_IDENTICAL else f" {self.method}"
        return f"{self.kind}{method} K={self.num_draft_tokens}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A benchmark, complete; what it was is written into its results.

    Attributes:
        num_draft_tokens: the fixed lengths and "auto"; plain decoding is always measured too.
        sampling: settings as `parse_sampling` reads them; "greedy" among them.
        max_tokens: at most so many tokens per answer.
        repeats: times that every prompt is gone through.
        native: "plain": the runtime's own generation beside plain decoding; "all": also with the
            draft, at every length; "none".
        chat: whether prompts go through the chat template; None: where the target has one.
        predict: measure costs on other prompts first, and predict every speed.
        kinds, prompt_file, limit: which prompts; see anydraft.measure.workloads.

    Raises:
        RequestError: something in it cannot be.
    """

    pairs: tuple[PairSpec, ...]
    num_draft_tokens: tuple[DraftLength, ...] = (1, 2, 3, 4, 6, 8)
    methods: tuple[str, ...] = (SEED_IDENTICAL,)
    sampling: tuple[str, ...] = ("greedy",)
    max_tokens: int = 64
    repeats: int = 1
    seed: int = 1
    native: str = "plain"
    chat: bool | None = None
    predict: bool = True
    kinds: tuple[str, ...] | None = None
    prompt_file: str | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if not self.pairs:
            raise RequestError("a benchmark needs at least one target")
        labels = [pair.label for pair in self.pairs]
        for label in labels:
            if labels.count(label) > 1:
                raise RequestError(f"the pair {label} is there twice")
        for name in ("max_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.limit is not None and self.limit < 1:
            raise RequestError(f"limit must be at least 1, not {self.limit}")
        if self.native not in NATIVE:
            raise RequestError(f"native must be one of {', '.join(NATIVE)}, not {self.native!r}")
        for text in self.sampling:
            parse_sampling(text)
        for length in self.num_draft_tokens:
            ok = length == AUTO or (isinstance(length, int) and 0 < length <= MAX_DRAFT_TOKENS)
            if not ok:
                raise RequestError(
                    f"a number of draft tokens is 1 to {MAX_DRAFT_TOKENS} or {AUTO}, not {length!r}"
                )

    def contenders(self, pair: PairSpec, sampling: str, native: bool) -> list[Contender]:
        """Who takes turns on each prompt of a pair, plain decoding first.

        `native` says whether the target's runtime has a generation of its own.
        """
        drafting = [] if pair.draft is None else list(self.num_draft_tokens)
        greedy = not parse_sampling(sampling).get("temperature")
        methods = (SEED_IDENTICAL,) if greedy else self.methods  # greedy, all are the same
        found = [Contender("plain")]
        found += [Contender("draft", m, k) for m in methods for k in drafting]
        if native and self.native != "none" and sampling == "greedy":
            found.append(Contender("native"))
            if self.native == "all":
                fixed = [k for k in drafting if k != AUTO]
                found += [Contender("native_draft", SEED_IDENTICAL, k) for k in fixed]
        return found

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_from_dict(values: Mapping[str, Any]) -> Plan:
    """The plan that `Plan.to_dict` wrote.

    Raises:
        RequestError: it is not one.
    """
    try:
        pairs = tuple(PairSpec(**pair) for pair in values["pairs"])
        rest: dict[str, Any] = {f.name: values[f.name] for f in fields(Plan) if f.name != "pairs"}
        rest |= {name: tuple(value) for name, value in rest.items() if isinstance(value, list)}
        return Plan(pairs=pairs, **rest)
    except (KeyError, TypeError) as error:
        raise RequestError(f"the plan in the result file is damaged: {error}") from None


def parse_sampling(text: str) -> dict[str, Any]:
    """Sampling parameters from "greedy" or "temperature=0.7,top_p=0.9".

    Raises:
        RequestError: an unknown name or a value out of range.
    """
    if text == "greedy":
        return {}
    known = {f.name: f.type for f in fields(SamplingParams) if f.type in ("float", "int")}
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in known:
            raise RequestError(
                f"sampling is 'greedy' or e.g. 'temperature=0.7,top_p=0.9', not {text!r}; "
                f"names: {', '.join(known)}"
            )
        try:
            values[name] = int(value) if known[name] == "int" else float(value)
        except ValueError:
            raise RequestError(f"{name} in {text!r} must be a number, not {value!r}") from None
    SamplingParams(**values)
    return values


def parse_lengths(text: str) -> tuple[DraftLength, ...]:
    """Draft lengths from "1,2,4", "1-8" or "2,4,auto", each once."""
    found: list[DraftLength] = []
    for part in text.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if part == AUTO:
            found.append(part)
        elif first.isdigit() and (not dash or last.isdigit()):
            found += range(int(first), int(last or first) + 1)
        else:
            raise RequestError(f"draft lengths look like 1,2,4 or 1-8 or 4,auto, not {text!r}")
    return tuple(dict.fromkeys(length for length in found if length != 0))
