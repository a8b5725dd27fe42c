"""Names of the ways to draft and verify, and what each of them guarantees.

A method is "match", or a proposal law and a verification: "tli+rejection", "ttp+block". All are
lossless. `match` is seed-identical: the same seed gives the same tokens as plain decoding. The
others are distribution-identical: tokens have exactly the law that plain decoding gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anydraft.errors import RequestError

LAWS = ("same", "union", "tli", "ttp", "slrs")
VERIFICATIONS = ("match", "rejection", "block")
GUARANTEES = ("seed", "distribution")
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Method:
    """One way to draft and verify.

    Attributes:
        law: what the draft's probabilities become over target ids; None for match, which needs
            none.
        verification: "match", "rejection" or "block".
    """

    law: str | None = None
    verification: str = "match"

    def __str__(self) -> str:
        return self.verification if self.law is None else f"{self.law}+{self.verification}"

    @property
    def guarantee(self) -> str:
        """ "seed" or "distribution"."""
        return "seed" if self.law is None else "distribution"

    @property
    def label(self) -> str:
        """The guarantee as it is shown."""
        return f"{self.guarantee}-identical"


MATCH = Method()


def parse_method(name: str) -> Method:
    """The method of a name.

    Raises:
        RequestError: no such method, or a combination that is not exact; in words.
    """
    law, _, verification = name.rpartition("+")
    if name == "match":
        return MATCH
    if law in LAWS and verification == "match":
        raise RequestError(
            f"{name}: match lets the target draw every token itself and needs no law; use 'match'"
        )
    if name in ("rejection", "block"):
        raise RequestError(
            f"{name} needs the law that drafts are drawn from, e.g. 'tli+{name}'; "
            f"laws: {', '.join(LAWS)}"
        )
    if law not in LAWS or verification not in VERIFICATIONS:
        raise RequestError(
            f"no method is called {name!r}; there are 'auto', 'match', and one of "
            f"{', '.join(LAWS)} with +rejection or +block, e.g. 'tli+rejection'"
        )
    return Method(law, verification)


def check_guarantee(guarantee: str | None, method: Method | None = None) -> None:
    """Refuse a guarantee that does not exist or that the method does not give.

    Raises:
        RequestError: in words.
    """
    if guarantee is not None and guarantee not in GUARANTEES:
        raise RequestError(
            f"guarantee must be 'seed' (the tokens of plain decoding with that seed) or "
            f"'distribution' (tokens of the same law), not {guarantee!r}"
        )
    if guarantee == "seed" and method is not None and method.guarantee != "seed":
        raise RequestError(
            f"{method} is {method.label}: the same seed does not give the tokens of plain "
            "decoding. Use guarantee 'distribution', or the method 'match'"
        )


def offered(laws: Mapping[str, str]) -> list[Method]:
    """All methods of a drafter, given its laws (name -> "" or why not)."""
    usable = [law for law in LAWS if laws.get(law) == ""]
    return [MATCH, *(Method(law, v) for law in usable for v in VERIFICATIONS[1:])]


def check_offered(method: Method, laws: Mapping[str, str], drafter: str | None) -> None:
    """Refuse a method that a drafter cannot serve.

    Args:
        laws: the drafter's: name -> "" or why not.
        drafter: its name; None if there is no draft.

    Raises:
        RequestError: in words.
    """
    if method.law is None:
        return
    if drafter is None:
        raise RequestError(f"the method {method} needs a draft model")
    reason = laws.get(method.law)
    if reason is None:
        raise RequestError(f"{drafter} drafts have no probabilities: {drafter} goes with 'match'")
    if reason:
        raise RequestError(f"the method {method} does not apply to {drafter}: {reason}")
