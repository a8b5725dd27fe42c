"""anydraft against transformers' `generate()`: same fp32 weights, threads, prompts, greedy.

One interleaved run: every prompt goes through all contenders in turn, so that a machine that is
busy for a while slows all of them. A figure is the median over prompts of the ratio of tokens/s. As
everywhere in anydraft, that is tokens after the first round over the time after it, so that the
prompt does not count (on both sides: transformers' first round is seen through a streamer); the
same ratios for whole calls, prompt included, are given too, under "whole_call". Token ids are
counted, and both sides generate the same number of them (no end token stops them).

Each side uses its best number of draft tokens (at least 1), found before on prompts of their own
(`prompts/calibration.jsonl`): transformers at a constant number per round, its confidence threshold
off. The short form spares that, and uses those that the long form found on a 2-core x86 machine.

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
from dataclasses import dataclass, replace
from typing import Any

import common
from anydraft.measure.bench_native import FirstRound
from interleaved import Block, Run, best_of, own_run, run_block

PEER_LOOKUP_DEFAULT = 10  # what transformers' documentation shows
COPIED = 80  # new tokens of a calibration run on copied text: more than the text is long


@dataclass(frozen=True)
class Plan:
    """What one run tries and measures."""

    calibration_tokens: int
    general: int | None
    general_tokens: int
    copies: int | None
    copy_tokens: int
    copy_plain_tokens: int
    """Plain decoding's speed does not depend on how many; fewer save time."""
    ours_draft: tuple[int, ...]
    peer_draft: tuple[int, ...]
    ours_lookup: tuple[int, ...]
    peer_lookup: tuple[int, ...]
    calibration_kinds: tuple[str, ...]
    seconds: float | None
    """Stop taking further prompts in time to end within this, loading included."""


# One candidate each: what the long form found best on a 2-core x86 machine.
QUICK = Plan(
    calibration_tokens=10,
    general=6,
    general_tokens=20,
    copies=1,
    copy_tokens=128,
    copy_plain_tokens=24,
    ours_draft=(1,),
    peer_draft=(1,),
    ours_lookup=(31,),
    peer_lookup=(48,),
    calibration_kinds=("prose",),
    seconds=46,
)
FULL = Plan(
    calibration_tokens=32,
    general=None,
    general_tokens=48,
    copies=None,
    copy_tokens=128,
    copy_plain_tokens=128,
    ours_draft=(1, 2, 3, 4, 6),
    peer_draft=(1, 2, 3, 5),
    ours_lookup=(7, 15, 31),
    peer_lookup=(10, 20, 31, 48),
    calibration_kinds=("prose", "code", "list"),
    seconds=None,
)


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

    def _generate(self, ids: list[int], count: int, **options: Any) -> Run:
        first = FirstRound()
        started = time.perf_counter()
        with self.torch.inference_mode():
            prompt = self.torch.tensor([ids])
            output = self.model.generate(
                prompt,
                attention_mask=self.torch.ones_like(prompt),
                max_new_tokens=count,
                streamer=first,
                **{"do_sample": False, **options},
            )
        new: list[int] = output[0, len(ids) :].tolist()
        seconds = time.perf_counter() - started
        return Run(new, seconds, first.tokens, first.at - started)

    def plain(self, ids: list[int], count: int, _: int) -> Run:
        return self._generate(ids, count)

    def sampled(self, ids: list[int], count: int, num_draft_tokens: int, temperature: float) -> Run:
        """With the draft, drawn from the whole law."""
        law = {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        return self._draft(ids, count, num_draft_tokens, do_sample=True, **law)

    def draft(self, ids: list[int], count: int, num_draft_tokens: int) -> Run:
        return self._draft(ids, count, num_draft_tokens)

    def _draft(self, ids: list[int], count: int, num_draft_tokens: int, **options: Any) -> Run:
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
            **options,
        )

    def lookup(self, ids: list[int], count: int, num_draft_tokens: int) -> Run:
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

    def plain(self, ids: list[int], count: int, _: int) -> Run:
        return own_run(self._plain, ids, count, 0)

    def draft(self, ids: list[int], count: int, num_draft_tokens: int) -> Run:
        return own_run(self._draft, ids, count, num_draft_tokens)

    def lookup(self, ids: list[int], count: int, num_draft_tokens: int) -> Run:
        return own_run(self._lookup, ids, count, num_draft_tokens)


