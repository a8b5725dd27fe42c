"""What several commands share: groups of options, and loading what they name."""

from __future__ import annotations

import inspect
import logging
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from anydraft.errors import RequestError

if TYPE_CHECKING:
    from anydraft.engine import Engine, GenerationRequest
    from anydraft.model import LanguageModel

Group = TypeVar("Group")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which models, and how they run."""

    target: Annotated[
        str,
        typer.Option(
            help="The model whose words come out: a name from `anydraft list`, a folder, "
            "a .gguf file or a hub id (of one GGUF file: organisation/name:Q4_K_M)."
        ),
    ]
    draft: Annotated[
        str | None,
        typer.Option(
            help="The model that drafts, from any vendor and with any tokenizer; or 'lookup', "
            "which needs no model and repeats what the text already holds; or 'self:q4_0', a copy "
            "of the target in that type, made once, for llama_cpp. None: plain decoding."
        ),
    ] = None
    runtime: Annotated[
        str | None,
        typer.Option(
            help="torch_hf or llama_cpp (default: llama_cpp for GGUF files, else torch_hf)."
        ),
    ] = None
    draft_runtime: Annotated[
        str | None, typer.Option(help="The same for the draft (it need not be the target's).")
    ] = None
    num_draft_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="auto|off|K",
            help="auto (default): draft as much as pays, from the draft or by lookup, round by "
            "round; K: at most K tokens in every round; off: plain decoding.",
        ),
    ] = None
    method: Annotated[
        str,
        typer.Option(
            help="How sampled answers are drafted and verified: auto, match, or a proposal law "
            "(same, union, tli, ttp, slrs) with +rejection or +block, e.g. tli+rejection."
        ),
    ] = "auto"
    guarantee: Annotated[
        str | None,
        typer.Option(
            help="What auto may use: seed (default; the tokens of plain decoding with that seed) "
            "or distribution (tokens of the same law, often faster)."
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, float16 or int4 (default: by device). Also the draft's, "
            "unless that is a GGUF file."
        ),
    ] = None
    draft_dtype: Annotated[str | None, typer.Option(help="The same for the draft alone.")] = None
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, mps … (default: the best there is).")
    ] = None
    draft_device: Annotated[str | None, typer.Option(help="The same for the draft alone.")] = None
    draft_temperature: Annotated[
        float | None, typer.Option(help="The draft's own temperature (default: the target's).")
    ] = None
    draft_min_confidence: Annotated[
        float, typer.Option(help="Draft no token where the draft's best has less probability.")
    ] = 0.0
    draft_max_entropy: Annotated[
        float | None, typer.Option(help="Draft no token where the draft's entropy is above (nats).")
    ] = None
    draft_vocabulary: Annotated[
        str | None,
        typer.Option(
            help="Draft only tokens that are the target's too (shared), or so many of the draft's "
            "most frequent ones (a number)."
        ),
    ] = None
    threads: Annotated[
        int | None, typer.Option(help="CPU threads (default: one per physical core).")
    ] = None
    draft_threads: Annotated[int | None, typer.Option(help="The same for the draft alone.")] = None
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="llama_cpp targets: only kernels that round alike at any width of a pass, so that "
            "a draft changes no token at all, near-ties included. Prompts take longer.",
        ),
    ] = False
    context_length: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and answer, below the target's limit.")
    ] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with a model.")
    ] = False
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="An option of the target's runtime by its own name, e.g. n_gpu_layers=20, "
            "flash_attn=off, type_k=q8_0; may be given repeatedly.",
        ),
    ] = None
    draft_options: Annotated[
        list[str] | None,
        typer.Option("--draft-set", metavar="NAME=VALUE", help="The same for the draft's runtime."),
    ] = None

    def draft_length(self) -> int | str | None:
        """num_draft_tokens as a request takes it."""
        try:
            return None if self.num_draft_tokens is None else int(self.num_draft_tokens)
        except ValueError:
            return self.num_draft_tokens


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How one answer is drawn, and where it ends. Named as in GenerationRequest."""

    max_tokens: Annotated[int, typer.Option(help="At most so many tokens.")] = 256
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    top_k: Annotated[int, typer.Option(help="Keep the k best tokens; 0: all.")] = 0
    top_p: Annotated[float, typer.Option(help="Keep the best tokens up to this probability.")] = 1.0
    min_p: Annotated[
        float, typer.Option(help="Keep tokens with this share of the best one's probability.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: what prompt and answer hold becomes less likely.")
    ] = 1.0
    frequency_penalty: Annotated[
        float, typer.Option(help="Subtracted per occurrence in the answer.")
    ] = 0.0
    presence_penalty: Annotated[
        float, typer.Option(help="Subtracted from what occurs in the answer.")
    ] = 0.0
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same answer, with or without draft.")
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be given repeatedly.")
    ] = None
    min_tokens: Annotated[int, typer.Option(help="End tokens are forbidden before so many.")] = 0
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="End tokens are forbidden always.")
    ] = False

    def request_fields(self) -> dict[str, Any]:
        """The fields of a GenerationRequest; a seed is drawn here if one is needed."""
        values = {f.name: getattr(self, f.name) for f in fields(SamplingOptions)}
        values["stop"] = tuple(self.stop or ())
        if self.seed is None and self.temperature != 0:
            values["seed"] = secrets.randbits(32)  # short enough to be typed again
        return values


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is shown, and how."""

    show_draft: Annotated[
        bool, typer.Option("--show-draft", help="Colour the tokens that the draft foresaw.")
    ] = False
    color: Annotated[
        str,
        typer.Option(
            metavar="WHEN", help="auto (on a terminal, unless NO_COLOR), always or never."
        ),
    ] = "auto"
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="The answer only: no statistics on stderr.")
    ] = False


def with_options(**groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take dataclasses of options: `@with_options(models=ModelOptions)`.

    The tool sees each field of the groups as an option; the function gets whole groups.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function).parameters
        hints = get_type_hints(function, include_extras=True)
        parameters: list[inspect.Parameter] = []
        for name, parameter in own.items():
            if name in groups:
                parameters += _parameters(groups[name])
            else:
                parameters.append(
                    parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY)
                )

        def command(**values: Any) -> None:
            built = {
                name: group(**{f.name: values.pop(f.name) for f in fields(group)})
                for name, group in groups.items()
            }
            function(**built, **values)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if f.default is MISSING else f.default,
            annotation=hints[f.name],
        )
        for f in fields(group)
    ]


def as_fields(request: GenerationRequest) -> dict[str, Any]:
    """A request as the keyword arguments of Engine.stream."""
    return {f.name: getattr(request, f.name) for f in fields(request)}


def load_engine(models: ModelOptions) -> Engine:
    """Load what the options name.

    Raises:
        AnydraftError: in words that say what to do.
    """
    target, draft = target_options(models), draft_options(models, models.draft)
    one_line_warnings()
    from anydraft.engine import load

    return load(
        models.target,
        models.draft,
        num_draft_tokens=models.draft_length(),
        draft_settings=draft_settings(models),
        method=models.method,
        guarantee=models.guarantee,
        draft_options=draft,
        **target,
    )


_PROBE_SECONDS = 2.0
_PROBE_WIDTHS = (1, 2, 3, 5, 9)
_PROBE_CONTEXT = 64


def know_costs(engine: Engine, *, sampled: bool, quiet: bool) -> None:
    """Measure a pair's costs where "auto" decides and nothing is known yet; they are kept.

    Without them the first try of a draft model, which must read the prompt, is a risk that one
    answer alone may never be worth.

    Args:
        sampled: what is to come; else what all logits cost is left out, and their layer unpacked.
        quiet: say nothing.
    """
    from anydraft.cli import render
    from anydraft.measure.probe import probe
    from anydraft.policy import AUTO
    from anydraft.profile import load_profile, profile_path

    target, draft = engine.target, engine.drafter
    alone = draft is None or draft.name == "lookup"  # costs no passes, so trying it is no risk
    if alone or engine.num_draft_tokens != AUTO or profile_path(target, draft) is None:
        return
    if load_profile(target, draft) is not None:
        return
    if not quiet:
        render.note("measuring what passes cost, once for these models")
    probe(
        engine,
        seconds=_PROBE_SECONDS,
        widths=_PROBE_WIDTHS,
        contexts=(_PROBE_CONTEXT,),
        turns=1,
        sampled=sampled,
    )


def target_options(models: Any) -> dict[str, Any]:
    """The options of the target's backend.

    Args:
        models: ModelOptions, or another group with the same fields.

    Raises:
        RequestError: a number out of range, or an option that the runtime does not have.
    """
    for name in ("threads", "draft_threads", "context_length"):
        value = getattr(models, name, None)
        if value is not None and value < 1:
            raise RequestError(f"{name} must be at least 1, not {value}")
    own = _named(getattr(models, "options", None), "--set")
    runtime = getattr(models, "runtime", None)
    if getattr(models, "exact", False):
        from anydraft.backends import infer_runtime

        if infer_runtime(models.target, runtime) != "llama_cpp":
            raise RequestError(
                "--exact is for targets in llama_cpp; torch_hf's kernels round alike already where "
                "they can"
            )
        own["exact"] = True
    context = getattr(models, "context_length", None)
    return _given(**_both_options(models), runtime=runtime, context_length=context) | own


def draft_options(models: Any, draft: str | None) -> dict[str, Any]:
    """The options of the draft's backend; `draft` is its name."""
    own = _named(getattr(models, "draft_options", None), "--draft-set")
    if draft is None or draft == "lookup":
        return own
    from anydraft.backends import infer_runtime

    both, runtime = _both_options(models), getattr(models, "draft_runtime", None)
    if infer_runtime(draft, runtime) == "llama_cpp":
        both["dtype"] = None  # the target's; a GGUF file has its own
    both |= _given(
        dtype=models.draft_dtype,
        device=models.draft_device,
        threads=getattr(models, "draft_threads", None),
        runtime=runtime,
    )
    return _given(**both) | own


