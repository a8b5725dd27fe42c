"""Acceptance of the first candidate by every way to draft and verify, at the same positions.

At each position of the prompts both models' laws are known, so most acceptances are exact sums
over the vocabulary: independent drawing sum p psi, rejection sum min(p, psi) with each proposal
law's psi. `match` has no such sum, since pieces of a draft token count too: there the keyed draws
are made (--draws of them per position; agreement on very unlikely ids is left out). No candidate
counts as a rejection. Then a draft of K tokens is drawn by each law, and the expected tokens of the
round under rejection and block follow from the coins' probabilities. Errors are standard errors
over positions.

    python benchmarks/acceptance_laws.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import common

LAWS = ("union", "tli", "ttp")
NATS = 9.0
"""Ids less likely than the best one by more than this are lumped together in keyed draws."""
SKIP = 4
"""First tokens of a prompt that are not used: there is nothing to predict from."""


class Remembering:
    """A LanguageModel that keeps the logits of its last row."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.row: Any = None

    def extend(self, batch: Sequence[Any]) -> list[Any]:
        rows: list[Any] = self._model.extend(batch)
        self.row = rows[-1][-1].clone()
        return rows

    def __getattr__(self, name: str) -> Any:
        if name == "extend_greedy":
            raise AttributeError("arg-maxes without logits leave nothing to remember")
        return getattr(self._model, name)


class Position:
    """One position: both models' laws there.

    Args:
        ids: the target's ids before it.
        row: the target's logits.
    """

    def __init__(self, pair: Pair, ids: list[int], row: Any) -> None:
        self.pair, self.ids, self.row = pair, ids, row

    def measure(self, sessions: dict[str, Any], sampling: Any, draws: int) -> dict[str, float]:
        """Acceptance of the first candidate by each way."""
        from anydraft.sampling import Sampler

        pair = self.pair
        law = Sampler(sampling, pair.target.vocabulary, 0).law(self.row, self.ids)
        target = law.array(pair.target.vocab_size)
        result = {}
        for name in LAWS:
            psi = pair.first_law(sessions[name], self.ids)
            both = target[psi.token_ids] if psi else np.zeros(0)
            probs = psi.probs if psi else np.zeros(0)
            result[f"{name}+rejection"] = float(np.minimum(both, probs).sum())
            if name == "ttp":
                result["independent"] = float((both * probs).sum())
                greedy = psi.token_ids[int(probs.argmax())] if psi else 0
                result["most likely"] = float(target[greedy]) if psi else 0.0
        result["match"] = self._match(law, sampling, draws) if psi else 0.0
        return result

    def _match(self, law: Any, sampling: Any, draws: int) -> float:
        """Share of keyed draws in which the first candidate is the target's token."""
        from anydraft.noise import Noise, token_keys
        from anydraft.sampling import Sampler

        pair = self.pair
        vocabulary = pair.draft.vocabulary
        draft_law = Sampler(sampling, vocabulary, 0).law(pair.draft.row, [])
        target = Likely(law, token_keys(pair.target.vocabulary))
        draft = Likely(draft_law, token_keys(vocabulary))
        first: dict[int, int] = {-1: -1}
        hits = 0
        for seed in range(draws):
            noise = Noise(seed, 0, self.ids)
            chosen, said = draft.draw(noise), target.draw(noise)
            if chosen not in first:
                first[chosen] = pair.first_candidate(self.ids, chosen)
            hits += said >= 0 and first[chosen] == said
        return hits / draws


class Likely:
    """Draws from a law as the noise does, but all unlikely ids are one that agrees with nothing.

    Their agreement is lost, a few thousandths, and a draw costs a tenth.
    """

    def __init__(self, law: Any, keys: Any) -> None:
        kept = law.scores >= -NATS
        every = np.arange(len(law.scores)) if law.token_ids is None else law.token_ids
        self.ids, self.scores = every[kept], law.scores[kept].astype(np.float64)
        self.keys = keys[self.ids]
        rest = float(np.exp(law.scores[~kept].astype(np.float64)).sum())
        self.rest = math.log(rest) if rest > 0 else -math.inf

    def draw(self, noise: Any) -> int:
        """An id, or -1 for an unlikely one."""
        values = self.scores + noise.gumbel(0, self.keys)
        best = int(values.argmax())
        own_key = np.array([len(self.ids)], dtype=np.uint64)
        if self.rest + float(noise.gumbel(1, own_key)[0]) > values[best]:
            return -1
        return int(self.ids[best])


