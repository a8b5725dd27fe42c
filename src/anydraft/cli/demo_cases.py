"""The cases of `anydraft demo`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt, its draft, and how it is sampled.

    Attributes:
        lookup: draft with lookup instead of the draft model.
        runtime: run the draft model there, beside a target in another runtime.
    """

    title: str
    prompt: str
    max_tokens: int
    num_draft_tokens: int
    lookup: bool = False
    runtime: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


TABLE = """\
| river       | length (km) | continent     | flows into         |
|-------------|-------------|---------------|--------------------|
| Nile        | 6650        | Africa        | Mediterranean Sea  |
| Amazon      | 6400        | South America | Atlantic Ocean     |
| Yangtze     | 6300        | Asia          | East China Sea     |
| Mississippi | 6275        | North America | Gulf of Mexico     |
| Yenisei     | 5539        | Asia          | Kara Sea           |
"""

COPY_PROMPT = f"""\
Here is the table of the longest rivers:

{TABLE}
And here is the same table once more, copied line by line:

| river       | length (km) | continent     | flows into         |
"""

CASES = (
    Case("another vendor's draft", "The steam engine", max_tokens=64, num_draft_tokens=1),
    Case(
        "lookup, a text that repeats",
        COPY_PROMPT,
        max_tokens=128,
        num_draft_tokens=16,
        lookup=True,
    ),
    Case(
        "sampled, T = 0.7, seed 7",
        "Once upon a time, in a small town by the sea, there lived",
        max_tokens=64,
        num_draft_tokens=1,
        fields={"temperature": 0.7, "top_p": 0.9, "seed": 7},
    ),
)

ACROSS = Case(
    "the draft in llama.cpp",
    "The steam engine",
    max_tokens=64,
    num_draft_tokens=1,
    runtime="llama_cpp",
)
"""Where the extra is installed and the draft has a GGUF file."""
