"""What an engine can draft from, and what is known of it at the start."""

from __future__ import annotations

from anydraft.adaptive import LOOKUP_PRIORS, MODEL_PRIORS
from anydraft.drafter import Drafter
from anydraft.drafters.lookup import LookupDrafter
from anydraft.drafters.several import SeveralDrafters
from anydraft.learned import (
    LOOKUP_COSTS,
    DraftCosts,
    Experience,
    PassCosts,
    Rates,
    SourceExperience,
)
from anydraft.model import LanguageModel
from anydraft.profile import Profile, load_profile

_MEMORY = 200.0  # trials that the experience of all sequences remembers


def drafters_of(drafter: Drafter) -> SeveralDrafters:
    """The draft, and beside a model lookup."""
    lookup = isinstance(drafter, LookupDrafter)
    return SeveralDrafters([drafter] if lookup else [drafter, LookupDrafter()])


def first_experience(
    target: LanguageModel, drafters: SeveralDrafters, *, sampled: bool
) -> Experience:
    """What is known before anything was generated: costs, as far as a kept profile has them.

    Args:
        sampled: of requests at a temperature above 0, whose passes may cost more.
    """
    drafter = drafters.drafters[0]
    profile = load_profile(target, drafter) or load_profile(target)
    sources = [
        new_source(
            blind=not isinstance(each, LookupDrafter), profile=profile if not index else None
        )
        for index, each in enumerate(drafters.drafters)
    ]
    curve = None if profile is None else profile.verify_curve(sampled=sampled)
    return Experience(PassCosts(curve), sources)


def new_source(*, blind: bool, profile: Profile | None = None) -> SourceExperience:
    """A source that nothing has been drafted from yet.

    Args:
        blind: a model, which foresees nothing; else lookup.
        profile: its measured costs.
    """
    costs = DraftCosts() if blind else DraftCosts(LOOKUP_COSTS, 0.0)
    if profile is not None and profile.draft is not None:
        costs = DraftCosts(profile.draft_curve(), profile.draft.read)
    rates = Rates(MODEL_PRIORS if blind else LOOKUP_PRIORS, _MEMORY, chain=blind)
    return SourceExperience(costs, rates, blind=blind)
