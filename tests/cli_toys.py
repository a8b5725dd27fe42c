"""Toy models behind the command line's model names, and running commands in this process."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from anydraft import backends
from anydraft.backends.toy import ToyModel, random_logits
from anydraft.cli.main import main
from anydraft.errors import ModelNotFoundError
from anydraft.vocabulary import Vocabulary

WORDS = [b" steam", b" engine", b" runs", b" on", b" water", b"\n", b" \xc3", b"\xa9", b".", b"a"]
LETTERS = [bytes([code]) for code in range(32, 127)]
END, TURN, START = len(WORDS) + len(LETTERS), len(WORDS) + len(LETTERS) + 1, 0


def vocabulary(*, bos: bool = True, eos: bool = True, chat: bool = False) -> Vocabulary:
    """Words and letters; the last ids are controls: end, turn, start."""
    tokens: list[bytes | None] = [*WORDS, *LETTERS, None, None, None]
    made = Vocabulary.from_tokens(
        tokens,
        name="toy",
        eos_ids=[END] if eos else [],
        bos_id=END + 2 if bos else None,
        controls={END: "<end>", TURN: "<turn>"},
    )
    if chat:
        made.chat_template = "toy"
        made.render_chat = lambda messages: (
            "".join(f"<turn>{m['role']} {m['content']}<end>" for m in messages) + "<turn>assistant "
        )
    return made


def toy(
    seed: int = 1,
    max_length: int | None = 400,
    *,
    before: Callable[[int], None] = lambda length: None,
    **kinds: bool,
) -> ToyModel:
    """A model that says words. `before(length)` runs before each row of logits."""
    made = vocabulary(**kinds)
    scores = random_logits(len(WORDS), seed, scale=2.0, context=2)

    def logits(tokens: tuple[int, ...]) -> Sequence[float]:
        before(len(tokens))
        # A full stop ends a long answer; letters are never said.
        end = 9.0 if tokens[-1] == WORDS.index(b".") and len(tokens) > 40 else -9.0
        return [*scores(tokens), *[-9.0] * len(LETTERS), end, -99.0, -99.0]

    return ToyModel(made, logits, max_length, name=f"toy{seed}")


class _Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        result: dict[str, Any] = json.loads(self.out)
        return result


class Tool:
    """Runs `anydraft ...` with toy models under the names that a test gives them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.models: dict[str, Any] = {"toy": toy(), "base": toy(2), "instruct": toy(3, chat=True)}
        self.options: dict[str, dict[str, Any]] = {}
        self.loads = 0
        self.terminal = False  # whether standard input claims to be one
        self._monkeypatch, self._capsys = monkeypatch, capsys
        monkeypatch.setattr(backends, "load_model", self._load)

    def _load(self, spec: Any, **options: Any) -> ToyModel:
        self.loads += 1
        self.options[str(spec)] = options
        if spec not in self.models:
            raise ModelNotFoundError(f"no model {spec!r}")
        found: ToyModel = self.models[spec]
        return found

    def __call__(self, *arguments: str, stdin: str | bytes = "") -> Ran:
        data = stdin if isinstance(stdin, bytes) else stdin.encode()
        source = _Terminal(data) if self.terminal else io.BytesIO(data)
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(source))
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = self._capsys.readouterr()
        return Ran(int(ended.value.code or 0), out, err)
