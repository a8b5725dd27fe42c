"""anydraft against transformers' `generate()`: same fp32 weights, threads, prompts, greedy.

One interleaved run: every prompt goes through all contenders in turn, so that a machine that is
busy for a while slows all of them. A figure is the median over prompts of the ratio of tokens/s; a
speed is new token ids over the wall time of the whole call, prompt included, on both sides. Both
sides generate the same number of tokens (no end token stops them).

Each side uses its best number of draft tokens (at least 1), found before on prompts of their own
(`prompts/calibration.jsonl`): transformers at a constant number per round, its confidence threshold
off.

    python benchmarks/vs_transformers.py [--quick] [--json]

Figures of the JSON object (ratios of tokens/s, above 1 is faster):

    plain                           our plain decoding / generate()
    cross_vocabulary                other vendor's draft / generate(assistant_model=...)
    cross_vocabulary_vs_own_plain   the same / our plain decoding
    lookup                          ours with lookup / generate(prompt_lookup_num_tokens=10)
    lookup_vs_best                  the same / generate(prompt_lookup_num_tokens=its best)
    lookup_vs_own_plain             the same / our plain decoding

lookup figures come from prompts that make the target repeat a text (`prompts/copy.jsonl`), all
others from `prompts/general.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import common

PEER_LOOKUP_DEFAULT = 10  # what transformers' documentation shows


@dataclass(frozen=True)
class Plan:
    """What one run tries and measures."""

    calibration_tokens: int
    general: int | None
    general_tokens: int
    copies: int | None
    copy_tokens: int
    ours_draft: tuple[int, ...]
    peer_draft: tuple[int, ...]
    ours_lookup: tuple[int, ...]
    peer_lookup: tuple[int, ...]
    calibration_kinds: tuple[str, ...]
    seconds: float | None
    """Stop taking further prompts in time to end within this, loading included."""


QUICK = Plan(12, 6, 24, 1, 64, (1, 2), (1, 2), (15, 31), (10, 31), ("prose",), 44)
FULL = Plan(
    32, None, 48, None, 64, (1, 2, 3, 4, 6), (1, 2, 3, 5), (7, 15, 31), (10, 20, 31, 48),
    ("prose", "code", "list"), None,
)  # fmt: skip

Contender = Callable[[list[int], int, int], list[int]]
"""(prompt ids, new tokens, number of draft tokens) -> new ids."""


class Peer:
    """transformers."""

    def __init__(self, target: str, draft: str, draft_dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        from anydraft import store

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.torch = torch
        folders = [store.resolve(name) for name in (target, draft)]
        dtypes = (torch.float32, getattr(torch, draft_dtype))
        self.model, self.assistant = (
            AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
            ).eval()
            for folder, dtype in zip(folders, dtypes, strict=True)
        )
        self.tokenizer, self.assistant_tokenizer = (
            AutoTokenizer.from_pretrained(folder, local_files_only=True) for folder in folders
        )
        # No end token, rather than min_new_tokens: that would make its prompt lookup run a logits
        # processor over the whole vocabulary for every candidate, which is not compared here.
        for model in (self.model, self.assistant):
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0

    def _generate(self, ids: list[int], count: int, **options: Any) -> list[int]:
        with self.torch.inference_mode():
            prompt = self.torch.tensor([ids])
            output = self.model.generate(
                prompt,
                attention_mask=self.torch.ones_like(prompt),
                max_new_tokens=count,
                do_sample=False,
                **options,
            )
        new: list[int] = output[0, len(ids) :].tolist()
        return new

    def plain(self, ids: list[int], count: int, _: int) -> list[int]:
        return self._generate(ids, count)

    def draft(self, ids: list[int], count: int, num_draft_tokens: int) -> list[int]:
        config = self.assistant.generation_config
        config.num_assistant_tokens = num_draft_tokens
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0
        return self._generate(
            ids,
            count,
            assistant_model=self.assistant,
            tokenizer=self.tokenizer,
            assistant_tokenizer=self.assistant_tokenizer,
        )

    def lookup(self, ids: list[int], count: int, num_draft_tokens: int) -> list[int]:
        return self._generate(ids, count, prompt_lookup_num_tokens=num_draft_tokens)


class Ours:
    """anydraft; one target, three engines."""

    def __init__(self, target: str, draft: str, draft_dtype: str | None) -> None:
        import anydraft

        options = common.load_draft_options(draft_dtype)
        self._draft = anydraft.load(target, draft, draft_options=options)
        self._lookup = anydraft.load(self._draft.target, "lookup")
        self._plain = self._draft.plain()
        self.draft_dtype = common.dtype_name(self._draft.drafter.model)

    def encode(self, text: str) -> list[int]:
        return self._plain.vocabulary.encode_prompt(text)

    def _generate(
        self, engine: Any, ids: list[int], count: int, num_draft_tokens: int
    ) -> list[int]:
        answer = engine.generate(
            ids, max_tokens=count, ignore_eos=True, num_draft_tokens=num_draft_tokens
        )
        if answer.stats.draft_error:
            raise SystemExit(f"the draft failed: {answer.stats.draft_error}")
        new: list[int] = answer.token_ids
        return new

    def plain(self, ids: list[int], count: int, _: int) -> list[int]:
        return self._generate(self._plain, ids, count, 0)

    def draft(self, ids: list[int], count: int, num_draft_tokens: int) -> list[int]:
        return self._generate(self._draft, ids, count, num_draft_tokens)

    def lookup(self, ids: list[int], count: int, num_draft_tokens: int) -> list[int]:
        return self._generate(self._lookup, ids, count, num_draft_tokens)


def timed(
    run: Contender, ids: list[int], count: int, num_draft_tokens: int
) -> tuple[float, list[int]]:
    """(tokens/s over the whole call, new ids)."""
    started = time.perf_counter()
    new = run(list(ids), count, num_draft_tokens)
    seconds = time.perf_counter() - started
    if len(new) != count:
        raise SystemExit(f"{run.__qualname__} gave {len(new)} tokens, not {count}")
    return len(new) / seconds, new


def best_of(
    run: Contender, candidates: Sequence[int], prompts: Sequence[list[int]], count: int
) -> tuple[int, dict[int, float]]:
    """The fastest number of draft tokens, and the tokens/s of all, over the calibration prompts."""
    speeds: dict[int, float] = {}
    for num_draft_tokens in candidates:
        rates = [timed(run, ids, count, num_draft_tokens)[0] for ids in prompts]
        speeds[num_draft_tokens] = len(rates) / sum(1 / rate for rate in rates)
    return max(speeds, key=lambda k: speeds[k]), speeds


def run_block(
    contenders: dict[str, tuple[Contender, int]],
    prompts: Sequence[list[int]],
    count: int,
    deadline: float | None = None,
) -> tuple[dict[str, list[float]], list[dict[str, list[int]]]]:
    """Every prompt through every contender, each time beginning with another one.

    Beyond the first, a prompt is begun only if it can be expected to end before the deadline.
    """
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    outputs: list[dict[str, list[int]]] = []
    names = list(contenders)
    longest = 0.0
    for index, ids in enumerate(prompts):
        started = time.perf_counter()
        if index and deadline is not None and started + longest > deadline:
            break
        said: dict[str, list[int]] = {}
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            run, num_draft_tokens = contenders[name]
            speed, said[name] = timed(run, ids, count, num_draft_tokens)
            speeds[name].append(speed)
        outputs.append(said)
        longest = max(longest, time.perf_counter() - started)
        line = ", ".join(f"{name} {speeds[name][-1]:.1f}" for name in names)
        print(f"prompt {index + 1}/{len(prompts)}: {line}", file=sys.stderr)
    return speeds, outputs


def ratio(speeds: dict[str, list[float]], one: str, other: str) -> float:
    """The median of the paired ratios."""
    return common.median(a / b for a, b in zip(speeds[one], speeds[other], strict=True))


def identity(outputs: Sequence[dict[str, list[int]]], reference: str) -> dict[str, dict[str, int]]:
    """Per contender how many prompts and leading tokens agree with the reference contender."""
    result: dict[str, dict[str, int]] = {}
    for name in outputs[0]:
        same = leading = total = 0
        for said in outputs:
            pairs = list(zip(said[name], said[reference], strict=True))
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
            same += first == len(pairs)
            leading += first
            total += len(pairs)
        result[name] = {
            "prompts_identical": same, "prompts": len(outputs),
            "leading_tokens_identical": leading, "tokens": total,
        }  # fmt: skip
    return result


def compare(ours: Ours, peer: Peer, plan: Plan, started: float) -> dict[str, Any]:
    """The whole run, calibration first."""
    for side in (ours, peer):  # first calls build what later ones reuse
        for run in (side.plain, side.draft, side.lookup):
            run(ours.encode("A first call, a first call, a first"), 4, 2)
    calibration = [
        ours.encode(p.text) for p in common.prompts("calibration", plan.calibration_kinds)
    ]
    repeated = [ours.encode(p.text) for p in common.prompts("calibration", ["copy"])]
    tokens = plan.calibration_tokens
    found = {
        "draft": best_of(ours.draft, plan.ours_draft, calibration, tokens),
        "transformers_draft": best_of(peer.draft, plan.peer_draft, calibration, tokens),
        "lookup": best_of(ours.lookup, plan.ours_lookup, repeated, plan.copy_tokens),
        "transformers_lookup": best_of(peer.lookup, plan.peer_lookup, repeated, plan.copy_tokens),
    }
    best = {name: k for name, (k, _) in found.items()}
    print(f"best numbers of draft tokens: {best}", file=sys.stderr)
    copies = {
        "transformers_lookup_10": (peer.lookup, PEER_LOOKUP_DEFAULT),
        "lookup": (ours.lookup, best["lookup"]),
        "plain": (ours.plain, 0),
    }
    if best["transformers_lookup"] != PEER_LOOKUP_DEFAULT:
        copies["transformers_lookup_best"] = (peer.lookup, best["transformers_lookup"])
    copied, copy_outputs = run_block(
        copies,
        [ours.encode(p.text) for p in common.spread(common.prompts("copy"), plan.copies)],
        plan.copy_tokens,
    )
    copied.setdefault("transformers_lookup_best", copied["transformers_lookup_10"])
    general, outputs = run_block(
        {
            "transformers_plain": (peer.plain, 0),
            "plain": (ours.plain, 0),
            "transformers_draft": (peer.draft, best["transformers_draft"]),
            "draft": (ours.draft, best["draft"]),
        },
        [ours.encode(p.text) for p in common.spread(common.prompts("general"), plan.general)],
        plan.general_tokens,
        None if plan.seconds is None else started + plan.seconds,
    )
    return {
        "plain": ratio(general, "plain", "transformers_plain"),
        "cross_vocabulary": ratio(general, "draft", "transformers_draft"),
        "cross_vocabulary_vs_own_plain": ratio(general, "draft", "plain"),
        "lookup": ratio(copied, "lookup", "transformers_lookup_10"),
        "lookup_vs_best": ratio(copied, "lookup", "transformers_lookup_best"),
        "lookup_vs_own_plain": ratio(copied, "lookup", "plain"),
        "best_num_draft_tokens": best,
        "calibration_tokens_per_second": {name: speeds for name, (_, speeds) in found.items()},
        "tokens_per_second": {
            "general": {name: common.median(values) for name, values in general.items()},
            "copy": {name: common.median(values) for name, values in copied.items()},
        },
        "prompts": {"general": len(outputs), "copy": len(copy_outputs)},
        "token_identity": {
            "general": identity(outputs, "transformers_plain"),
            "copy": identity(copy_outputs, "plain"),
        },
    }


def show(result: dict[str, Any]) -> None:
    """The table for people."""
    names = {
        "plain": "plain decoding / generate()",
        "cross_vocabulary": "other vendor's draft / generate(assistant_model=...) at its best",
        "cross_vocabulary_vs_own_plain": "other vendor's draft / our plain decoding",
        "lookup": "lookup, copied text / generate(prompt_lookup_num_tokens=10)",
        "lookup_vs_best": "lookup, copied text / prompt lookup at its best",
        "lookup_vs_own_plain": "lookup, copied text / our plain decoding",
    }
    print(common.machine_line())
    print(f"draft tokens per round: {result['best_num_draft_tokens']}")
    print()
    print(
        common.table(["ratio of tokens/s", ""], [[v, f"{result[k]:.2f}"] for k, v in names.items()])
    )
    for block, reference in (("general", "generate()"), ("copy", "our plain decoding")):
        print(f"\n{block} prompts: {result['prompts'][block]}; median tokens/s and identity:")
        for name, speed in result["tokens_per_second"][block].items():
            same = result["token_identity"][block].get(name)
            said = f"{same['prompts_identical']} of {same['prompts']}" if same else "-"
            print(f"  {name:26} {speed:7.1f}   as {reference}: {said}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default=common.TARGET)
    parser.add_argument("--draft", default=common.DRAFT)
    parser.add_argument("--draft-dtype", help="of our draft; default: the backend's")
    parser.add_argument("--peer-draft-dtype", default="float32", help="of transformers' draft")
    parser.add_argument("--threads", type=int, help="of both sides; default: PyTorch's own choice")
    parser.add_argument("--quick", action="store_true", help="fewer prompts; under 50 s")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    started = time.perf_counter()
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    ours = Ours(args.target, args.draft, args.draft_dtype)
    peer = Peer(args.target, args.draft, args.peer_draft_dtype)
    loaded = time.perf_counter() - started
    print(f"both sides loaded after {loaded:.1f} s", file=sys.stderr)
    result = compare(ours, peer, QUICK if args.quick else FULL, started)
    result["draft_dtype"] = ours.draft_dtype
    result["transformers_draft_dtype"] = args.peer_draft_dtype
    result["machine"] = common.machine()
    result["seconds"] = round(time.perf_counter() - started, 1)
    show(result)
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
