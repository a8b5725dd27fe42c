"""Every metric of a generation, defined once. Wire names follow llama.cpp where it has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Stats:
    """What one generated sequence cost and what its drafts were worth.

    Attributes:
        prompt_tokens: tokens of the prompt, in target ids.
        generated_tokens: tokens of the answer.
        rounds: target passes; the prompt's pass is the first.
        draft_n: tokens drafted and checked.
        draft_n_accepted: those of them that stand.
        rounds_by_drafted: how many rounds checked 0, 1, 2, ... drafted tokens.
        drafted_at, accepted_at: the same by position in the draft (index 0: first candidate).
        draft_seconds, target_seconds, overhead_seconds: time in draft passes, in target passes,
            and in everything else. Sequences decoded as a batch share each pass evenly.
        first_token_seconds: from the request to the end of its first round.
        draft_error: why drafting was given up half-way; None if it was not.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    rounds: int = 0
    draft_n: int = 0
    draft_n_accepted: int = 0
    rounds_by_drafted: list[int] = field(default_factory=list)
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    overhead_seconds: float = 0.0
    first_token_seconds: float = 0.0
    first_round_tokens: int = 0
    draft_error: str | None = None

    def add_round(self, num_drafted: int, num_accepted: int) -> None:
        """Count one round that checked `num_drafted` tokens and kept `num_accepted` of them."""
        self.rounds += 1
        self.draft_n += num_drafted
        widths = self.rounds_by_drafted
        widths.extend([0] * (num_drafted + 1 - len(widths)))
        widths[num_drafted] += 1
        self.draft_n_accepted += num_accepted
        grow = num_drafted - len(self.drafted_at)
        self.drafted_at.extend([0] * grow)
        self.accepted_at.extend([0] * grow)
        for position in range(num_drafted):
            # Position k is only reached, and so only counted, if the ones before were accepted.
            if position <= num_accepted:
                self.drafted_at[position] += 1
            if position < num_accepted:
                self.accepted_at[position] += 1

    @property
    def acceptance(self) -> list[float]:
        """acceptance[k]: P(candidate k accepted | the ones before it were)."""
        pairs = zip(self.accepted_at, self.drafted_at, strict=True)
        return [accepted / drafted for accepted, drafted in pairs if drafted]

    @property
    def survival(self) -> list[float]:
        """survival[k]: P(candidates 0..k all accepted), the running product of `acceptance`."""
        product, result = 1.0, []
        for rate in self.acceptance:
            product *= rate
            result.append(product)
        return result

    @property
    def tokens_per_round(self) -> float:
        return self.generated_tokens / self.rounds if self.rounds else 0.0

    @property
    def total_seconds(self) -> float:
        return self.draft_seconds + self.target_seconds + self.overhead_seconds

    @property
    def tokens_per_second(self) -> float:
        """Speed of decoding: tokens after the first round over the time after it.

        The first round also pays for the prompt, so it is left out unless it was the only one.
        """
        tokens = self.generated_tokens - self.first_round_tokens
        seconds = self.total_seconds - self.first_token_seconds
        if tokens <= 0 or seconds <= 0:
            tokens, seconds = self.generated_tokens, self.total_seconds
        return tokens / seconds if seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The stats under their wire names; times in seconds."""
        return {
            "tokens_per_second": self.tokens_per_second,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "rounds": self.rounds,
            "tokens_per_round": self.tokens_per_round,
            "draft_n": self.draft_n,
            "draft_n_accepted": self.draft_n_accepted,
            "rounds_by_drafted": self.rounds_by_drafted,
            "acceptance": self.acceptance,
            "survival": self.survival,
            "first_token_seconds": self.first_token_seconds,
            "draft_seconds": self.draft_seconds,
            "target_seconds": self.target_seconds,
            "overhead_seconds": self.overhead_seconds,
            "draft_error": self.draft_error,
        }
