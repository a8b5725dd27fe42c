"""Drafters, loaded by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anydraft.drafter import Drafter, DraftSettings
    from anydraft.model import LanguageModel
    from anydraft.vocabulary import Vocabulary

__all__ = ["make_drafter"]


def make_drafter(
    draft: LanguageModel | str,
    target_vocabulary: Vocabulary,
    settings: DraftSettings | None = None,
) -> Drafter:
    """The drafter for a draft model, or "lookup" for the one without a model.

    A model whose vocabulary is the target's drafts in shared ids, any other through bytes.

    Args:
        settings: how a draft model drafts; lookup has nothing to set.

    Raises:
        RequestError: settings for lookup.
        VocabularyError: the draft model cannot draft for this target; the message says why.
    """
    from anydraft.drafter import DraftSettings
    from anydraft.errors import RequestError, VocabularyError

    if isinstance(draft, str):
        if draft != "lookup":
            raise VocabularyError(
                f"no drafter is called {draft!r}; the one without a model is 'lookup'"
            )
        if settings is not None and settings != DraftSettings():
            raise RequestError("lookup drafts have no temperature, confidence or vocabulary to set")
        from anydraft.drafters.lookup import LookupDrafter

        return LookupDrafter()
    from anydraft.vocabulary import compare

    comparison = compare(target_vocabulary, draft.vocabulary)
    if not comparison.methods["draft_model"]:
        from anydraft.drafters.draft_model import DraftModelDrafter

        return DraftModelDrafter(draft, comparison, settings)
    if not comparison.methods["cross_vocabulary"]:
        from anydraft.drafters.cross_vocabulary import CrossVocabularyDrafter

        return CrossVocabularyDrafter(draft, target_vocabulary, comparison, settings=settings)
    raise VocabularyError(
        f"{draft.name} cannot draft for {target_vocabulary.name or 'this target'}: "
        f"{comparison.methods['draft_model']}; {comparison.methods['cross_vocabulary']}. "
        "Lookup drafts work with every vocabulary: use draft='lookup'"
    )
