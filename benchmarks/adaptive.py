"""Is the adaptive policy ever slower than plain decoding, and does it follow a text that changes?

Two questions, each in one interleaved run.

First, pairs that drafting does not suit: plain decoding and `--num-draft-tokens auto` take turns on
every prompt. A figure is the median over prompts of auto's tokens/s over plain decoding's (the mean
of the runs before and after it); it should not lie below 0.97. Costs are probed beforehand and
kept, as `anydraft advise` does; reading prompts counts for neither.

Second, a text that is prose, then a long verbatim copy, then prose again. The prose is the target's
own, as in any answer; the copy is there with any target because the text is then dictated: a logits
processor leaves one token possible at each position, for all contenders alike. The adaptive policy
should be faster there than every fixed K, of the draft model as of lookup. Two pairs: one whose
draft hardly pays on prose, so that lookup alone is all but the best there is, and one whose draft
does (SmolLM2 padded to four times its work, see study/padded.py, with its own 4-bit copy).

    python benchmarks/adaptive.py [--only plain|changing] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(Path(__file__).parent / "study"))

AUTO = "auto"
GGUF = {"runtime": "llama_cpp"}
FIXED_MODEL = (1, 2, 4, 8)
FIXED_LOOKUP = (4, 8, 16, 31)
PROSE_TOKENS = 72  # before the copy, and after it
OPENING = (
    "The teacher closed the book and looked out of the window. It had begun to rain, and the "
    "children in the yard ran under the roof of the shed. She thought of the letter in her desk, "
    "which she had not answered for a week, and of the man who had written it."
)


class RandomIds:
    """A drafter whose proposals are never right but by chance."""

    name = "random ids"

    def __init__(self, size: int) -> None:
        self._size = size
        self._source = random.Random(1)

    def new_session(self, context: Any) -> Any:
        return _Session()

    def draft(self, batch: Sequence[Any]) -> list[Any]:
        from anydraft.drafter import Draft

        return [
            Draft([self._source.randrange(self._size) for _ in range(count)])
            for _, _, count in batch
        ]

    def close(self) -> None:
        """Nothing is held."""


class _Session:
    tokens_processed = 0

    def close(self) -> None:
        """Nothing is held."""


def speed(engine: Any, prompt: Any, **request: Any) -> float:
    """Tokens/s after the first round."""
    stats = engine.generate(prompt, ignore_eos=True, **request).stats
    if stats.draft_error:
        raise SystemExit(f"the draft failed: {stats.draft_error}")
    return stats.tokens_per_second


def paired(engine: Any, prompts: Iterable[str], max_tokens: int) -> list[float]:
    """Per prompt, auto's speed over plain decoding's around it."""
    plain = engine.plain()
    ratios = []
    for prompt in prompts:
        before, auto, after = (
            speed(who, prompt, max_tokens=max_tokens, num_draft_tokens=count)
            for who, count in ((plain, 0), (engine, AUTO), (plain, 0))
        )
        ratios.append(2 * auto / (before + after))
    return ratios


def workload_prompts(limit: int) -> list[str]:
    """The first prompts of each of the eight kinds that `anydraft bench` has."""
    from anydraft.measure import workloads

    return [prompt.turns[0] for prompt in workloads.builtin(limit=limit)]


def never_slower(args: argparse.Namespace) -> dict[str, Any]:
    """The first question."""
    import anydraft
    from anydraft.measure.probe import probe

    ordinary = [p.text for p in common.spread(common.prompts("general"), args.prompts)]
    kinds = workload_prompts(1)[: args.prompts * 2]
    gemma, smol = common.TARGET, common.DRAFT

    def random_ids() -> Any:
        target = anydraft.load(gemma).target
        return anydraft.Engine(target, RandomIds(target.vocab_size))

    cases: dict[str, tuple[Callable[[], Any], list[str], int]] = {
        "a draft of random ids": (random_ids, ordinary, 48),
        "answers of 16 tokens": (lambda: anydraft.load(gemma, smol), ordinary, 16),
        "lookup only, eight workloads": (lambda: anydraft.load(gemma, "lookup"), kinds, 48),
        "Gemma Q4 + SmolLM2 Q4": (
            lambda: anydraft.load(gemma, smol, draft_options=GGUF, **GGUF),
            ordinary,
            48,
        ),
        "SmolLM2 fp32 + Gemma Q4": (
            lambda: anydraft.load(smol, gemma, draft_options=GGUF),
            ordinary,
            48,
        ),
    }
    found = {}
    for name, (load, prompts, max_tokens) in cases.items():
        try:
            engine = load()
        except anydraft.AnydraftError as error:
            print(f"{name}: left out: {error}", flush=True)
            continue
        probe(engine, seconds=args.probe_seconds)
        engine = anydraft.Engine(engine.target, engine.drafter)  # knows the costs from its start
        speed(engine, prompts[0], max_tokens=8)
        ratios = paired(engine, prompts, max_tokens)
        found[name] = {"median": common.median(ratios), "ratios": ratios}
        print(
            f"{name}: median {found[name]['median']:.3f}, "
            f"{min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} prompts",
            flush=True,
        )
        engine.close()
    return found


class Dictation:
    """A processor that leaves only the next token of a text possible."""

    def __init__(self, prompt_length: int, ids: Sequence[int]) -> None:
        self._prompt_length, self._ids = prompt_length, ids

    def __call__(self, tokens: Sequence[int], logits: Any) -> Any:
        wanted = self._ids[len(tokens) - self._prompt_length]
        value = logits[wanted].item()
        logits.fill_(float("-inf"))
        logits[wanted] = value
        return logits


def prose(engine: Any, ids: Sequence[int]) -> list[int]:
    """What the target says next, kept from repeating itself."""
    answer = engine.plain().generate(
        ids, max_tokens=PROSE_TOKENS, ignore_eos=True, repetition_penalty=1.2
    )
    found: list[int] = answer.token_ids
    return found


def _padded() -> Any:
    from padded import padded

    import anydraft

    return anydraft.load(str(padded(common.DRAFT, 4)), common.DRAFT, draft_options=GGUF)


def _gemma() -> Any:
    import anydraft

    return anydraft.load(common.TARGET, common.DRAFT)


CHANGING = {"Gemma + SmolLM2": _gemma, "padded SmolLM2 + SmolLM2 Q4": _padded}


def changing_text(load: Callable[[], Any], args: argparse.Namespace) -> dict[str, Any]:
    """The second question, for one pair."""
    import anydraft
    from anydraft.measure.probe import probe

    engine = load()
    probe(engine, seconds=args.probe_seconds)
    engine = anydraft.Engine(engine.target, engine.drafter)  # knows the costs from its start
    lookup = anydraft.load(engine.target, "lookup")
    copied = common.prompts("copy")[0].text.split("\n\n")[0]
    vocabulary = engine.vocabulary
    prompt = vocabulary.encode_prompt(f"{copied}\n\n{OPENING}")
    dictated = prose(engine, prompt)
    dictated += vocabulary.encode(f"\n\n{copied}\n\n".encode())
    dictated += prose(engine, [*prompt, *dictated])
    request = {
        "max_tokens": len(dictated),
        "processors": [Dictation(len(prompt), dictated)],
    }
    contenders: dict[str, tuple[Any, Any]] = {"plain": (engine.plain(), 0), AUTO: (engine, AUTO)}
    contenders |= {f"draft model, K = {k}": (engine, k) for k in args.fixed_model}
    contenders |= {f"lookup, K = {k}": (lookup, k) for k in args.fixed_lookup}
    runs: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.repeats):
        for name, (who, count) in contenders.items():
            runs[name].append(speed(who, prompt, num_draft_tokens=count, **request))
    engine.close()
    speeds = {name: common.median(found) for name, found in runs.items()}
    best = max((name for name in speeds if name != AUTO), key=lambda name: speeds[name])
    print(f"\n{len(dictated)} tokens: prose, a copy, prose; {args.repeats} runs each")
    rows = [[name, f"{s:.1f}", f"{s / speeds['plain']:.2f}"] for name, s in speeds.items()]
    print(common.table(["contender", "tokens/s", "of plain"], rows))
    print(
        f"adaptive is at {speeds[AUTO] / speeds[best]:.2f} of the fastest other ({best})",
        flush=True,
    )
    return {"tokens_per_second": speeds, "best_fixed": best, "ratio": speeds[AUTO] / speeds[best]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("plain", "changing"), help="one of the questions")
    parser.add_argument("--quick", action="store_true", help="fewer prompts and contenders")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    args.fixed_model, args.fixed_lookup, args.probe_seconds = FIXED_MODEL, FIXED_LOOKUP, 10.0
    if args.quick:
        args.prompts, args.repeats, args.probe_seconds = 2, 1, 2.0
        args.fixed_model, args.fixed_lookup = (1,), (8,)
    began = time.perf_counter()
    slower = never_slower(args) if args.only != "changing" else {}
    changing = {}
    pairs = list(CHANGING.items())[: 1 if args.quick else None] if args.only != "plain" else []
    for name, load in pairs:
        print(f"\n{name}")
        changing[name] = changing_text(load, args)
    print(f"\n{common.machine_line()}")
    if args.json:
        result = {
            "worst_median": min((case["median"] for case in slower.values()), default=None),
            "changing_text": {name: found["ratio"] for name, found in changing.items()},
            "never_slower": slower,
            "changing": changing,
            "seconds": round(time.perf_counter() - began, 1),
            "machine": common.machine(),
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
