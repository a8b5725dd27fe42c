"""The benchmark: every prompt through every contender in turn, results kept after each prompt.

A block is one prompt under one sampling setting, gone through by plain decoding and all others, one
after another; so a machine that is busy for a while slows all of them, and ratios are taken within
a block. An interrupted benchmark loses at most the block it was in.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

from anydraft.errors import PromptTooLongError, RequestError
from anydraft.measure import bench_results, bench_stats
from anydraft.measure.bench_machine import EnergyMeter, describe, memory_in_use
from anydraft.measure.bench_plan import (
    SEED_IDENTICAL,
    Contender,
    PairSpec,
    Plan,
    parse_sampling,
    plan_from_dict,
)
from anydraft.measure.bench_run import LoadedPair, generate, judge, turns
from anydraft.measure.workloads import Prompt, builtin, from_file

__all__ = ["Plan", "PairSpec", "begin", "continue_", "run"]

_WARM_UP_TOKENS = 12

Loader = Callable[[PairSpec, Plan], LoadedPair]


class Progress(Protocol):
    """Told how far a benchmark is."""

    def start(self, total: int, done: int) -> None:
        """So many runs are planned, and so many of them are there already."""

    def say(self, message: str) -> None:
        """What is being done now."""

    def advance(self, runs: int) -> None:
        """So many more runs are done."""


class Silent:
    """No progress shown."""

    def start(self, total: int, done: int) -> None: ...
    def say(self, message: str) -> None: ...
    def advance(self, runs: int) -> None: ...


def begin(plan: Plan) -> dict[str, Any]:
    """Results without runs, for `run` to fill.

    Raises:
        RequestError: the prompts cannot be read.
    """
    results = bench_results.new(plan.to_dict(), describe())
    results["prompts"] = [
        {"id": p.id, "kind": p.kind, "turns": len(p.turns), "digest": p.digest}
        for p in prompts_of(plan)
    ]
    return results


def continue_(results: dict[str, Any]) -> tuple[Plan, list[str]]:
    """The plan of interrupted results, and what has changed since, in words.

    Raises:
        RequestError: the prompts are no longer those that the results began with.
    """
    plan = plan_from_dict(results["plan"])
    digests = {prompt["id"]: prompt["digest"] for prompt in results["prompts"]}
    if {p.id: p.digest for p in prompts_of(plan)} != digests:
        raise RequestError(
            "the prompts have changed since this benchmark began, so it cannot go on: bring back "
            f"{plan.prompt_file or 'the version of anydraft that began it'}, or begin a new one"
        )
    now, then = describe(), results["machine"]
    changed = [f"{k}: {then.get(k)} then, {v} now" for k, v in now.items() if then.get(k) != v]
    return plan, changed


def prompts_of(plan: Plan) -> list[Prompt]:
    """The plan's prompts, kinds in turn, so that a part of them is a fair part."""
    if plan.prompt_file is not None:
        found = from_file(plan.prompt_file, plan.limit)
    else:
        found = builtin(plan.kinds, plan.limit)
    kinds: dict[str, list[Prompt]] = {}
    for prompt in found:
        kinds.setdefault(prompt.kind, []).append(prompt)
    return [p for group in zip_longest(*kinds.values()) for p in group if p is not None]


@dataclass(frozen=True, slots=True)
class Block:
    """One prompt, one sampling setting, one repeat."""

    index: int
    sampling: str
    prompt: Prompt
    repeat: int

    def key(self, pair: str) -> tuple[Any, ...]:
        return (pair, self.sampling, self.prompt.id, self.repeat)


def blocks(plan: Plan, prompts: Sequence[Prompt]) -> list[Block]:
    """All blocks of one pair, in the order in which they are measured."""
    return [
        Block(index, *rest)
        for index, rest in enumerate(
            (sampling, prompt, repeat)
            for repeat in range(plan.repeats)
            for prompt in prompts
            for sampling in plan.sampling
        )
    ]