class Pair:
    """Two loaded models."""

    def __init__(self, args: argparse.Namespace) -> None:
        import anydraft
        from anydraft.drafters import make_drafter

        loaded = anydraft.load(
            args.target, args.draft, draft_options=common.load_draft_options(args.draft_dtype)
        )
        self.target = loaded.target
        self.dtype = common.dtype_name(loaded.drafter.model)
        self.draft = Remembering(loaded.drafter.model)
        self.drafter: Any = make_drafter(self.draft, self.target.vocabulary)
        self.engine = loaded

    def first_candidate(self, ids: Sequence[int], draft_id: int) -> int:
        """What `match` proposes first after drawing one draft id; -1 for nothing."""
        bridge = self.drafter.bridge
        data = bridge.draft.token_bytes[draft_id]
        if data is None or draft_id in bridge.draft_ends:
            end = bridge.target_end(chat=False) if draft_id in bridge.draft_ends else None
            return -1 if end is None else int(end)
        found = bridge.retokeniser.candidates(ids, data)
        return int(found[0]) if found else -1

    def first_law(self, session: Any, ids: list[int]) -> Any:
        """The law of the first proposal; None where the drafter proposes nothing."""
        laws = self.drafter.draft([(session, ids, 1)])[0].laws
        return laws[0] if laws else None

    def sessions(self, ids: list[int], sampling: Any, seed: int = 0) -> dict[str, Any]:
        from anydraft.drafter import DraftContext
        from anydraft.noise import Noise

        noise = Noise(seed, 0, ids)
        return {
            law: self.drafter.new_session(DraftContext(ids[:1], sampling, noise, law=law))
            for law in LAWS
        }


def places(pair: Pair, count: int) -> list[tuple[list[int], list[int]]]:
    """(ids of a prompt, positions in it), `count` positions evenly over all prompts."""
    import anydraft

    texts = [
        pair.engine.encode(anydraft.GenerationRequest(prompt=prompt.text))
        for prompt in common.prompts("general")
    ]
    every = [(n, i) for n, ids in enumerate(texts) for i in range(SKIP, len(ids))]
    step = len(every) / min(count, len(every))
    chosen = [every[int(step * (k + 0.5))] for k in range(min(count, len(every)))]
    return [(ids, [i for m, i in chosen if m == n]) for n, ids in enumerate(texts)]


def first_candidates(pair: Pair, chosen: Any, args: argparse.Namespace) -> dict[str, Any]:
    """temperature -> way -> acceptances, one per position."""
    from anydraft.sampling import SamplingParams

    result: dict[str, Any] = {f"T={t:g}": {} for t in args.temperatures}
    for ids, positions in chosen:
        if not positions:
            continue
        state = pair.target.new_state()
        rows = pair.target.extend([(state, ids[:-1], len(ids) - 1)])[0]
        state.close()
        for temperature in args.temperatures:
            sampling = SamplingParams(temperature=temperature)
            sessions = pair.sessions(ids, sampling)
            for i in positions:
                position = Position(pair, ids[:i], rows[i - 1])
                found = position.measure(sessions, sampling, args.draws)
                for way, value in found.items():
                    result[f"T={temperature:g}"].setdefault(way, []).append(value)
            for session in sessions.values():
                session.close()
    return result


