"""The tree of errors. Each says what was wrong and what to do, and carries the CLI's exit code.

AnydraftError                 1
├── RequestError              2   a parameter or prompt that cannot be served
│   └── PromptTooLongError    2   the prompt (and one new token) does not fit the target's context
├── ModelError                3   a model that cannot be found, read or run
│   ├── ModelNotFoundError    3
│   ├── ModelFileError        3   broken, truncated or unreadable files
│   └── UnsupportedModelError 3   a model of a kind that anydraft does not run
├── VocabularyError           3   no tokenizer, or one that anydraft cannot read exactly
├── CacheError                4   the cache folder, the disk or a download failed
├── StateError                5   a KV state was asked for what it cannot do
│   └── RollbackError         5
└── NumericsError             5   NaN logits, or no id left that may be emitted
"""

from __future__ import annotations


class AnydraftError(Exception):
    """Base of every error that anydraft raises on purpose."""

    exit_code = 1


class RequestError(AnydraftError):
    """A request that cannot be served as asked."""

    exit_code = 2


class PromptTooLongError(RequestError):
    """The prompt leaves no room for a new token in the target's context."""


class ModelError(AnydraftError):
    """A model that cannot be found, read or run."""

    exit_code = 3


class ModelNotFoundError(ModelError):
    """No folder, file, pulled name or hub id of this name."""


class ModelFileError(ModelError):
    """A model file is broken, truncated or unreadable."""


class UnsupportedModelError(ModelError):
    """The model is of a kind that anydraft does not run."""


class VocabularyError(AnydraftError):
    """No tokenizer, or one whose token bytes cannot be known exactly."""

    exit_code = 3


class CacheError(AnydraftError):
    """The cache folder cannot be used, the disk is full, or a download failed."""

    exit_code = 4


class StateError(AnydraftError):
    """A model state was asked for something that it cannot do."""

    exit_code = 5


class RollbackError(StateError):
    """A state cannot return to the length asked for."""


class NumericsError(AnydraftError):
    """Logits that are not numbers, or a law that leaves no id to emit."""

    exit_code = 5
