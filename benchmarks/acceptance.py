"""Acceptance by position: how often the target says what the draft proposed.

One candidate position per column: acceptance[k] is the share of rounds in which the k-th candidate
was right, out of those in which the ones before it were. A round in which the drafter proposes
nothing counts as a rejection of its first candidate, and a draft that stops early as a rejection of
the next one, so a shy drafter cannot look good.

    python benchmarks/acceptance.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import common

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T=0.7": {"temperature": 0.7},
    "T=1": {"temperature": 1.0},
}
SEED = 7
BATCH = 7
"""Prompts that share each pass; what is said does not depend on it."""


@dataclass
class Counts:
    """Candidates that were due and candidates that were right, by position."""

    due: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)

    def __init__(self, num_draft_tokens: int) -> None:
        self.due = [0] * num_draft_tokens
        self.right = [0] * num_draft_tokens

    def add(self, asked: int, accepted: int) -> None:
        """One round that could have had `asked` candidates, of which the first `accepted` stand."""
        for position in range(min(asked, accepted + 1)):
            self.due[position] += 1
            self.right[position] += position < accepted

    def rates(self) -> list[float]:
        return [r / d if d else float("nan") for r, d in zip(self.right, self.due, strict=True)]


Round = tuple[int, int, list[int]]
"""(target ids before it, candidates asked for, candidates proposed)."""


class Watched:
    """A drafter that passes every call on and remembers what was asked and proposed.

    Attributes:
        sessions: in the order in which the sequences began.
        rounds: of each session, by its id.
    """

    def __init__(self, drafter: Any) -> None:
        self.name = drafter.name
        self._drafter = drafter
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.sessions: list[Any] = []
        self.rounds: dict[int, list[Round]] = {}

    def new_session(self, context: Any) -> Any:
        session = self._drafter.new_session(context)
        self.sessions.append(session)
        self.rounds[id(session)] = []
        return session

    def draft(self, batch: Sequence[Any]) -> list[Any]:
        drafts: list[Any] = self._drafter.draft(batch)
        for (session, tokens, asked), draft in zip(batch, drafts, strict=True):
            proposed = list(draft.token_ids[:asked])
            self.rounds[id(session)].append((len(tokens), asked, proposed))
        return drafts

    def close(self) -> None:
        self._drafter.close()


def count(rounds: Sequence[Round], tokens: Sequence[int], counts: Counts) -> None:
    """Compare every proposal with what was then said; proposals past the end are left out."""
    for start, asked, proposed in rounds:
        said = list(tokens[start:])
        asked = min(asked, len(said))
        accepted = 0
        while accepted < min(asked, len(proposed)) and proposed[accepted] == said[accepted]:
            accepted += 1
        counts.add(asked, accepted)


def measure(
    engine: Any, prompts: Sequence[common.Prompt], args: argparse.Namespace
) -> dict[str, Any]:
    """Counts per mode, over all prompts."""
    import anydraft

    watched = Watched(engine.drafter)
    watching = anydraft.Engine(engine.target, watched, args.num_draft_tokens)
    result: dict[str, Any] = {}
    for mode, fields in MODES.items():
        counts, by_kind = Counts(args.num_draft_tokens), {}
        latin = Counts(args.num_draft_tokens)
        generated = rounds = 0
        for start in range(0, len(prompts), BATCH):
            group = prompts[start : start + BATCH]
            watched.forget()
            answers = watching.generate(
                [prompt.text for prompt in group],
                max_tokens=args.max_tokens,
                seed=SEED,
                num_draft_tokens=args.num_draft_tokens,
                **fields,
            )
            for prompt, answer, session in zip(group, answers, watched.sessions, strict=True):
                if answer.stats.draft_error:
                    raise SystemExit(f"the draft failed: {answer.stats.draft_error}")
                ids = engine.encode(anydraft.GenerationRequest(prompt=prompt.text))
                own = by_kind.setdefault(prompt.kind, Counts(args.num_draft_tokens))
                for counter in (counts, own, *[latin] * (prompt.kind != "script")):
                    count(watched.rounds[id(session)], [*ids, *answer.token_ids], counter)
                generated += len(answer.token_ids)
                rounds += answer.stats.rounds
        result[mode] = {
            "acceptance": counts.rates(),
            "due": counts.due,
            "without_scripts": latin.rates(),
            "tokens_per_round": generated / rounds,
            "first_by_kind": {kind: c.rates()[0] for kind, c in by_kind.items()},
        }
        print(f"{mode}: first candidate {counts.rates()[0]:.3f}", file=sys.stderr)
    return result


def show(
    result: dict[str, Any], args: argparse.Namespace, num_prompts: int, draft_dtype: str
) -> str:
    """The Markdown tables."""
    positions = [f"{i + 1}" for i in range(args.num_draft_tokens)]
    rows = [
        [mode, which, *(f"{a:.2f}" for a in r[key]), f"{r['tokens_per_round']:.2f}" if all_ else ""]
        for mode, r in result.items()
        for which, key, all_ in (
            ("all", "acceptance", True),
            ("English, code, numbers", "without_scripts", False),
        )
    ]
    main = common.table(["mode", "prompts", *positions, "tokens per round"], rows)
    kinds = list(next(iter(result.values()))["first_by_kind"])
    split = common.table(
        ["first candidate", *kinds],
        [[mode, *(f"{r['first_by_kind'][k]:.2f}" for k in kinds)] for mode, r in result.items()],
    )
    note = (
        f"{args.draft} ({draft_dtype}) drafting for {args.target} (float32), {num_prompts} "
        f"prompts, {args.max_tokens} tokens each, K = {args.num_draft_tokens}, seed {SEED}."
    )
    return f"{note}\n\n{main}\n\n{split}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default=common.TARGET)
    parser.add_argument("--draft", default=common.DRAFT)
    parser.add_argument("--draft-dtype", help="default: the backend's")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--quick", action="store_true", help="fewer prompts; under 50 s")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    started = time.perf_counter()
    import anydraft

    prompts = common.prompts("general")
    if args.quick:
        prompts, args.max_tokens = common.spread(prompts, 14), min(args.max_tokens, 24)
    engine = anydraft.load(
        args.target, args.draft, draft_options=common.load_draft_options(args.draft_dtype)
    )
    with engine:
        draft_dtype = common.dtype_name(engine.drafter.model)
        result = measure(engine, prompts, args)
    print(show(result, args, len(prompts), draft_dtype))
    if args.json:
        first = result["greedy"]["acceptance"][0]
        latin = result["greedy"]["without_scripts"][0]
        seconds = round(time.perf_counter() - started, 1)
        summary = {
            "first_candidate_greedy": first,
            "first_candidate_greedy_without_scripts": latin,
            "modes": result,
            "prompts": len(prompts),
        }
        print(json.dumps({**summary, "machine": common.machine(), "seconds": seconds}))


if __name__ == "__main__":
    main()
