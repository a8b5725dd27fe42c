"""The one loop. Plain decoding is this loop with an empty draft.

After every round the target has processed exactly `tokens[:-1]` of each sequence, and every model
is fed `tokens[state.length:]`; so there is no first step, and no case of its own for "all
accepted".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch

from anydraft.drafter import Draft, Drafter, DraftSession
from anydraft.model import GreedyModel, LanguageModel, ModelState
from anydraft.noise import Keys, Noise, advance, draw
from anydraft.policy import Outcome, Policy
from anydraft.sampling import PADDING, Sampler
from anydraft.stats import Stats
from anydraft.verify import VERIFICATIONS, Laws, match, settle
from anydraft.vocabulary import Vocabulary

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """One sequence on its way through the loop.

    Attributes:
        tokens: prompt and output so far, target ids; at least one.
        state: the target's; holds a prefix of `tokens` (usually nothing, or all but the last).
        limit: `tokens` never grows beyond this length.
        keys: noise keys of the target's vocabulary.
        stop: told in turn every emitted id, whether the draft foresaw it, and the target's logits
            that it was drawn from; answers with a finish reason or None.
        session: the drafter's; None is plain decoding.
        position: bytes generated so far (the noise's clock).
        argmax_mask: where `stop` ignores the logits and Sampler.argmax_mask has an answer, that
            answer; then the target need not compute them.
        verification: "match", or "rejection" or "block", which need noise and drafts with laws.
    """

    tokens: list[int]
    state: ModelState
    sampler: Sampler
    keys: Keys
    limit: int
    policy: Policy
    stop: Callable[[int, bool, torch.Tensor], str | None]
    noise: Noise | None = None
    session: DraftSession | None = None
    position: int = 0
    argmax_mask: list[int] | None = None
    verification: str = "match"
    finish_reason: str | None = None
    stats: Stats = field(default_factory=Stats)

    def num_draft_tokens(self, sharers: int) -> int:
        room = self.limit - len(self.tokens) - 1
        if self.session is None or room < 1:
            return 0
        return max(0, min(self.policy.choose(self.tokens, room, sharers), room))

    def draw(self, logits: torch.Tensor, prefix: list[int], position: int) -> int:
        return draw(self.sampler.law(logits, prefix), self.noise, position, self.keys)

    def advance(self, token_id: int) -> None:
        self.tokens.append(token_id)
        data = self.sampler.vocabulary.token_bytes[token_id]
        self.position = advance(self.position, data)


def decode(
    target: LanguageModel,
    drafter: Drafter | None,
    sequences: list[DecodeSequence],
    clock: Callable[[], float],
) -> Generator[list[DecodeSequence], None, None]:
    """Run sequences to their ends, one round of all of them per step.

    Yields:
        After each round the sequences that took part; their tokens and finish reasons are up to
        date.
    """
    active = [s for s in sequences if s.finish_reason is None]
    greedy = target if isinstance(target, GreedyModel) else None
    while active:
        times = [clock()]
        asked, drafts = _draft(drafter, active)
        times.append(clock())
        lengths = [len(s.tokens) for s in active]
        batch = [
            (s.state, s.tokens[s.state.length :] + d.token_ids, len(d.token_ids) + 1)
            for s, d in zip(active, drafts, strict=True)
        ]
        masks = [s.argmax_mask if s.verification == "match" else None for s in active]
        rows = _verify_pass(target, greedy, batch, masks)
        times.append(clock())
        for sequence, draft, own in zip(active, drafts, rows, strict=True):
            _settle(sequence, draft, own)
        times.append(clock())
        for sequence in active:
            _count_time(sequence.stats, times, len(active))
        emitted = [len(s.tokens) - n for s, n in zip(active, lengths, strict=True)]
        drafted = [len(d.token_ids) for d in drafts]
        _tell(active, asked, drafted, emitted, [len(ids) for _, ids, _ in batch], times)
        yield active
        active = [s for s in active if s.finish_reason is None]


def _verify_pass(
    target: LanguageModel,
    greedy: GreedyModel | None,
    batch: list[tuple[ModelState, list[int], int]],
    masks: list[list[int] | None],
) -> list[torch.Tensor]:
    """Per sequence its rows: logits, or ids already chosen where the arg-max is all it needs."""
    if greedy is not None and any(mask is not None for mask in masks):
        return greedy.extend_greedy(batch, masks)
    return target.extend(batch)


def _draft(drafter: Drafter | None, active: list[DecodeSequence]) -> tuple[list[int], list[Draft]]:
    """How much was asked for, and one draft, per sequence; empty where none is wanted.

    A broken drafter is dropped, and said.
    """
    asked = [s.num_draft_tokens(len(active)) for s in active]
    wanted = [(i, n) for i, n in enumerate(asked) if n > 0]
    drafts = [Draft() for _ in active]
    if drafter is None or not wanted:
        return asked, drafts
    calls = [(s, active[i].tokens, n) for i, n in wanted if (s := active[i].session) is not None]
    try:
        proposed = drafter.draft(calls)
        for (i, n), draft in zip(wanted, proposed, strict=True):
            drafts[i] = _usable(draft, n, active[i])
            active[i].stats.draft_error = draft.error or active[i].stats.draft_error
    except Exception as error:
        log.warning("the draft failed; the target goes on alone: %s", error, exc_info=True)
        for i, _ in wanted:
            drafts[i] = Draft()
            active[i].stats.draft_error = f"{type(error).__name__}: {error}"
            active[i].session = None
    return asked, drafts


def _usable(draft: Draft, limit: int, sequence: DecodeSequence) -> Draft:
    """At most `limit` ids, up to the first that the target could not process or may never emit.

    A law is kept with what was drawn from it. The limit does not depend on what was drawn, and an
    id that the target never emits is as good as none: neither can bias the answer.
    """
    vocabulary = sequence.sampler.vocabulary
    draft_ids, laws = draft.token_ids[:limit], draft.laws
    bad = next((n for n, i in enumerate(draft_ids) if not _processable(i, vocabulary)), limit)
    if sequence.verification == "match":
        return Draft(draft_ids[:bad])
    if laws is None and draft_ids:
        raise ValueError(f"{sequence.verification} needs the laws that a draft was drawn from")
    return Draft(draft_ids[:bad], (laws or [])[: min(bad + 1, limit)])


def _processable(token_id: int, vocabulary: Vocabulary) -> bool:
    return 0 <= token_id < vocabulary.size and vocabulary.kinds[token_id] != PADDING


def _settle(sequence: DecodeSequence, draft: Draft, rows: torch.Tensor) -> None:
    """Verify one sequence's round, commit what stands token by token, and roll the target back."""
    verify = _match if sequence.verification == "match" else _spend
    emitted = verify(sequence, draft, rows)
    chosen = rows.dim() == 1  # then no one asks for logits, and a view of one id costs microseconds
    sequence.stats.add_round(len(draft.proposals), len(emitted) - 1)
    for index, token_id in enumerate(emitted):
        sequence.advance(token_id)
        sequence.stats.generated_tokens += 1
        from_draft = index < len(emitted) - 1
        row = rows if chosen else rows[index]
        sequence.finish_reason = sequence.stop(token_id, from_draft, row)
        if sequence.finish_reason is None and len(sequence.tokens) >= sequence.limit:
            sequence.finish_reason = "length"
        if sequence.finish_reason is not None:
            break
    sequence.state.rollback(len(sequence.tokens) - 1)


def _match(sequence: DecodeSequence, draft: Draft, rows: torch.Tensor) -> list[int]:
    """The target's own draws, as far as the draft foresaw them and one more."""
    draft_ids = draft.token_ids
    prefix = list(sequence.tokens) if draft_ids else sequence.tokens
    position = sequence.position
    token_bytes = sequence.sampler.vocabulary.token_bytes
    chosen = rows.tolist() if rows.dim() == 1 else None

    def draw_row(row: int) -> int:
        nonlocal position
        if row:
            prefix.append(draft_ids[row - 1])
            position = advance(position, token_bytes[draft_ids[row - 1]])
        if chosen is not None:
            return int(chosen[row])
        return sequence.draw(rows[row], prefix, position)

    return match(draft_ids, draw_row)


def _spend(sequence: DecodeSequence, draft: Draft, rows: torch.Tensor) -> list[int]:
    """What stands of a draft by its laws and the target's, with this round's coins."""
    noise, start, draft_ids = sequence.noise, len(sequence.tokens), draft.token_ids
    assert noise is not None
    known: dict[int, Any] = {}

    def target_probs(row: int) -> Any:
        if row not in known:
            law = sequence.sampler.law(rows[row], [*sequence.tokens, *draft_ids[:row]])
            known[row] = law.array(rows.shape[1])
        return known[row]

    proposals = draft.proposals
    verification = VERIFICATIONS[sequence.verification]
    plan = verification(proposals, draft.laws or [], Laws(len(rows), target_probs))
    num_accepted, last = settle(
        plan,
        lambda step, chance: noise.flip(chance, "accept", start, step),
        lambda kept, law: noise.pick(
            law, "bonus" if kept == len(proposals) else "residual", start, kept
        ),
    )
    return [*draft_ids[:num_accepted], last]


def _tell(
    active: list[DecodeSequence],
    asked: list[int],
    drafted: list[int],
    emitted: list[int],
    fed: list[int],
    times: list[float],
) -> None:
    """Tell the policies how the round went."""
    started, drafts_made, verified, settled = times
    for index, sequence in enumerate(active):
        sequence.policy.observe(
            Outcome(
                asked=asked[index],
                drafted=drafted[index],
                emitted=emitted[index],
                rows=sum(fed),
                prompt=sum(fed) > sum(drafted) + len(active),
                sharers=len(active),
                drafting=sum(count > 0 for count in asked),
                longest=max(asked),
                draft_seconds=drafts_made - started,
                target_seconds=verified - drafts_made,
                overhead_seconds=settled - verified,
                finished=sequence.finish_reason is not None,
            )
        )


def _count_time(stats: Stats, times: list[float], sharers: int) -> None:
    started, drafted, verified, settled = times
    stats.draft_seconds += (drafted - started) / sharers
    stats.target_seconds += (verified - drafted) / sharers
    stats.overhead_seconds += (settled - verified) / sharers
    if stats.rounds == 1:
        stats.first_token_seconds = stats.total_seconds
        stats.first_round_tokens = stats.generated_tokens
