"""anydraft on llama.cpp against llama-cpp-python's own generation and the xllamacpp server.

Same GGUF files, threads, prompts (token ids) and numbers of new tokens; greedy; no end token stops
anybody. One interleaved run: every prompt goes through all contenders in turn, and a figure is the
median over prompts of the ratio of tokens/s after the prompt's pass. The server is timed by its own
clock, so that neither HTTP nor Python counts against it; it runs in a process of its own.

    pip install 'anydraft[llama-cpp,peers]'
    python benchmarks/vs_llama_cpp.py [--quick] [--json] [--threads N]

Figures of the JSON object (ratios of tokens/s, above 1 is faster):

    plain                {model: our plain decoding / the faster of the two peers}
    plain_vs             the same by peer
    lookup_vs_own_plain  lookup / our plain decoding, on prompts that make the target repeat a text
    lookup_vs_peer       the same / the server's n-gram speculation at its best
    eight_at_once        eight sequences in one batch / one after another: total tokens/s of whole
                         calls, prompts included

How many tokens lookup drafts, and which of the server's n-gram methods is meant, is found on a
prompt of its own (`prompts/calibration.jsonl`); the short form takes what the long one found on an
Intel Xeon with AMX. Where our backend leaves the weights as they are stored, because the library's
AMX kernels fault on some virtual machines, llama-cpp-python is told to do the same.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import common
from interleaved import Block, Contender, Run, best_of, own_run, run_block

LLAMA_CPP_PYTHON, SERVER = "llama-cpp-python", "xllamacpp"
INSTALL_SERVER = "pip install 'anydraft[peers]'"
CONTEXT = 2048
EIGHT = 8
NGRAMS: tuple[tuple[str, dict[str, int]], ...] = (
    ("NGRAM_SIMPLE", {}),
    ("NGRAM_SIMPLE", {"size_n": 4, "size_m": 8}),
    ("NGRAM_SIMPLE", {"size_n": 4, "size_m": 16}),
    ("NGRAM_MAP_K", {"size_n": 4, "size_m": 16}),
    ("NGRAM_MOD", {}),
    ("NGRAM_CACHE", {}),
)
"""The server's n-gram speculation: types by its names, and sizes other than its defaults."""


@dataclass(frozen=True)
class Plan:
    """What one run measures."""

    general: int | None
    general_tokens: int
    copies: int | None
    copy_tokens: int
    copy_plain_tokens: int
    eight_tokens: int
    eight_times: int
    lookups: tuple[int, ...]
    ngrams: tuple[int, ...]
    """Indices into NGRAMS."""
    seconds: float | None
    """Begin no further prompt that would not end within this."""


QUICK = Plan(
    general=8,
    general_tokens=16,
    copies=2,
    copy_tokens=96,
    copy_plain_tokens=24,
    eight_tokens=16,
    eight_times=2,
    lookups=(31,),
    ngrams=(4,),
    seconds=44,
)
FULL = Plan(
    general=None,
    general_tokens=64,
    copies=None,
    copy_tokens=128,
    copy_plain_tokens=128,
    eight_tokens=64,
    eight_times=5,
    lookups=(3, 7, 11, 15, 31),
    ngrams=tuple(range(len(NGRAMS))),
    seconds=None,
)


class Ours:
    """anydraft with one target, plain and with lookup."""

    def __init__(self, model: str, threads: int) -> None:
        import anydraft
        from anydraft.backends.llama_loading import safe_to_repack

        # Nothing is kept between calls: the peers begin every prompt anew, too.
        options = {"runtime": "llama_cpp", "threads": threads, "cache_prompt": False}
        self._lookup = anydraft.load(model, "lookup", **options)
        self._plain = self._lookup.plain()
        self.encode = self._plain.vocabulary.encode_prompt
        self.repacked = safe_to_repack()

    def plain(self, ids: list[int], count: int, _: int) -> Run:
        return own_run(self._plain, ids, count, 0)

    def lookup(self, ids: list[int], count: int, num_draft_tokens: int) -> Run:
        return own_run(self._lookup, ids, count, num_draft_tokens)

    def at_once(self, prompts: list[list[int]], count: int) -> float:
        """How many times as fast a batch is as its prompts one after another."""
        fields = {"max_tokens": count, "ignore_eos": True}
        started = time.perf_counter()
        self._plain.generate(prompts, **fields)
        together = time.perf_counter() - started
        for ids in prompts:
            self._plain.generate(ids, **fields)
        return (time.perf_counter() - started - together) / together

    def close(self) -> None:
        self._lookup.close()


