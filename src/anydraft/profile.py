"""What a target and a draft cost on this machine, as measured once and kept in the user's cache.

A profile belongs to (the model's files, runtime and its version, device, threads, dtype); when one
of them changes, its key changes, and the old profile is simply not found any more. `measure.probe`
makes profiles, the engine seeds its adaptive policy from them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from anydraft.speed import Curve, SpeedModel
from anydraft.store import cache_dir

log = logging.getLogger(__name__)

VERSION = 2
"""Of the files; profiles of another version are not read."""
_PACKAGES = {"torch_hf": ("torch", "transformers"), "llama_cpp": ("llama-cpp-python",)}
_SAMPLE = 1 << 16  # bytes that are hashed at the start, middle and end of each file


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, measured several times: median and quartiles."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Timing:
        """Of at least one measurement."""
        if len(seconds) < 2:
            return Timing(seconds[0], seconds[0], seconds[0], 1)
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return Timing(middle, low, high, len(seconds))

    @property
    def spread(self) -> float:
        """Distance of the quartiles, relative to the median."""
        return (self.high - self.low) / self.median if self.median > 0 else 0.0


NOT_MEASURED = Timing(0.0, 0.0, 0.0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetProfile:
    """Costs of a target.

    Attributes:
        facts: what `model_facts` says of the model; the key is their hash.
        verify: context length -> width n -> a target pass over n new tokens.
        logits: the same where all logits are wanted, as sampled requests do; empty: no different.
        overhead: everything else in a round of plain decoding.
        sampling: seconds that drawing one token at temperature 1 takes longer than the arg-max.
        read: seconds per token of a prompt.
    """

    facts: dict[str, str]
    verify: dict[int, dict[int, Timing]]
    overhead: Timing
    logits: dict[int, dict[int, Timing]] = field(default_factory=dict)
    sampling: float = 0.0
    read: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftProfile:
    """Costs of a draft for one target.

    Attributes:
        facts: of the draft model; of lookup only its name.
        draft: context length -> K -> a whole draft call for K target tokens: bringing the draft up
            to date, its steps, and writing the candidates in target ids.
        passes: K -> passes of the draft model in such a call.
        step: context length -> one pass of the draft model over one token; empty for lookup.
        retokenise: what a call costs beside the model's passes.
        read: seconds per target token that the draft has to read before it can draft.
        overhead: everything else in a round with this draft.
    """

    facts: dict[str, str]
    draft: dict[int, dict[int, Timing]]
    passes: dict[int, float] = field(default_factory=dict)
    step: dict[int, Timing] = field(default_factory=dict)
    retokenise: float = 0.0
    read: float = 0.0
    overhead: Timing = NOT_MEASURED


@dataclass(frozen=True, slots=True)
class Quiet:
    """Whether the machine was quiet enough for its figures to be believed.

    Attributes:
        spread: relative distance of the quartiles of one repeated pass.
        drift: how much that pass changed from the first third of the measurement to the last.
        load: share of the CPUs that other processes used, or None if unknown.
    """

    spread: float
    drift: float
    load: float | None = None

    @property
    def ok(self) -> bool:
        return self.spread < 0.15 and abs(self.drift) < 0.15 and (self.load or 0.0) < 0.25

    def why_not(self) -> str:
        """In words; "" if it was quiet."""
        reasons = []
        if self.spread >= 0.15:
            reasons.append(f"the same pass varied by {self.spread:.0%}")
        if abs(self.drift) >= 0.15:
            reasons.append(f"it changed by {self.drift:+.0%} while measuring")
        if (self.load or 0.0) >= 0.25:
            reasons.append(f"other processes used {self.load:.0%} of the CPUs")
        return ", ".join(reasons)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Costs of a target, and of one draft for it (None: plain decoding only)."""

    target: TargetProfile
    draft: DraftProfile | None = None
    quiet: Quiet = Quiet(0.0, 0.0)
    memory: int | None = None
    """Bytes that the process held with everything loaded."""
    created: str = ""
    """UTC, ISO 8601."""

    def verify_curve(self, context: int | None = None, *, sampled: bool = False) -> Curve:
        """v(n) in seconds, at a context length (None: the middle one)."""
        table = self.target.logits if sampled else {}
        return _curve(table or self.target.verify, context)

    def draft_curve(self, context: int | None = None) -> Curve:
        """Seconds of a draft call by K."""
        if self.draft is None:
            return Curve({0: 0.0})
        return _curve(self.draft.draft, context)

    def speed_model(
        self,
        acceptance: Sequence[float],
        offered: Sequence[float] = (),
        *,
        context: int | None = None,
        sampled: bool = False,
        prompt_tokens: int = 0,
        expected_tokens: float = float("inf"),
    ) -> SpeedModel:
        """These costs with an acceptance.

        Args:
            acceptance, offered: see SpeedModel; `measure.follow` measures both.
            context: tokens before the pass; None: the middle of those measured.
            sampled: at a temperature above 0.
            prompt_tokens: what the draft reads at the start, spread over `expected_tokens`.
        """
        draft = self.draft
        drawing = self.target.sampling if sampled else 0.0
        return SpeedModel(
            acceptance=acceptance,
            offered=offered,
            verify=self.verify_curve(context, sampled=sampled),
            draft=self.draft_curve(context),
            overhead=self.target.overhead.median + drawing,
            draft_overhead=draft.overhead.median + drawing
            if draft and draft.overhead.count
            else None,
            startup=draft.read * prompt_tokens if draft else 0.0,
            expected_tokens=expected_tokens,
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it; `from_dict` reads it."""
        return {"version": VERSION, **asdict(self)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Profile:
        """Raises KeyError, TypeError or ValueError if this is no profile of VERSION."""
        if data["version"] != VERSION:
            raise ValueError(f"profile version {data['version']}, this program reads {VERSION}")
        t, d = data["target"], data["draft"]
        target = TargetProfile(
            facts=t["facts"],
            verify=_read_table(t["verify"]),
            overhead=Timing(**t["overhead"]),
            logits=_read_table(t["logits"]),
            sampling=t["sampling"],
            read=t["read"],
        )
        draft = None
        if d is not None:
            draft = DraftProfile(
                facts=d["facts"],
                draft=_read_table(d["draft"]),
                passes={int(k): v for k, v in d["passes"].items()},
                step={int(c): Timing(**v) for c, v in d["step"].items()},
                retokenise=d["retokenise"],
                read=d["read"],
                overhead=Timing(**d["overhead"]),
            )
        return Profile(
            target=target,
            draft=draft,
            quiet=Quiet(**data["quiet"]),
            memory=data["memory"],
            created=data["created"],
        )


def _read_table(table: Mapping[str, Mapping[str, Any]]) -> dict[int, dict[int, Timing]]:
    return {int(c): {int(n): Timing(**v) for n, v in row.items()} for c, row in table.items()}


def _curve(table: Mapping[int, Mapping[int, Timing]], context: int | None) -> Curve:
    """The row of a context length, in between two rows mixed."""
    lengths = sorted(table)
    if context is None:
        context = lengths[len(lengths) // 2]
    below = max((c for c in lengths if c <= context), default=lengths[0])
    above = min((c for c in lengths if c >= context), default=lengths[-1])
    share = 0.0 if above == below else (context - below) / (above - below)
    low, high = table[below], table[above]
    return Curve(
        {
            n: (1 - share) * low[n].median + share * high[n].median
            for n in sorted(set(low) & set(high))
        }
    )


def model_facts(model: Any) -> dict[str, str]:
    """What decides a model's costs. Equal facts, equal costs.

    `model.origin`, set by `backends.load_model`, tells the files; a model made in memory is known
    by its name only, and its profile is not kept.
    """
    origin: Mapping[str, Any] = getattr(model, "origin", {})
    runtime = str(getattr(model, "runtime", "none"))
    options = {k: str(v) for k, v in sorted(origin.get("options", {}).items())}
    return {
        "name": str(getattr(model, "name", model)),
        "files": files_hash(Path(origin["path"])) if "path" in origin else "",
        "runtime": runtime,
        "version": " ".join(f"{p} {_version(p)}" for p in _PACKAGES.get(runtime, ())),
        "device": str(getattr(model, "device", "cpu")),
        "dtype": str(getattr(model, "dtype", "")).removeprefix("torch."),
        "threads": str(getattr(model, "threads", None) or _threads(runtime)),
        "options": json.dumps(options),
    }


def draft_facts(draft: Any) -> dict[str, str]:
    """What decides the costs of a Drafter, or of "lookup": its model, and how that one drafts."""
    model = getattr(draft, "model", None)
    if model is None:
        name = str(getattr(draft, "name", draft))
        return {"name": name, "files": name}
    settings = getattr(draft, "settings", None)
    told = {} if settings is None else {"settings": json.dumps(asdict(settings), sort_keys=True)}
    return model_facts(model) | told


def _threads(runtime: str) -> int:
    if runtime != "torch_hf":
        return os.cpu_count() or 1
    import torch

    return torch.get_num_threads()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def files_hash(path: Path) -> str:
    """A model's files by names, sizes and samples of their bytes; reading all would take long."""
    digest = hashlib.sha256()
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path) if path.is_dir() else file.name}:{size};".encode())
        with file.open("rb") as data:
            for at in sorted({0, max(0, size // 2), max(0, size - _SAMPLE)}):
                data.seek(at)
                digest.update(data.read(_SAMPLE))
    return digest.hexdigest()[:32]


def profile_path(target: Any, draft: Any = None) -> Path | None:
    """Where a pair's profile is kept; None if a model has no files to know it by.

    Args:
        target: the model.
        draft: a Drafter, the name of one that has no model ("lookup"), or None.
    """
    facts = [model_facts(target)]
    if draft is not None:
        facts.append(draft_facts(draft))
    if not all(f["files"] for f in facts):
        return None
    # Names are how the user called them; the same files under another name cost the same.
    told = json.dumps([{k: v for k, v in f.items() if k != "name"} for f in facts], sort_keys=True)
    key = hashlib.sha256(told.encode()).hexdigest()[:24]
    return cache_dir() / "profiles" / f"{key}.json"


def load_profile(target: Any, draft: Any = None) -> Profile | None:
    """The kept profile of exactly these models here and now, or None."""
    try:
        path = profile_path(target, draft)
        if path is None or not path.is_file():
            return None
        found = Profile.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, KeyError, TypeError, ValueError) as error:
        log.info("a kept profile cannot be read and is measured anew: %s", error)
        return None
    return found


def save_profile(profile: Profile, target: Any, draft: Any = None) -> Path | None:
    """Keep a profile; None if these models have no files, or the cache cannot be written."""
    path = profile_path(target, draft)
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(profile.to_dict()), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        log.warning("the profile is not kept: %s", error)
        return None
    return path


def without_draft(profile: Profile) -> Profile:
    """The target's part alone."""
    return replace(profile, draft=None)
