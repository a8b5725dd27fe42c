"""Drafted runs against plain ones, with near-ties counted and anything beyond them a failure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anydraft.engine import Engine, GenerationRequest
from anydraft.identity import compare_with_plain


class Identity:
    """Runs requests plainly once, and compares drafted runs with that."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.plain = Engine(target)
        self.answers: dict[str, Any] = {}
        self.compared = 0
        self.near_ties: list[str] = []
        self.largest_gap = self.largest_bound = 0.0
        self.tokens = 0

    def check(self, drafter: Any, count: int | str, **request: Any) -> Any:
        got = Engine(self.target, drafter, count).generate(**request)
        self.compare(got, count, request)
        return got

    def check_batch(self, drafter: Any, count: int, prompts: list[str], **request: Any) -> None:
        """Drafted as one ragged batch, compared with plain decoding of each prompt alone."""
        batch = Engine(self.target, drafter, count).generate(prompts, **request)
        for got, prompt in zip(batch, prompts, strict=True):
            # In a report this generation stands alone: prompt 0 of its own request.
            self.compare(replace(got, prompt_index=0), count, {"prompt": prompt, **request})

    def compare(self, got: Any, count: int | str, request: dict[str, Any]) -> None:
        key = repr(sorted(request.items()))
        if key not in self.answers:
            self.answers[key] = self.plain.generate(**request)
        expected = self.answers[key]
        assert got.stats.draft_error is None
        self.compared += 1
        self.tokens += len(got.token_ids)
        if got.token_ids != expected.token_ids:
            report = compare_with_plain(self.plain, got, GenerationRequest(**request), expected)
            assert report.passed, (count, request, report)
            gaps = [d.gap for d in report.near_ties]
            self.largest_gap = max(self.largest_gap, *gaps, 0.0)
            self.largest_bound = max(self.largest_bound, *(d.bound for d in report.near_ties), 0.0)
            self.near_ties.append(f"K={count} {request}: {report.summary()}")

    def summary(self) -> str:
        """What was compared and where it differed, in lines."""
        first = (
            f"{self.compared} generations compared, {self.tokens} tokens, "
            f"{len(self.near_ties)} of them with near-ties, the widest of {self.largest_gap:.2g}; "
            f"bounds there at most {self.largest_bound:.2g}"
        )
        return "\n" + "\n".join([first, *self.near_ties]) + "\n"