def add_draft(target: LanguageModel, models: ModelOptions, draft: str) -> Engine:
    """A loaded target with one more draft, which the options say how to run."""
    from anydraft.engine import load

    return load(
        target, draft, draft_options=draft_options(models, draft), guarantee=models.guarantee
    )


def _both_options(models: Any) -> dict[str, Any]:
    return {
        "dtype": models.dtype,
        "device": models.device,
        "threads": models.threads,
        "trust_remote_code": models.trust_remote_code or None,
    }


def draft_settings(models: ModelOptions) -> dict[str, Any]:
    """The fields of DraftSettings."""
    size = models.draft_vocabulary
    return {
        "temperature": models.draft_temperature,
        "min_confidence": models.draft_min_confidence,
        "max_entropy": models.draft_max_entropy,
        "vocabulary": int(size) if size is not None and size.isdecimal() else size,
    }


def _named(given: list[str] | None, flag: str) -> dict[str, Any]:
    """NAME=VALUE as keyword arguments: whole numbers, true and false, else text."""
    values: dict[str, Any] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name.isidentifier() or not value:
            raise RequestError(f"{flag} takes NAME=VALUE, not {text!r}")
        known = {"true": True, "false": False}
        number = int(value) if value.removeprefix("-").isdecimal() else value
        values[name] = known.get(value.lower(), number)
    return values


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