class LlamaCppPython:
    """llama-cpp-python's own loop, `Llama.generate`."""

    def __init__(self, path: str, threads: int, repack: bool) -> None:
        import llama_cpp.llama_cpp as api
        from llama_cpp import Llama

        defaults = api.llama_model_default_params

        def params() -> Any:
            chosen = defaults()
            chosen.use_extra_bufts = repack
            return chosen

        api.llama_model_default_params = params
        try:
            self._llama = Llama(
                path,
                n_ctx=CONTEXT,
                n_threads=threads,
                n_threads_batch=threads,
                flash_attn=True,
                verbose=False,
            )
        finally:
            api.llama_model_default_params = defaults

    def plain(self, ids: list[int], count: int, _: int) -> Run:
        self._llama.reset()
        new: list[int] = []
        started = first = time.perf_counter()
        for token_id in self._llama.generate(ids, temp=0.0):
            if not new:
                first = time.perf_counter()
            new.append(token_id)
            if len(new) == count:
                break
        return Run(new, time.perf_counter() - started, 1, first - started)

    def close(self) -> None:
        self._llama.close()


class Server:
    """xllamacpp's server, one per model and n-gram method, all in one process of their own."""

    def __init__(self, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=serve, args=(there, threads), daemon=True)
        self._process.start()
        there.close()

    def _ask(self, *question: Any) -> Any:
        try:
            self._here.send(question)
            answer = self._here.recv()
        except (EOFError, OSError) as error:
            raise SystemExit("the xllamacpp process died") from error
        if isinstance(answer, str):
            raise SystemExit(f"xllamacpp: {answer}")
        return answer

    def contender(self, path: str) -> Contender:
        """Runs of a file; the number of draft tokens is one more than an index into NGRAMS."""

        def run(ids: list[int], count: int, ngram: int) -> Run:
            seconds, first, made = self._ask("run", path, ngram, ids, count)
            return Run([-1] * made, seconds, 1, first)

        return run

    def close(self) -> None:
        self._here.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.terminate()


def serve(pipe: Any, threads: int) -> None:
    """The process of `Server`: answers each ("run", path, ngram, ids, count) with the seconds of
    the call, those of the prompt's pass, and the number of new tokens."""
    servers: dict[tuple[str, int], Any] = {}
    while True:
        try:
            _, path, ngram, ids, count = pipe.recv()
        except EOFError:
            return
        try:
            if (path, ngram) not in servers:
                servers[path, ngram] = open_server(path, threads, ngram)
            pipe.send(complete(servers[path, ngram], ids, count))
        except Exception as error:  # said on the other side
            pipe.send(f"{type(error).__name__}: {error}")


