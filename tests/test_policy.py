"""What the adaptive policy promises, against a clock that charges what each test says."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from anydraft.adaptive import AdaptivePolicy
from anydraft.backends.toy import ToyModel
from anydraft.decode import DecodeSequence, decode
from anydraft.drafter import DraftContext
from anydraft.drafters.lookup import LookupDrafter
from anydraft.drafters.several import SeveralDrafters
from anydraft.engine import Engine
from anydraft.errors import RequestError
from anydraft.learned import Experience, PassCosts
from anydraft.policy import FixedPolicy, Policy, check_num_draft_tokens
from anydraft.sampling import Sampler, SamplingParams
from anydraft.sources import new_source
from anydraft.speed import Curve, SpeedModel
from simulated import (
    Session,
    Source,
    Text,
    World,
    adaptive,
    coins,
    fixed,
    fresh,
    lookup_source,
    play,
    play_batch,
)
from test_decode import PLAIN, greedy_model, oracle
from toys import ScriptedDrafter, oracle_drafter, random_drafter, toy_target

EXTRA = 40  # positions beyond the end that a long draft may look at


def curve(points: dict[int, float], unit: float) -> Callable[[int], float]:
    made = Curve(points)
    return lambda n: unit * made(n)


PARALLEL = curve({1: 1, 2: 1.09, 4: 1.21, 8: 1.49, 16: 1.81, 32: 2.47}, 0.051)
JAGGED = curve(
    {1: 13.5, 2: 25, 3: 38, 4: 34, 5: 48, 6: 58, 7: 68, 8: 63, 9: 80, 12: 92, 13: 110, 16: 121,
     17: 140}, 0.001,
)  # fmt: skip
BIG = curve({1: 1, 17: 1.8}, 0.2)
QUICK = curve({1: 1, 17: 2.1}, 0.03)


def world(verify: Callable[[int], float], noise: float = 0.03) -> World:
    return World(verify, overhead=0.0013, draft_overhead=0.0025, glance=0.0001, noise=noise)


def text(length: int, seed: int, rate: float, start: float, step: float, read: float) -> Text:
    """A draft model that is right so often, beside lookup on prose."""
    model = Source(coins(length + EXTRA, rate, seed), start, step, read)
    return Text(length, [model, lookup_source(["prose"] * length, seed)])


WORSE = {
    "random ids": (PARALLEL, (0.0, 0.0001, 0.0, 0.0)),
    "never right and dear": (PARALLEL, (0.0, 0.010, 0.013, 0.0006)),
    "slower than the target": (QUICK, (0.6, 0.020, 0.055, 0.002)),
    "near-serial verification": (JAGGED, (0.55, 0.010, 0.013, 0.0006)),
}
BETTER = {
    "big target": (BIG, (0.7, 0.010, 0.013, 0.0006)),
    "good draft": (QUICK, (0.9, 0.002, 0.009, 0.0006)),
    "half right": (PARALLEL, (0.62, 0.005, 0.012, 0.0006)),
}


@pytest.mark.parametrize("case", WORSE)
@pytest.mark.parametrize("profiled", [True, False])
@pytest.mark.parametrize("length", [16, 160])
def test_a_draft_that_does_not_pay_costs_almost_nothing(
    case: str, profiled: bool, length: int
) -> None:
    verify, draft = WORSE[case]
    ratios, plain, spent = [], 0.0, 0.0
    for engine in range(2):
        experience: Experience | None = None
        for request in range(24 if length == 16 else 6):
            given = text(length, 100 * engine + request, *draft)
            experience = experience or fresh(given, world(verify), profiled=profiled)
            got = adaptive(given, world(verify), experience, seed=request)
            alone = fixed(given, world(verify), 0, seed=request)
            ratios.append(got.speed / alone.speed)
            plain += alone.seconds
            spent += got.seconds
    assert statistics.median(ratios) >= 0.97
    assert plain / spent >= 0.97


@pytest.mark.parametrize("case", BETTER)
def test_a_draft_that_pays_is_used_almost_as_well_as_afterwards_is_known_best(case: str) -> None:
    verify, draft = BETTER[case]
    spent, alone = 0.0, Counter[int]()
    for engine in range(3):
        experience: Experience | None = None
        for request in range(3):
            given = text(400, 100 * engine + request, *draft)
            experience = experience or fresh(given, world(verify), profiled=True)
            spent += adaptive(given, world(verify), experience, seed=request).seconds
            for count in range(11):
                alone[count] += fixed(given, world(verify), count, seed=request).seconds  # type: ignore[assignment]
    best = min(alone, key=alone.__getitem__)
    assert best > 0
    assert alone[best] / spent >= 0.95
    assert alone[0] / spent > 1.05


def test_without_a_profile_it_learns_in_the_first_answers() -> None:
    verify, draft = BETTER["big target"]
    experience: Experience | None = None
    speeds = []
    for request in range(6):
        given = text(200, request, *draft)
        experience = experience or fresh(given, world(verify), profiled=False)
        got = adaptive(given, world(verify), experience, seed=request)
        speeds.append(got.speed / fixed(given, world(verify), 0, seed=request).speed)
        if request == 0:
            # Nothing is drafted before plain decoding has been measured.
            assert got.widths[:2] == [1, 1]
    assert statistics.mean(speeds[2:]) > 1.6


def changing_text(seed: int) -> Text:
    """Prose, a long verbatim copy, prose again; the draft model is right more often in prose."""
    kinds = ["prose"] * 150 + ["copy"] * 200 + ["prose"] * 150
    model = Source(coins(len(kinds) + EXTRA, 0.68, seed), 0.004, 0.009, 0.0005)
    return Text(len(kinds), [model, lookup_source(kinds, seed)])


def test_text_that_changes_kind_is_met_better_than_by_any_fixed_length() -> None:
    spent, alone = 0.0, Counter[tuple[int, int]]()
    used: Counter[int | None] = Counter()
    for seed in range(4):
        given = changing_text(seed)
        got = adaptive(given, world(PARALLEL), seed=seed)
        spent += got.seconds
        used.update(got.sources)
        for source, count in itertools.product((0, 1), (0, 1, 2, 3, 4, 6, 8, 12, 16, 31)):
            alone[source, count] += fixed(given, world(PARALLEL), count, source, seed).seconds  # type: ignore[assignment]
    assert spent < min(alone.values())
    assert used[0] > 100 and used[1] > 20


def test_cheap_widths_of_a_jagged_curve_are_preferred() -> None:
    """Rows by fours: a pass over four is cheaper than one over three."""
    given = Text(600, [lookup_source(["copy"] * 600, 1)])
    got = adaptive(given, world(JAGGED))
    wide = [width for width in got.widths if width > 1]
    assert sum(width % 4 == 0 for width in wide) > 0.9 * len(wide)
    alone = fixed(given, world(JAGGED), 0)
    assert got.speed > 1.3 * alone.speed


def test_a_noisy_machine_does_not_lead_it_astray() -> None:
    verify, draft = WORSE["near-serial verification"]
    noisy = World(verify, 0.0013, 0.0025, 0.0001, noise=0.2, hiccup=0.05)
    ratios = []
    for seed in range(6):
        given = text(300, seed, *draft)
        got = adaptive(given, noisy, seed=seed)
        # Counted with the same machine without noise: what was chosen, not what luck it had.
        quiet = sum(verify(width) for width in got.widths) / sum(
            verify(width) for width in fixed(given, noisy, 0, seed=seed).widths
        )
        ratios.append(1 / quiet)
    assert statistics.median(ratios) > 0.96


def test_a_stale_profile_is_corrected_by_what_rounds_take() -> None:
    """The profile says that rows are free and drafts cheap; neither holds any more."""
    given = text(600, 3, *WORSE["near-serial verification"][1])
    experience = fresh(given, world(curve({1: 1.0, 17: 1.1}, 0.0135)), profiled=True)
    got = adaptive(given, world(JAGGED), experience)
    assert got.speed / fixed(given, world(JAGGED), 0).speed > 0.95
    assert experience.passes.mean(2) / experience.passes.mean(1) > 1.5


def test_it_comes_back_after_the_text_has_changed_for_the_better() -> None:
    length = 900
    rate = [0.0] * 300 + [0.8] * 600
    model = Source(coins(length, lambda at: rate[at], 5) + [False] * EXTRA, 0.005, 0.012, 0.0006)
    got = adaptive(Text(length, [model]), world(BIG))
    assert all(source is None for source in got.sources[180:230])
    assert Counter(got.sources[-60:])[0] > 40


def test_its_choice_is_that_of_the_speed_model_once_rates_are_known() -> None:
    rate, start, step = 0.75, 0.004, 0.008
    for verify in (PARALLEL, BIG, JAGGED):
        given = Text(3000, [Source(coins(3000 + EXTRA, rate, 8), start, step)])
        got = adaptive(given, world(verify, noise=0.0))
        chosen = Counter(width - 1 for width in got.widths[400:]).most_common(1)[0][0]
        model = SpeedModel(
            acceptance=[rate],
            verify=Curve({n: verify(n) for n in range(1, 18)}),
            draft=Curve({0: 0.0, 1: start + step, 2: start + 2 * step}),
            overhead=0.0014,
            draft_overhead=0.0026,
        )
        # Neighbours are nearly as fast; what counts is the speed.
        assert model.speedup(chosen) > 0.98 * model.speedup(model.best())


def test_short_answers_do_not_pay_for_a_long_prompt() -> None:
    """The draft would have to read 2000 tokens first; 16 tokens never earn that back."""
    verify, (rate, start, step, _) = BETTER["big target"]
    given = text(16, 1, rate, start, step, read=0.001)
    given.prompt = 2000
    got = adaptive(given, world(verify))
    assert 0 not in got.sources
    longer = text(400, 1, rate, start, step, read=0.001)
    longer.prompt = 2000
    assert 0 in adaptive(longer, world(verify)).sources


def test_a_source_that_fell_behind_pays_for_catching_up() -> None:
    kinds = ["copy"] * 300
    model = Source(coins(300 + EXTRA, 0.9, 2), 0.001, 0.004, 0.01)
    given = Text(300, [model, lookup_source(kinds, 2)])
    session = Session(given)
    policy = AdaptivePolicy(fresh(given, world(PARALLEL), profiled=True), session)
    got = play(given, world(PARALLEL), policy, session)
    assert Counter(got.sources)[1] > 3 * Counter(got.sources)[0]


@pytest.mark.parametrize("size", [2, 8])
def test_sequences_of_a_batch_draft_where_the_rows_are_still_cheap(size: int) -> None:
    verify, draft = BETTER["big target"]
    texts = [text(200, seed, *draft) for seed in range(size)]
    gain = play_batch(texts, world(verify), drafting=True) / play_batch(
        texts, world(verify), drafting=False
    )
    assert gain > (1.25 if size == 2 else 1.1)
    serial = [text(200, seed, *WORSE["near-serial verification"][1]) for seed in range(size)]
    loss = play_batch(serial, world(JAGGED), drafting=True) / play_batch(
        serial, world(JAGGED), drafting=False
    )
    assert loss > 0.97


# ---- in the loop


def run_loop(policy: Callable[[object], Policy], drafters: list[object]) -> DecodeSequence:
    """The greedy toy through the real loop, on a clock that ticks once per reading."""
    ticks = itertools.count()
    model = greedy_model()
    drafter = SeveralDrafters(drafters)  # type: ignore[arg-type]
    session = drafter.new_session(DraftContext([0], SamplingParams()))
    made = DecodeSequence(
        tokens=[0],
        state=model.new_state(),
        sampler=Sampler(SamplingParams(), model.vocabulary, 1),
        keys=None,  # type: ignore[arg-type]  # greedy draws need none
        limit=41,
        policy=policy(session),
        stop=lambda token, from_draft, row: None,
        session=session,
    )
    for _ in decode(model, drafter, [made], lambda: float(next(ticks))):
        assert made.state.tokens == made.tokens[:-1]  # type: ignore[attr-defined]
    return made


def experience_of(drafters: Sequence[object]) -> Experience:
    sources = [new_source(blind=not isinstance(each, LookupDrafter)) for each in drafters]
    return Experience(PassCosts(Curve({1: 1.0, 17: 1.01})), sources)


@pytest.mark.parametrize("wrong_every", [0, 2, 5])
def test_the_loop_says_the_same_whatever_the_policy_chooses(wrong_every: int) -> None:
    drafters: list[object] = [oracle(wrong_every), LookupDrafter()]
    made = run_loop(lambda session: AdaptivePolicy(experience_of(drafters), session), drafters)  # type: ignore[arg-type]
    assert made.tokens == PLAIN
    assert made.stats.draft_n > 0


def test_a_source_that_breaks_is_dropped_and_the_other_goes_on() -> None:
    def fails(tokens: list[int], count: int) -> list[int]:
        raise RuntimeError("out of ideas")

    drafters: list[object] = [ScriptedDrafter(fails), LookupDrafter()]
    made = run_loop(lambda session: AdaptivePolicy(experience_of(drafters), session), drafters)  # type: ignore[arg-type]
    assert made.tokens == PLAIN
    assert made.stats.draft_error == "RuntimeError: out of ideas"
    assert made.session is not None  # lookup is still there


def test_a_drafter_without_the_laws_of_a_request_is_left_out() -> None:
    """As rejection and block verification need them; lookup has none."""

    class WithLaw:
        prompt_ids, previous, law = [0], None, "shared"

    drafter = SeveralDrafters([oracle(3), LookupDrafter()])
    made = drafter._take_part(1, WithLaw())  # type: ignore[arg-type]
    assert made == "lookup has no law shared"
    drafter.drafters[1].laws = {"shared": ""}  # type: ignore[attr-defined]
    assert drafter._take_part(1, WithLaw()) is None  # type: ignore[arg-type]


def test_a_policy_decides_before_anything_of_the_round_is_drawn() -> None:
    """Rejection and block verification need that: its only inputs are the text and past rounds."""
    seen: list[tuple[int, bool]] = []

    class Recorder(Policy):
        def choose(self, tokens: Sequence[int], room: int, sharers: int) -> int:
            seen.append((len(tokens), True))
            return 3

        def observe(self, outcome: object) -> None:
            seen.append((0, False))

    made = run_loop(lambda session: Recorder(), [oracle(3)])
    kinds = [asking for _, asking in seen]
    # Asked once, told once, in turn (the last token leaves no room, so nobody asks).
    assert kinds[:-1] == [True, False] * (len(kinds) // 2) or kinds == [True, False] * (
        len(kinds) // 2
    )
    lengths = [length for length, asking in seen if asking]
    assert lengths == sorted(set(lengths))  # before each round the text of the rounds before
    assert made.tokens == PLAIN


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["right", "half right", "random ids", "lookup"])
def test_auto_is_seed_identical_with_plain_decoding(temperature: float, kind: str) -> None:
    target: ToyModel = toy_target(seed=9)
    plain = Engine(target)
    prompts = [[0], [4, 5, 6, 0, 1], [2, 2]]
    request = {"max_tokens": 60, "temperature": temperature, "seed": 3, "ignore_eos": True}
    alone = [plain.generate(p, **request).token_ids for p in prompts]
    drafter = {
        "right": oracle_drafter(plain, {"prompt": prompts[1], **request}),
        "half right": oracle_drafter(plain, {"prompt": prompts[1], **request}, wrong_every=2),
        "random ids": random_drafter(target.vocab_size),
        "lookup": LookupDrafter(),
    }[kind]
    engine = Engine(target, drafter)
    assert engine.num_draft_tokens == "auto"
    for _ in range(2):
        assert [g.token_ids for g in engine.generate(prompts, **request)] == alone
        got = [engine.generate(p, **request).token_ids for p in prompts]
        assert got == alone


def test_per_request_auto_a_number_or_off() -> None:
    plain = Engine(toy_target(seed=2))
    request = {"prompt": [0, 1], "max_tokens": 30, "ignore_eos": True}
    engine = Engine(toy_target(seed=2), oracle_drafter(plain, request), 3)
    counted = engine.generate(**request).stats
    assert counted.draft_n > 0 and len(counted.drafted_at) == 3
    for off in ("off", 0):
        assert engine.generate(**request, num_draft_tokens=off).stats.draft_n == 0
    assert engine.generate(**request, num_draft_tokens="auto").stats.generated_tokens == 30
    for bad in ("automatic", 2.5, True, -1, 65):
        with pytest.raises(RequestError, match=r"'auto', 'off' or a whole number from 0 to 64"):
            check_num_draft_tokens(bad)  # type: ignore[arg-type]


def test_a_fixed_number_never_uses_lookup_beside_the_draft() -> None:
    engine = Engine(toy_target(seed=2), ScriptedDrafter(lambda tokens, count: []), 4)
    got = engine.generate([0, 1] * 8, max_tokens=40, ignore_eos=True)
    assert got.stats.draft_n == 0
    assert FixedPolicy(4).choose([0], 10, 1) == 4