class _OneLine(logging.Formatter):
    """A warning in one line: the traceback is for those who set up logging themselves."""

    def format(self, record: logging.LogRecord) -> str:
        return "anydraft: " + " ".join(record.getMessage().split())


def one_line_warnings() -> None:
    """Show anydraft's own warnings on stderr, without tracebacks."""
    logger = logging.getLogger("anydraft")
    if not any(isinstance(handler.formatter, _OneLine) for handler in logger.handlers):
        handler = _CurrentStderr()
        handler.setFormatter(_OneLine())
        logger.addHandler(handler)
        logger.propagate = False


class _CurrentStderr(logging.Handler):
    """Writes to whatever sys.stderr is at the moment."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(self.format(record), err=True)


@dataclass(slots=True)
class Interrupt:
    """Whether Ctrl-C was pressed."""

    pressed: bool = field(default=False)

    def __call__(self) -> bool:
        return self.pressed


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Make the first Ctrl-C a wish that is granted after the round; the second one is at once.

    Outside the main thread, where no signal arrives, nothing changes.
    """
    interrupt = Interrupt()

    def pressed(number: int, frame: Any) -> None:
        if interrupt.pressed:
            raise KeyboardInterrupt
        interrupt.pressed = True

    try:
        before = signal.signal(signal.SIGINT, pressed)
    except ValueError:
        yield interrupt
        return
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