def expected_tokens(plan: Any) -> float:
    """Expected tokens of a round, given what was drafted."""
    total, reach = 1.0, 1.0
    if plan.longest:  # the last success counts
        none_after = 1.0
        for n in range(len(plan.accept), 0, -1):
            total += n * plan.accept[n - 1] * none_after
            none_after *= 1 - plan.accept[n - 1]
        return total
    for chance in plan.accept:
        reach *= chance
        total += reach
    return total


def round_tokens(pair: Pair, chosen: Any, args: argparse.Namespace) -> dict[str, Any]:
    """temperature -> method -> expected tokens of a round, one per position."""
    from anydraft.sampling import Sampler, SamplingParams
    from anydraft.verify import VERIFICATIONS

    result: dict[str, Any] = {f"T={t:g}": {} for t in args.temperatures}
    for ids, positions in chosen:
        for temperature in args.temperatures if positions else ():
            sampling = SamplingParams(temperature=temperature)
            sessions = pair.sessions(ids, sampling, seed=1)
            sampler = Sampler(sampling, pair.target.vocabulary, 0)
            state = pair.target.new_state()
            for i in positions:
                for law in ("tli", "ttp"):
                    draft = pair.drafter.draft([(sessions[law], ids[:i], args.num_draft_tokens)])[0]
                    state.rollback(min(state.length, i - 1))
                    new = ids[state.length : i] + draft.token_ids
                    rows = pair.target.extend([(state, new, len(draft.token_ids) + 1)])[0]
                    size = pair.target.vocab_size
                    probs = [sampler.law(row, []).array(size) for row in rows]
                    for name, verification in VERIFICATIONS.items():
                        plan = verification(draft.proposals, draft.laws or [], probs)
                        found = result[f"T={temperature:g}"].setdefault(f"{law}+{name}", [])
                        found.append(expected_tokens(plan))
                    ways = result[f"T={temperature:g}"]
                    gain = ways[f"{law}+block"][-1] - ways[f"{law}+rejection"][-1]
                    ways.setdefault(f"{law}: block - rejection", []).append(gain)
            state.close()
    return result


def summary(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    values = [float(value) for value in values]
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def show(title: str, found: dict[str, Any]) -> str:
    """One Markdown table: a way per row, a temperature per column."""
    ways = list(next(iter(found.values())))
    rows = []
    for way in ways:
        cells = ["{:.3f} ± {:.3f}".format(*summary(values[way])) for values in found.values()]
        rows.append([way, *cells])
    return common.table([title, *found], rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default=common.TARGET)
    parser.add_argument("--draft", default=common.DRAFT)
    parser.add_argument("--draft-dtype", help="default: the backend's")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--positions", type=int, default=300)
    parser.add_argument(
        "--rounds", type=int, default=100, help="positions of the second table; 0: none"
    )
    parser.add_argument("--draws", type=int, default=200, help="keyed draws per position")
    parser.add_argument("--quick", action="store_true", help="fewer positions; under 50 s")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    if args.quick:
        args.positions, args.rounds = min(args.positions, 30), min(args.rounds, 8)
        args.draws = min(args.draws, 50)
    started = time.perf_counter()
    pair = Pair(args)
    with pair.engine:
        first = first_candidates(pair, places(pair, args.positions), args)
        print(show("first candidate", first), flush=True)
        tokens = round_tokens(pair, places(pair, args.rounds), args) if args.rounds else {}
    if tokens:
        print("\n" + show(f"tokens per round, K = {args.num_draft_tokens}", tokens))
    print(
        f"\n{args.draft} ({pair.dtype}) drafting for {args.target} (float32), {args.positions} and "
        f"{args.rounds} positions of {len(common.prompts('general'))} prompts, {args.draws} keyed "
        "draws each."
    )
    if args.json:
        parts = {"first_candidate": first, "tokens_per_round": tokens}
        result: dict[str, Any] = {
            name: {t: {way: summary(v) for way, v in ways.items()} for t, ways in found.items()}
            for name, found in parts.items()
        }
        seconds = round(time.perf_counter() - started, 1)
        print(json.dumps({**result, "machine": common.machine(), "seconds": seconds}))


if __name__ == "__main__":
    main()