def compare(ours: Ours, peer: Peer, plan: Plan, started: float) -> dict[str, Any]:
    """The whole run, calibration first."""
    for side in (ours, peer):  # first calls build what later ones reuse
        for run in (side.plain, side.draft, side.lookup):
            run(ours.encode("A first call, a first call, a first"), 3, 2)
    calibration = [
        ours.encode(p.text) for p in common.prompts("calibration", plan.calibration_kinds)
    ]
    repeated = [ours.encode(p.text) for p in common.prompts("calibration", ["copy"])]
    tokens = plan.calibration_tokens
    found = {
        "draft": best_of(ours.draft, plan.ours_draft, calibration, tokens),
        "transformers_draft": best_of(peer.draft, plan.peer_draft, calibration, tokens),
        "lookup": best_of(ours.lookup, plan.ours_lookup, repeated, COPIED),
        "transformers_lookup": best_of(peer.lookup, plan.peer_lookup, repeated, COPIED),
    }
    best = {name: k for name, (k, _) in found.items()}
    print(f"best numbers of draft tokens: {best}", file=sys.stderr)
    count, plain_count = plan.copy_tokens, plan.copy_plain_tokens
    copies = {
        "transformers_lookup_10": (peer.lookup, PEER_LOOKUP_DEFAULT, count),
        "lookup": (ours.lookup, best["lookup"], count),
        "plain": (ours.plain, 0, plain_count),
    }
    if best["transformers_lookup"] != PEER_LOOKUP_DEFAULT:
        copies["transformers_lookup_best"] = (peer.lookup, best["transformers_lookup"], count)
    copied = run_block(
        copies,
        [ours.encode(p.text) for p in common.spread(common.prompts("copy"), plan.copies)],
    )
    copied.runs.setdefault("transformers_lookup_best", copied.runs["transformers_lookup_10"])
    count = plan.general_tokens
    general = run_block(
        {
            "transformers_plain": (peer.plain, 0, count),
            "plain": (ours.plain, 0, count),
            "transformers_draft": (peer.draft, best["transformers_draft"], count),
            "draft": (ours.draft, best["draft"], count),
        },
        [ours.encode(p.text) for p in common.spread(common.prompts("general"), plan.general)],
        None if plan.seconds is None else started + plan.seconds,
    )
    return {
        **figures(general, copied),
        "best_num_draft_tokens": best,
        "calibration_tokens_per_second": {name: speeds for name, (_, speeds) in found.items()},
        "tokens_per_second": {"general": general.speeds(), "copy": copied.speeds()},
        "prompts": {"general": general.num_prompts, "copy": copied.num_prompts},
        "new_tokens": {"general": count, "copy": plan.copy_tokens, "copy_plain": plain_count},
        "token_identity": {
            "general": general.identity("transformers_plain"),
            "copy": copied.identity("plain"),
        },
    }


def figures(general: Block, copied: Block) -> dict[str, Any]:
    """The six ratios, and the same for whole calls."""
    pairs = {
        "plain": (general, "plain", "transformers_plain"),
        "cross_vocabulary": (general, "draft", "transformers_draft"),
        "cross_vocabulary_vs_own_plain": (general, "draft", "plain"),
        "lookup": (copied, "lookup", "transformers_lookup_10"),
        "lookup_vs_best": (copied, "lookup", "transformers_lookup_best"),
        "lookup_vs_own_plain": (copied, "lookup", "plain"),
    }
    whole = {name: block.whole_ratio(one, other) for name, (block, one, other) in pairs.items()}
    ratios = {name: block.ratio(one, other) for name, (block, one, other) in pairs.items()}
    return {**ratios, "whole_call": whole}


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
    whole = result["whole_call"]
    rows = [
        [words, f"{result[name]:.2f}", "-" if whole[name] is None else f"{whole[name]:.2f}"]
        for name, words in names.items()
    ]
    print(common.table(["ratio of tokens/s", "after the prompt", "whole call"], rows))
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
    parser.add_argument("--prompts", type=int, help="at most so many of each file")
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
    plan = QUICK if args.quick else FULL
    if args.prompts:
        general, copies = (
            min(n or args.prompts, args.prompts) for n in (plan.general, plan.copies)
        )
        plan = replace(plan, general=general, copies=copies)
    result = compare(ours, peer, plan, started)
    result["draft_dtype"] = ours.draft_dtype
    result["transformers_draft_dtype"] = args.peer_draft_dtype
    result["machine"] = common.machine()
    result["seconds"] = round(time.perf_counter() - started, 1)
    show(result)
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