def run(
    plan: Plan,
    results: dict[str, Any],
    save: Callable[[dict[str, Any]], None],
    *,
    load: Loader | None = None,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> bool:
    """Measure what the results still lack.

    Args:
        results: from `begin` or a file; grows.
        save: called after every block.
        load: opens a pair; by default from its names.
        cancelled: asked after every round; True ends the benchmark after the last whole block.

    Returns:
        Whether everything is there now.

    Raises:
        AnydraftError: a model cannot be loaded; what is there already has been saved.
        KeyboardInterrupt: cancelled while a pair was being probed.
    """
    from anydraft.measure.bench_load import load_pair

    progress = progress or Silent()
    every = blocks(plan, prompts_of(plan))
    done = _finished(results)
    todo = {p.label: [b for b in every if b.key(p.label) not in done] for p in plan.pairs}
    size = {p.label: _runs_per_block(plan, p) for p in plan.pairs}
    total = sum(size[p.label] * len(every) for p in plan.pairs)
    left = sum(size[label] * len(found) for label, found in todo.items())
    progress.start(total, total - left)
    for pair in plan.pairs:
        if not todo[pair.label]:
            continue
        progress.say(f"{pair.label}: loading")

        def say(what: str, label: str = pair.label) -> None:
            progress.say(f"{label}: {what}")
            if cancelled():
                raise KeyboardInterrupt

        with _opened(load or load_pair, pair, plan, results, say) as loaded:
            save(results)
            for block in todo[pair.label]:
                progress.say(f"{pair.label}: {block.prompt.id}")
                runs = _measure(plan, pair, loaded, block, cancelled)
                if runs is None:
                    return False
                results["runs"] += runs
                results["cells"] = bench_stats.summarise(results["runs"])
                _note_memory(results, pair)
                save(results)
                progress.advance(size[pair.label])
    results["complete"] = True
    save(results)
    return True


def _finished(results: Mapping[str, Any]) -> set[tuple[Any, ...]]:
    """Blocks that need not be measured again: only whole ones are ever kept."""
    return {(r["pair"], r["sampling"], r["prompt"], r["repeat"]) for r in results["runs"]}


def _runs_per_block(plan: Plan, pair: PairSpec) -> int:
    """About how many runs a block has; whether there is a native one is known only later."""
    return len(turns(plan.contenders(pair, "greedy", native=False), 0))


@contextmanager
def _opened(
    load: Loader,
    pair: PairSpec,
    plan: Plan,
    results: dict[str, Any],
    say: Callable[[str], None],
) -> Iterator[LoadedPair]:
    """A pair in memory, described in the results; freed afterwards."""
    from anydraft.measure.bench_load import describe_pair, engines
    from anydraft.measure.bench_predict import predict

    before = memory_in_use()
    loaded = load(pair, plan)
    try:
        entry = next((p for p in results["pairs"] if p["id"] == pair.label), None)
        if entry is None:
            entry = describe_pair(pair, loaded)
            entry["memory"] = {"before": before, "loaded": memory_in_use(), "running": 0}
            entry["prediction"] = None
        _warm_up(plan, pair, loaded)
        if entry not in results["pairs"]:
            if plan.predict:
                entry["prediction"] = predict(loaded, plan, say)
                loaded.engines = engines(loaded.timed, loaded.engine.drafter, plan)
            results["pairs"].append(entry)
        yield loaded
    finally:
        loaded.close()
        del loaded
        gc.collect()


def _note_memory(results: Mapping[str, Any], pair: PairSpec) -> None:
    entry = next(p for p in results["pairs"] if p["id"] == pair.label)
    entry["memory"]["running"] = max(entry["memory"]["running"], memory_in_use())


def _warm_up(plan: Plan, pair: PairSpec, loaded: LoadedPair) -> None:
    """Each contender once, briefly, on a text of no workload: first passes allocate and compile."""
    meter = EnergyMeter()
    for contender in plan.contenders(pair, "greedy", loaded.native is not None):
        fields = {"prompt": "One two three one two three", "max_tokens": _WARM_UP_TOKENS}
        generate(loaded, contender, fields, meter, lambda: False)


def _measure(
    plan: Plan,
    pair: PairSpec,
    loaded: LoadedPair,
    block: Block,
    cancelled: Callable[[], bool],
) -> list[dict[str, Any]] | None:
    """The runs of one block; None if it was cancelled."""
    order = turns(plan.contenders(pair, block.sampling, loaded.native is not None), block.index)
    prompt, runs = block.prompt, []
    said: list[dict[str, str]] = []
    for number, turn in enumerate(prompt.turns):
        said.append({"role": "user", "content": turn})
        fields = fields_of(plan, loaded, said) | parse_sampling(block.sampling)
        fields |= {"max_tokens": plan.max_tokens, "seed": plan.seed + block.index}
        labels = {
            "pair": pair.label,
            "sampling": block.sampling,
            "prompt": prompt.id,
            "turn": number,
            "kind": prompt.kind,
            "repeat": block.repeat,
        }
        try:
            found = _turn(loaded, order, fields, labels, cancelled)
        except PromptTooLongError as error:
            runs.append(labels | _skipped(error))
            break
        if found is None:
            return None
        runs += found[0]
        said.append({"role": "assistant", "content": found[1]})
    return runs


def _skipped(error: PromptTooLongError) -> dict[str, Any]:
    """A run that could not be: it keeps the prompt from being tried again."""
    nothing = {"tokens": 0, "first_tokens": 0, "seconds": 0.0, "first_seconds": 0.0}
    labels = {"contender": "plain", "method": SEED_IDENTICAL, "num_draft_tokens": 0}
    return labels | nothing | {"skipped": str(error)}


def _turn(
    loaded: LoadedPair,
    order: Sequence[Contender],
    fields: Mapping[str, Any],
    labels: Mapping[str, Any],
    cancelled: Callable[[], bool],
) -> tuple[list[dict[str, Any]], str] | None:
    """All contenders on one turn of the user's; the runs, and what plain decoding answered."""
    meter = EnergyMeter()
    made = []
    for slot, contender in enumerate(order):
        record, answer = generate(loaded, contender, fields, meter, cancelled)
        if cancelled():
            return None
        own = {
            "contender": contender.kind,
            "method": contender.method,
            "num_draft_tokens": contender.num_draft_tokens,
            "slot": slot,
            "at": round(time.time(), 3),
        }
        made.append((contender, {**labels, **own, **record}, answer))
    first_record, first_answer = made[0][1], made[0][2]
    assert first_answer is not None  # plain decoding begins
    for contender, record, answer in made:
        record["identity"] = judge(
            loaded, contender, fields, answer, record, (first_record, first_answer)
        )
    return [record for _, record, _ in made], first_answer.text


def fields_of(plan: Plan, loaded: LoadedPair, said: Sequence[dict[str, str]]) -> dict[str, Any]:
    """The prompt as messages where the target has a chat template, else as a plain text."""
    template = loaded.engine.vocabulary.chat_template is not None
    if plan.chat if plan.chat is not None else template:
        return {"messages": list(said)}
    return {"prompt": "\n\n".join(message["content"] for message in said)}
