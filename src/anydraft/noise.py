"""Keyed noise: what makes sampled output a function of the seed alone.

A token is drawn as the arg-max of log-probability plus a Gumbel variable that depends only on
(seed, choice, prompt; byte position; token), so the same seed gives the same tokens whatever was
drafted. Equal byte strings share their noise across vocabularies, which makes an honest draft
agree with the target often (Daliri, Musco and Suresh 2024, arXiv 2408.07978).

Only ids within HEAD_NATS of the best get a variable of their own. The maximum over all the rest
is one Gumbel shifted by the log of their mass; if it wins, an id is drawn inside the rest by a
further uniform. By max-stability this is exact, and it costs a few thousand hashes instead of one
per id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from anydraft.errors import RequestError

if TYPE_CHECKING:
    from anydraft.sampling import Law
    from anydraft.vocabulary import Vocabulary

Keys: TypeAlias = npt.NDArray[np.uint64]

HEAD_NATS = 12.0
_BLOCK = 1024  # sums of blocks first, then inside one: no running sum over a whole vocabulary
ROLES = ("end_of_turn", "eos", "start_of_turn", "bos")  # the first role of an id names its key


def _hash64(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


_REST = _hash64(b"\x00rest of the vocabulary: which side")
_INSIDE = _hash64(b"\x00rest of the vocabulary: which id")


def _mix(x: Any) -> Any:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), on uint64 arrays."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Noise:
    """The noise of one generated sequence.

    Args:
        seed: any integer.
        choice: which of the n answers to the prompt this is.
        prompt_ids: the target's prompt; its hash separates prompts under one seed.
    """

    def __init__(self, seed: int, choice: int, prompt_ids: Sequence[int]) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise RequestError(f"seed must be a whole number, not {seed!r}")
        prompt = np.asarray(prompt_ids, dtype="<i8").tobytes()
        self._root = blake2b(f"{seed}/{choice}/".encode() + prompt, digest_size=32).digest()

    def uniform(self, position: int, keys: Keys) -> npt.NDArray[np.float64]:
        """(n,) numbers in (0, 1) with 52 bits, one per key, independent over keys and positions."""
        at = blake2b(position.to_bytes(8, "little"), key=self._root, digest_size=16).digest()
        first, second = np.frombuffer(at, dtype="<u8")
        bits = _mix(_mix(keys ^ first) + second)
        uniforms: npt.NDArray[np.float64] = ((bits >> np.uint64(12)) + 0.5) * 2.0**-52
        return uniforms

    def gumbel(self, position: int, keys: Keys) -> npt.NDArray[np.float64]:
        """(n,) standard Gumbel variables, one per key."""
        # log1p keeps the large values exact: they come from the small uniforms.
        gumbels: npt.NDArray[np.float64] = -np.log(-np.log1p(-self.uniform(position, keys)))
        return gumbels

    def coin(self, tag: str, start: int, step: int) -> float:
        """A number in (0, 1) for one draw of a round, with 52 bits.

        Args:
            tag: what it decides: "draft", "accept", "residual" or "bonus". Tags share nothing, with
                each other or with the keyed noise above.
            start: tokens committed before the round. It grows every round, so that a token drafted
                again at the same byte position does not meet its old noise.
            step: index within the round.
        """
        data = f"{tag}/{start}/{step}".encode()
        digest = blake2b(data, key=self._root, person=b"round", digest_size=8).digest()
        return ((int.from_bytes(digest, "little") >> 12) + 0.5) * 2.0**-52

    def flip(self, chance: Any, tag: str, start: int, step: int) -> bool:
        """True with probability `chance`."""
        return bool(self.coin(tag, start, step) < chance)

    def pick(self, probs: Any, tag: str, start: int, step: int) -> int:
        """An index drawn from `probs` (n,), which sum to 1 but for rounding."""
        sums = np.add.reduceat(probs, np.arange(0, len(probs), _BLOCK), dtype=np.float64).cumsum()
        point = self.coin(tag, start, step) * sums[-1]
        block = _first_above(sums, point)
        inside = probs[block * _BLOCK : (block + 1) * _BLOCK].cumsum(dtype=np.float64)
        return block * _BLOCK + _first_above(inside, point - (sums[block - 1] if block else 0.0))


def _first_above(sums: npt.NDArray[np.float64], point: float) -> int:
    """Index of the first of ascending sums above a point; the last that grew if rounding carried
    the point to the very end, where nothing is left."""
    index = int(np.searchsorted(sums, point, side="right"))
    return index if index < len(sums) else int(np.searchsorted(sums, sums[-1]))


def advance(position: int, token_bytes: bytes | None) -> int:
    """The byte position after a token. Zero-byte tokens count one, so no position is used twice."""
    return position + max(1, len(token_bytes or b""))


def token_keys(vocabulary: Vocabulary) -> Keys:
    """(vocab size,) key of every id: equal bytes, equal keys across vocabularies, never within one.

    The id that `encode` returns for a byte string has the plain key; duplicates are salted. One
    id per role (end of turn, ...) has the role's key. Computed once per vocabulary.
    """
    cached: Keys | None = getattr(vocabulary, "_noise_keys", None)
    if cached is not None:
        return cached
    roles: dict[int, str] = {}
    for role in ROLES:
        if role in vocabulary.roles:
            roles.setdefault(vocabulary.roles[role], role)
    keys = np.empty(vocabulary.size, dtype=np.uint64)
    canonical = vocabulary.ids_by_bytes
    for token_id, data in enumerate(vocabulary.token_bytes):
        if token_id in roles:
            keys[token_id] = _hash64(b"\x00role " + roles[token_id].encode())
        elif data is not None and canonical.get(data) == token_id:
            keys[token_id] = _hash64(b"\x01" + data)
        else:
            keys[token_id] = _hash64(b"\x00id " + str(token_id).encode() + b" " + (data or b""))
    object.__setattr__(vocabulary, "_noise_keys", keys)
    return keys


def draw(law: Law, noise: Noise | None, position: int, keys: Keys) -> int:
    """The law's token at a byte position under this noise: an exact sample of the law.

    Args:
        law: what to draw from.
        noise: may be None only for a one-hot law.
        position: bytes generated before this token.
        keys: `token_keys` of the law's vocabulary.
    """
    if law.one_hot:
        return law.id_at(0)
    if noise is None:
        raise ValueError("noise is None but the law is not one-hot")
    scores = law.scores
    head = np.flatnonzero(scores >= -HEAD_NATS)
    head_ids = head if law.token_ids is None else law.token_ids[head]
    values = scores[head].astype(np.float64) + noise.gumbel(position, keys[head_ids])
    winner = int(values.argmax())
    best = float(values[winner])
    index = _rest(scores, head, noise, position, best) if len(head) < len(scores) else -1
    return law.id_at(int(head[winner]) if index < 0 else index)


def _rest(
    scores: npt.NDArray[np.float32],
    head: npt.NDArray[np.int64],
    noise: Noise,
    position: int,
    best: float,
) -> int:
    """Index drawn among the scores below -HEAD_NATS if their Gumbel beats `best`, else -1."""
    gumbel = float(noise.gumbel(position, np.array([_REST], dtype=np.uint64))[0])
    if gumbel + math.log(len(scores)) - HEAD_NATS < best:  # their mass cannot be larger than this
        return -1
    weights = np.exp(scores)
    weights[head] = 0.0
    # float32 tells nearly always, and fast; its error over a million ids is far below a thousandth.
    if gumbel + math.log(1.001 * float(weights.sum()) + 1e-30) <= best:
        return -1
    weights = np.where(scores < -HEAD_NATS, np.exp(scores.astype(np.float64)), 0.0)
    mass = float(weights.sum())
    if mass == 0.0 or gumbel + math.log(mass) <= best:
        return -1
    share = float(noise.uniform(position, np.array([_INSIDE], dtype=np.uint64))[0]) * mass
    return int(np.searchsorted(weights.cumsum(), share))


def gap_among_rest(law: Law, noise: Noise, position: int, keys: Keys, token_id: int) -> float:
    """How far scores must move, at most, for `draw` to give an id that it draws among the rest.

    There it is the mass on either side of an id that decides, not its own score: if the ids on one
    side go up by half of what the logarithm of the odds lacks, and those on the other down by as
    much, the draw falls on it. Ids that a move carries across -HEAD_NATS are not reckoned with.

    Returns:
        In nats, 0 or more; infinity for an id that the law does not have.
    """
    index = token_id
    if law.token_ids is not None:
        index = int(np.searchsorted(law.token_ids, token_id))
        if index == len(law.token_ids) or law.token_ids[index] != token_id:
            return math.inf
    scores = law.scores.astype(np.float64)
    above = max(0.0, float(scores[index]) + HEAD_NATS)
    scores[index] -= above
    rest = scores < -HEAD_NATS
    rest[index] = True
    head = np.flatnonzero(~rest)
    head_ids = head if law.token_ids is None else law.token_ids[head]
    best = float((scores[head] + noise.gumbel(position, keys[head_ids])).max(initial=-math.inf))
    weights = np.where(rest, np.exp(scores), 0.0)
    sums = weights.cumsum()
    gumbel = float(noise.gumbel(position, np.array([_REST], dtype=np.uint64))[0])
    lacking = max(0.0, best - gumbel - math.log(sums[-1])) if sums[-1] > 0 else math.inf
    share = float(noise.uniform(position, np.array([_INSIDE], dtype=np.uint64))[0])
    before, after = (sums[index] - weights[index]) / sums[-1], sums[index] / sums[-1]
    odds = 0.0
    if not before <= share <= after:
        odds = abs(_logit(share) - _logit(before if share < before else after))
    return above + (lacking + odds) / 2


def _logit(share: float) -> float:
    return math.log(share) - math.log1p(-share)