def open_server(path: str, threads: int, ngram: int) -> Any:
    """A server with one slot; with the n-gram method NGRAMS[ngram - 1] if it is not 0."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.n_gpu_layers = CONTEXT, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_ram_mib, params.verbosity, params.fit_params = 0, -1, False
    if ngram:
        kind, sizes = NGRAMS[ngram - 1]
        params.swa_full = True  # what was drafted in vain can then be taken back
        known = xllamacpp.common_speculative_type
        params.speculative.types = [getattr(known, f"COMMON_SPECULATIVE_TYPE_{kind}")]
        for name, value in sizes.items():
            setattr(getattr(params.speculative, kind.lower()), name, value)
    return xllamacpp.Server(params)


def complete(server: Any, ids: list[int], count: int) -> tuple[float, float, int]:
    """See `serve`; by the server's clock, whose generation begins after the first token."""
    request = {"prompt": ids, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    answer = server.handle_completions({**request, "cache_prompt": False})
    if "timings" not in answer:
        raise RuntimeError(str(answer)[:300])
    times = answer["timings"]
    first = times["prompt_ms"] / 1e3
    return first + times["predicted_ms"] / 1e3, first, int(times["predicted_n"])


def compare(args: argparse.Namespace, plan: Plan, started: float) -> dict[str, Any]:
    """The whole run."""
    from anydraft.store_gguf import resolve_gguf

    models = [common.TARGET, common.DRAFT]
    paths = {name: str(resolve_gguf(name)) for name in models}
    server = Server(args.threads) if find_spec("xllamacpp") else None
    if server is None:
        print(f"xllamacpp is not installed, so it is left out: {INSTALL_SERVER}", file=sys.stderr)
    result: dict[str, Any] = {"plain": {}, "plain_vs": {}, "tokens_per_second": {}, "prompts": {}}
    for number, name in enumerate(models):
        ours = Ours(name, args.threads)
        result["repacked"] = ours.repacked
        ask = server.contender(paths[name]) if server else None
        if name == common.TARGET:
            limits = [
                None if plan.seconds is None else started + plan.seconds * f for f in (0.4, 0.6)
            ]
            result |= lookups(ours, ask, plan, limits[0])
            result["eight_at_once"] = eight(ours, plan, limits[1])
        left = None
        if plan.seconds is not None:  # the models share what time is left
            now = time.perf_counter()
            left = now + (started + plan.seconds - now) / (len(models) - number)
        block = plain(
            ours, LlamaCppPython(paths[name], args.threads, ours.repacked), ask, plan, left
        )
        peers = [peer for peer in block.runs if peer != "anydraft"]
        against = {peer: block.ratio("anydraft", peer) for peer in peers}
        result["plain"][name], result["plain_vs"][name] = min(against.values()), against
        result["tokens_per_second"][name] = block.speeds()
        result["prompts"][name] = block.num_prompts
        ours.close()
    if server:
        server.close()
    return result


def plain(
    ours: Ours, peer: LlamaCppPython, server: Contender | None, plan: Plan, deadline: float | None
) -> Block:
    """Plain decoding of one model by all."""
    contenders: dict[str, Contender] = {"anydraft": ours.plain, LLAMA_CPP_PYTHON: peer.plain}
    if server:
        contenders[SERVER] = server
    for run in contenders.values():  # first calls load, and build what later ones reuse
        run(ours.encode("A first call"), 4, 0)
    chosen = common.spread(common.prompts("general"), plan.general)
    block = run_block(
        {name: (run, 0, plan.general_tokens) for name, run in contenders.items()},
        [ours.encode(p.text) for p in chosen],
        deadline,
    )
    peer.close()
    return block


def eight(ours: Ours, plan: Plan, deadline: float | None) -> float:
    """The median over several turns; one at least, however late it is."""
    prompts = [ours.encode(p.text) for p in common.prompts("general")][:EIGHT]
    ours.at_once(prompts, 2)
    ratios: list[float] = []
    while len(ratios) < plan.eight_times:
        ratios.append(ours.at_once(prompts, plan.eight_tokens))
        if deadline is not None and time.perf_counter() > deadline:
            break
    return common.median(ratios)


def lookups(
    ours: Ours, server: Contender | None, plan: Plan, deadline: float | None
) -> dict[str, Any]:
    """Speculation without a draft model, on text that is copied."""
    calibration = [ours.encode(p.text) for p in common.prompts("calibration", ["copy"])]
    ours.lookup(ours.encode("A first call, a first call, a first"), 4, 2)
    best, speeds = best_of(ours.lookup, plan.lookups, calibration, plan.copy_tokens)
    contenders = {
        "lookup": (ours.lookup, best, plan.copy_tokens),
        "plain": (ours.plain, 0, plan.copy_plain_tokens),
    }
    found: dict[str, Any] = {"lookup_num_draft_tokens": best, "lookup_calibration": speeds}
    if server:
        for index in plan.ngrams:
            server(calibration[0], 4, index + 1)
        numbers = [index + 1 for index in plan.ngrams]
        peer_best, peer_speeds = best_of(server, numbers, calibration, plan.copy_tokens)
        contenders[SERVER] = (server, peer_best, plan.copy_tokens)
        found["server_ngrams"] = NGRAMS[peer_best - 1]
        found["server_calibration"] = {str(NGRAMS[n - 1]): s for n, s in peer_speeds.items()}
    chosen = common.spread(common.prompts("copy"), plan.copies)
    block = run_block(contenders, [ours.encode(p.text) for p in chosen], deadline)
    return {
        "lookup_vs_own_plain": block.ratio("lookup", "plain"),
        "lookup_vs_peer": block.ratio("lookup", SERVER) if server else None,
        "copy_tokens_per_second": block.speeds(),
        "lookup_identity": block.identity("plain")["lookup"],
        **found,
    }


def show(result: dict[str, Any], threads: int) -> None:
    """The table for people."""
    import llama_cpp

    print(f"{common.machine_line()}; llama-cpp-python {llama_cpp.__version__}, {threads} threads")
    if not result["repacked"]:
        print("weights as stored, in anydraft and llama-cpp-python: the library was built for AMX")
    rows = [
        [f"plain, {model}: anydraft / {peer}", f"{ratio:.2f}"]
        for model, ratios in result["plain_vs"].items()
        for peer, ratio in ratios.items()
    ]
    rows.append(
        ["lookup, copied text / our plain decoding", f"{result['lookup_vs_own_plain']:.2f}"]
    )
    if result["lookup_vs_peer"] is not None:
        words = f"lookup, copied text / {SERVER} with {result['server_ngrams']}"
        rows.append([words, f"{result['lookup_vs_peer']:.2f}"])
    rows.append(["eight sequences at once / one after another", f"{result['eight_at_once']:.2f}"])
    print(common.table(["ratio of tokens/s", ""], rows))
    for name, speeds in {
        **result["tokens_per_second"],
        "copy": result["copy_tokens_per_second"],
    }.items():
        said = ", ".join(f"{who} {speed:.1f}" for who, speed in speeds.items())
        print(f"tokens/s, {name}: {said}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer prompts; under 50 s")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--threads", type=int, help="of everybody; default: one per core")
    args = parser.parse_args()
    started = time.perf_counter()
    if find_spec("llama_cpp") is None:
        raise SystemExit("this needs the second runtime: pip install 'anydraft[llama-cpp]'")
    from anydraft.backends.llama_loading import default_threads

    args.threads = args.threads or default_threads()
    result = compare(args, QUICK if args.quick else FULL, started)
    result["threads"], result["machine"] = args.threads, common.machine()
    result["seconds"] = round(time.perf_counter() - started, 1)
    show(result, args.threads)
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
