"""Plants known ways to break losslessness, one by one, and shows the test that catches each.

    python tests/mutants.py            all of them
    python tests/mutants.py NAME ...   some of them

Exit code 1 if a mutant survives. Each works on a copy of the package; nothing here is touched.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: str


KEPT = "        return target if kept == num_drafted else residual(target, draft_probs[kept])"
RATIO = "    return min(joint * target[token_id] / draft[token_id], 0 * target[token_id] + 1)"
START = "    accept: list[Any] = []\n    for i, (token_id, draft) in enumerate(zip("
LAWS = "test_verify.py test_laws.py test_laws_loop.py"

MUTANTS = [
    Mutant(
        "no proposal drawn from the target's law instead of the residual",
        "verify.py",
        KEPT,
        "        if kept == num_drafted or draft_ids[kept] is None:\n"
        "            return target\n"
        "        return residual(target, draft_probs[kept])",
        "test_verify.py",
    ),
    Mutant(
        "residual corrected on the sampled path only",
        "verify.py",
        KEPT,
        "        if kept == num_drafted:\n"
        "            return target\n"
        "        only = 0 * target\n"
        "        if draft_ids[kept] is not None:\n"
        "            only[draft_ids[kept]] = draft_probs[kept][draft_ids[kept]]\n"
        "        return residual(target, only)",
        "test_verify.py",
    ),
    Mutant(
        "target masked to what the draft can say",
        "verify.py",
        START,
        "    seen = [t * (d > 0) for t, d in zip(target_probs, draft_probs)]\n"
        "    target_probs = [*(s / (s.sum() or 1) for s, t in zip(seen, target_probs)),\n"
        "                    target_probs[-1]]\n" + START,
        "test_verify.py",
    ),
    Mutant(
        "a drawn token dropped because it looks unlikely",
        "verify.py",
        START,
        "    for i, (token_id, draft) in enumerate(zip(draft_ids, draft_probs)):\n"
        "        if token_id is not None and 3 * draft[token_id] < 1:\n"
        "            draft_ids, draft_probs = draft_ids[:i], draft_probs[:i]\n"
        "            target_probs = target_probs[: i + 1]\n"
        "            break\n" + START,
        "test_verify.py",
    ),
    Mutant(
        "the coin that rejects also picks the next token",
        "decode.py",
        '"bonus" if kept == len(proposals) else "residual", start, kept',
        '"bonus" if kept == len(proposals) else "accept", start, kept',
        "test_laws_loop.py",
    ),
    Mutant(
        "acceptance ratio inverted",
        "verify.py",
        RATIO,
        "    ratio = draft[token_id] / (joint * target[token_id] or 1)\n"
        "    return min(ratio, 0 * target[token_id] + 1)",
        "test_verify.py",
    ),
    Mutant(
        "bonus token from the draft",
        "verify.py",
        KEPT,
        "        if kept == num_drafted:\n"
        "            return draft_probs[-1]\n"
        "        return residual(target, draft_probs[kept])",
        "test_verify.py",
    ),
    Mutant(
        "block verification stops at the first failed coin",
        "verify.py",
        "law), longest=True)",
        "law), longest=False)",
        "test_verify.py",
    ),
    Mutant(
        "match accepts one token after a disagreement",
        "verify.py",
        "        emitted.append(draw(row))\n        if emitted[-1] != proposed:",
        "        emitted.append(draw(row))\n"
        "        if emitted[-2:-1] != list(draft_ids[row - 1 : row]):",
        "test_verify.py test_decode.py",
    ),
    Mutant(
        "match emits the draft where it should emit the target's draw",
        "verify.py",
        "        if emitted[-1] != proposed:\n            break",
        "        if emitted[-1] != proposed:\n"
        "            emitted[-1] = emitted[-1] if proposed is None else proposed\n"
        "            break",
        "test_verify.py",
    ),
    Mutant(
        "KV one token too long after a round",
        "decode.py",
        "sequence.state.rollback(len(sequence.tokens) - 1)",
        "sequence.state.rollback(min(len(sequence.tokens), sequence.state.length))",
        "test_decode.py",
    ),
    Mutant(
        "KV not rolled back",
        "decode.py",
        "    sequence.state.rollback(len(sequence.tokens) - 1)",
        "    pass",
        "test_decode.py",
    ),
    Mutant(
        "every row drawn under the committed prefix",
        "decode.py",
        "            prefix.append(draft_ids[row - 1])",
        "            pass",
        "test_decode.py",
    ),
    Mutant(
        "one noise for all positions of a round",
        "decode.py",
        "            position = advance(position, token_bytes[draft_ids[row - 1]])",
        "            pass",
        "test_decode.py",
    ),
    Mutant(
        "ends looked for in the last token of a round only",
        "decode.py",
        "        sequence.finish_reason = sequence.stop(token_id, from_draft, row)",
        "        reason = sequence.stop(token_id, from_draft, row)\n"
        "        sequence.finish_reason = None if from_draft else reason",
        "test_decode.py test_engine.py",
    ),
    Mutant(
        "limit looked at after a round only",
        "decode.py",
        "        if sequence.finish_reason is None and len(sequence.tokens) >= sequence.limit:",
        "        if index + 1 == len(emitted) and len(sequence.tokens) > sequence.limit:",
        "test_decode.py",
    ),
    Mutant(
        "zero-byte tokens share a position",
        "noise.py",
        '    return position + max(1, len(token_bytes or b""))',
        '    return position + len(token_bytes or b"")',
        "test_noise.py",
    ),
    Mutant(
        "noise that forgets the position",
        "noise.py",
        'blake2b(position.to_bytes(8, "little"), key',
        'blake2b((0).to_bytes(8, "little"), key',
        "test_noise.py",
    ),
    Mutant(
        "ids with equal bytes share noise within a vocabulary",
        "noise.py",
        "        elif data is not None and canonical.get(data) == token_id:",
        "        elif data is not None:",
        "test_noise.py",
    ),
    Mutant(
        "the tail of the law never drawn",
        "noise.py",
        "_rest(scores, head, noise, position, best) if len(head) < len(scores) else -1",
        "-1",
        "test_noise.py",
    ),
    Mutant(
        "the tail's mass forgotten",
        "noise.py",
        "    if mass == 0.0 or gumbel + math.log(mass) <= best:",
        "    if mass == 0.0 or gumbel <= best:",
        "test_noise.py",
    ),
    Mutant(
        "frequency penalties that count the prompt",
        "sampling.py",
        "        output = tokens[self.prompt_length :]",
        "        output = tokens",
        "test_sampling.py",
    ),
    Mutant(
        "top-p one id short",
        "sampling.py",
        "            return float(ordered[int(np.searchsorted(mass, top_p * total))])",
        "            return float(ordered[max(0, int(np.searchsorted(mass, top_p * total)) - 1)])",
        "test_sampling.py",
    ),
    Mutant(
        "padding ids possible",
        "sampling.py",
        "[*([] if params.processors else masked), *self._padding]",
        "[] if params.processors else masked",
        "test_sampling.py",
    ),
    Mutant(
        "NaN logits let through",
        "sampling.py",
        "        if not math.isfinite(top):",
        "        if top == -math.inf:",
        "test_sampling.py test_decode.py",
    ),
    # ---- proposal laws
    Mutant(
        "block: the joint ratio left out of what a rejection leaves",
        "verify.py",
        "residual(target_probs[kept], draft_probs[kept], joints[kept])",
        "residual(target_probs[kept], draft_probs[kept])",
        "test_verify.py",
    ),
    Mutant(
        "block: the joint ratio grows beyond one",
        "verify.py",
        RATIO,
        "    return joint * target[token_id] / draft[token_id]",
        "test_verify.py",
    ),
    Mutant(
        "draft noise drawn again by the next round",
        "drafters/proposal.py",
        "        self._round.begin(len(tokens))",
        "        self._round.begin(0)",
        "test_laws_loop.py",
    ),
    Mutant(
        "draft and coins share their noise",
        "drafters/proposal.py",
        'pick(probs, "draft", self._start, self._step)',
        'pick(probs, "accept", self._start, self._step)',
        "test_laws_loop.py",
    ),
    Mutant(
        "coins that forget their tag",
        "noise.py",
        'f"{tag}/{start}/{step}"',
        'f"{start}/{step}"',
        "test_laws.py",
    ),
    Mutant(
        "no proposal is no draft",
        "drafters/proposal.py",
        "        return Draft(self.token_ids[:count], self.laws[:count])",
        "        return Draft(self.token_ids[:count], self.laws[: len(self.token_ids)][:count])",
        "test_laws_loop.py",
    ),
    Mutant(
        "a proposal beyond the target's vocabulary dropped with its law",
        "decode.py",
        "    return Draft(draft_ids[:bad], (laws or [])[: min(bad + 1, limit)])",
        "    return Draft(draft_ids[:bad], (laws or [])[:bad])",
        "test_laws_loop.py",
    ),
    Mutant(
        "the last proposal dropped when the draft is not sure of it",
        "drafters/proposal.py",
        "        self.laws += laws\n",
        "        self.laws += laws\n"
        "        if ids and 4 * laws[-1][ids[-1]] < 1:\n"
        "            self.token_ids, self.laws = self.token_ids[:-1], self.laws[:-1]\n"
        "            self.over = True\n",
        "test_laws_loop.py",
    ),
    Mutant(
        "drawn tokens dropped with the pass that failed",
        "drafters/steps.py",
        "            if not any(session.has_drawn for session in active):\n                raise",
        "            raise",
        "test_laws_loop.py",
    ),
    Mutant(
        "the law renormalised over what can be said, though silence was drawn too",
        "drafters/proposal_laws.py",
        "        return DraftLaw(self.token_ids, sums[:-1])",
        "        return DraftLaw(self.token_ids, sums[:-1] / (sums[:-1].sum() or 1))",
        "test_laws_loop.py",
    ),
    Mutant(
        "a later piece's law not conditioned on the ones before",
        "drafters/proposal_laws.py",
        "scatter.law(going_on / going_on.sum())",
        "scatter.law(going_on)",
        "test_laws_loop.py",
    ),
    Mutant(
        "a later piece's law over all tokens, not those that go on alike",
        "drafters/proposal_laws.py",
        "self._groups.setdefault(ids[:length], []).append(outcome)",
        "self._groups.setdefault(ids[:length], []).append(outcome)\n"
        "        for key in self._groups:\n"
        "            self._groups[key] = [\n"
        "                o for o, other in enumerate(self.pieces) if len(other) > len(key)\n"
        "            ]",
        "test_laws_loop.py",
    ),
    Mutant(
        "doubles overwrite each other's probability",
        "drafters/proposal_laws.py",
        "            np.add.at(sums, self._slots, probs)",
        "            sums[self._slots] = probs",
        "test_laws_loop.py",
    ),
    Mutant(
        "doubles overwrite each other's probability, in floats",
        "drafters/proposal_laws.py",
        "            sums = np.bincount(self._slots, weights=probs, minlength=size)",
        "            sums = np.zeros(size)\n            sums[self._slots] = probs",
        "test_laws.py",
    ),
    Mutant(
        "the law of one piece for the whole token",
        "drafters/proposal_laws.py",
        "        for length in range(1, len(ids)):\n            members, scatter",
        "        ids = ids[:1]\n        for length in range(1, len(ids)):\n"
        "            members, scatter",
        "test_laws.py test_laws_loop.py",
    ),
    Mutant(
        "the target's rows under the committed prefix, with laws",
        "decode.py",
        "[*sequence.tokens, *draft_ids[:row]]",
        "sequence.tokens",
        "test_laws_loop.py",
    ),
    Mutant(
        "slrs: the state keeps the last sequence looked at",
        "drafters/proposal.py",
        "        self._rewind(len(self.ids))  # what was looked at is not what was drawn\n",
        "",
        "test_laws.py",
    ),
    Mutant(
        "a stop decided by what was drawn",
        "drafters/steps.py",
        "            self._take(logits)\n            return self._wants_more()",
        "            before = len(getattr(self, '_round').laws) if hasattr(self, '_round') else 0\n"
        "            self._take(logits)\n"
        "            if before and self._round.token_ids[-1:] == [0]:\n"
        "                del self._round.token_ids[before:], self._round.laws[before:]\n"
        "                return False\n"
        "            return self._wants_more()",
        "test_laws_loop.py",
    ),
    Mutant(
        "a pick that takes impossible ids",
        "noise.py",
        'np.searchsorted(sums, point, side="right"))',
        'np.searchsorted(sums, point, side="left")) + 1',
        "test_laws.py",
    ),
    Mutant(
        "the draft's law at another temperature than was drawn from",
        "drafters/proposal.py",
        "        ids, laws = self._table.proposals(probs, outcome)",
        "        flat = probs * probs / (probs * probs).sum()\n"
        "        ids, laws = self._table.proposals(flat, outcome)",
        "test_laws_loop.py",
    ),
    Mutant(
        "tokens left out of the law, but not of the draw",
        "drafters/proposal.py",
        "        self.token_ids += ids\n        self.laws += laws",
        "        if ids[:1] != (1,):\n"
        "            laws = [DraftLaw(w.token_ids, w.probs * (w.token_ids != 1)) for w in laws]\n"
        "        self.token_ids += ids\n        self.laws += laws",
        "test_laws_loop.py",
    ),
]


def changed(mutant: Mutant) -> str:
    """Its file with the mutant in it."""
    text = (ROOT / "src" / "anydraft" / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.file} no longer holds the line to change, once")
    return text.replace(mutant.old, mutant.new)


def plant(mutant: Mutant, folder: Path) -> None:
    """A copy of the package with the mutant in it."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "src" / "anydraft" / mutant.file).write_text(changed(mutant))


def killer(mutant: Mutant) -> str | None:
    """The first test that fails with the mutant planted; None if none does."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plant(mutant, folder)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-m", "not slow and not verify"]
        command += [str(ROOT / "tests" / test) for test in mutant.tests.split()]
        environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
        run = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
        )
    failed = [line for line in run.stdout.splitlines() if line.startswith("FAILED ")]
    # A check must have failed: a mutant that merely crashes would prove nothing.
    checked = re.search(r"^E +.*(assert|AssertionError|DID NOT RAISE)", run.stdout, re.MULTILINE)
    if run.returncode == 1 and failed and checked:
        return failed[0].removeprefix("FAILED ").split(" - ")[0].removeprefix("tests/")
    if run.returncode != 0:
        raise SystemExit(f"{mutant.name}: the tests did not run\n{run.stdout}{run.stderr}")
    return None


def main(names: list[str]) -> int:
    survivors = 0
    chosen = [m for m in MUTANTS if not names or any(name in m.name for name in names)]
    for mutant in chosen:
        test = killer(mutant)
        survivors += test is None
        print(f"{'SURVIVED' if test is None else 'killed  '}  {mutant.name}", flush=True)
        print(f"          by {test}" if test else "          no test noticed", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
