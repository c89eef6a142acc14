"""Typed, validated options of experiments and runs, with descriptions of their types."""

import math
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from ..errors import UsageError, require, unknown
from ..names import as_names
from ..option_words import option_text
from ..training import Parallel

WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    type(None): "null",
    None: "null",
    Any: "anything",
    Mapping[str, Any]: "an object",
}


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """Options of every experiment.

    Args:
        seed: seeds the initial weights, the data order and every random stream; several as --seeds 0-19.
        output_dir: folder under which EXPERIMENT/STRATEGY/ is written.
        batch_size: samples per optimizer step.
        accumulation_steps: micro-batches into which each batch is split.
        amp: mixed precision: autocast to bf16, or to fp16 with the loss scaled.
        with_compile: compile the model (torch.compile) for the training steps.
        log_every: steps between deliveries of step metrics; step loop only.
        eval_every: epochs (step loop: steps) between evaluations.
        snapshot_every: epochs (step loop: steps) between SNAPSHOT points.
    """

    seed: int = 0
    output_dir: Path = Path("output")
    batch_size: int = 32
    accumulation_steps: int = 1
    amp: Literal["none", "bf16", "fp16"] = "none"
    with_compile: bool = False
    log_every: int = 100
    eval_every: int = 1
    snapshot_every: int = 10

    def __post_init__(self) -> None:
        """Check every value; raise :class:`UsageError` that names a wrong option and what it accepts."""
        annotations = get_type_hints(type(self))
        for name in field_names(type(self)):
            value, annotation = getattr(self, name), annotations[name]
            require(fits(value, annotation), f"{name} is {value!r}; it must be {describe_type(annotation)}.")
        require(0 <= self.seed < 2**63, f"seed is {self.seed}; it must be in 0..2**63-1.")
        self.at_least(1, "batch_size", "accumulation_steps", "log_every", "eval_every", "snapshot_every")

    def at_least(self, least: float, *names: str) -> None:
        """Check that the named options are finite and at least ``least``."""
        for name in names:
            value = getattr(self, name)
            finite = "" if abs(value) < math.inf else "finite and "
            require(least <= value < math.inf, f"{name} is {value}; it must be {finite}at least {least}.")

    def above(self, bound: float, *names: str) -> None:
        """Check that the named options are finite and greater than ``bound``."""
        for name in names:
            value = getattr(self, name)
            finite = "" if abs(value) < math.inf else "finite and "
            require(bound < value < math.inf, f"{name} is {value}; it must be {finite}greater than {bound}.")

    def as_dict(self) -> dict[str, Any]:
        """Return the options as plain values."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}


CHECKPOINTS = ("save_checkpoints", "checkpoint_every_steps")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings that every kind of run has: those of the command, of sessions from Python, and of attached loops.

    Args:
        with_hooks: hook group: none, minimal, health, observers, interventions or full; default: the experiment's.
        on_hook_error: end the run with a checkpoint (raise), continue without the hook (skip), or do so unless it
            commits (auto).
        audit_hooks: digest the complete training state before and after every hook call.
        check_every_call: check each call of loopscope's own hooks alone, not several together.
        profile_hooks: write each hook's time and memory to summary.json.
        guardian_device: device of the rollback copies; by default that of the originals.
        hook_offload_state: keep the state of hooks on the CPU between their calls.
        reference: final weights, or the folder of a run, that hooks measure against.
        overwrite: replace a run in the output directory.
        budget: bound on the CPU time of a group's hooks, as a share of the training's (0.05 or 5%), which thins their
            schedules; none leaves these as they are.
        compiled: taps in graphs of torch.compile that change the last bits of the training: leave them out (safe), or
            keep them and list the run as treated (all).
    """

    with_hooks: str | None = None
    on_hook_error: Literal["raise", "skip", "auto"] = "raise"
    audit_hooks: bool = False
    check_every_call: bool = False
    profile_hooks: bool = False
    guardian_device: str | None = None
    hook_offload_state: bool = False
    reference: Path | None = None
    overwrite: bool = False
    budget: float | str | None = 0.05
    compiled: Literal["safe", "all"] = "safe"

    def __post_init__(self) -> None:
        """Raise :class:`UsageError` for an unknown word, or an invalid budget."""
        budget_of(self.budget)
        for name, annotation in get_type_hints(type(self)).items():
            words, value = allowed_words(annotation), getattr(self, name)
            if words and not fits(value, annotation):
                raise unknown(f"value of {name}:", str(value), words)


@dataclass(frozen=True, kw_only=True)
class RunFlags(RunSettings):
    """Options of the run.

    Args:
        save_checkpoints: epochs (step loop: steps) between checkpoints; 0 writes none.
        checkpoint_every_steps: steps between checkpoints, within epochs too; 0 writes none.
        keep_checkpoints: number of newest checkpoints to keep, in addition to the best.
        digest_every: steps between digests of the training state in the record; 0 writes none; by default at snapshots.
        resume: resume from the newest intact checkpoint; completed strategies are not trained again.
        exact: refuse to resume if the run might differ in any bit, for example with another number of processes.
        no_determinism: allow torch to use nondeterministic algorithms.
        parallel: how the processes that torchrun started train one model: as replicas (ddp), as shards (fsdp), or with
            split layers (tp, fsdp+tp).
    """

    save_checkpoints: int = 0
    checkpoint_every_steps: int = 0
    keep_checkpoints: int = 3
    digest_every: int | None = None
    resume: bool = False
    exact: bool = False
    no_determinism: bool = False
    parallel: Parallel | None = None

    def __post_init__(self) -> None:
        """Check every value; raise :class:`UsageError` that names a wrong option and what it accepts."""
        super().__post_init__()
        for name, least in (*((option, 0) for option in (*CHECKPOINTS, "digest_every")), ("keep_checkpoints", 1)):
            value = getattr(self, name)
            require(value is None or value >= least, f"{name} is {value}; it must be at least {least}.")
        modes = [name for name in ("resume", "overwrite") if getattr(self, name)]
        given = " and ".join(option_text(name) for name in modes)
        require(len(modes) <= 1, f"{given} exclude each other; give one of them.")
        advice = f"add {option_text('resume', True)}, or omit {option_text('exact')}"
        require(self.resume or not self.exact, f"{option_text('exact')} applies only to a resumed run; {advice}.")


@dataclass(frozen=True, kw_only=True)
class RunOptions(RunFlags):
    """Options of a run beyond its flags: strategies, seeds, hooks and their options."""

    strategies: Sequence[str] = ()
    seeds: Sequence[int] = ()
    """If given, every strategy is trained once with each seed, in the folder ``seed-N`` within its own."""
    hooks: Sequence[str] = ()
    hook_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options by hook name, as values of the annotated types."""
    recorded: Mapping[str, Any] = field(default_factory=dict)
    """The options of the command line, as plain values, that start the run again."""
    changed: Sequence[str] | None = None
    """The names of those that differ from the defaults and the preset; ``None`` if no command started the run."""

    def __post_init__(self) -> None:
        """Check every value; one strategy or hook may be given without a list."""
        super().__post_init__()
        for name in ("strategies", "hooks"):
            object.__setattr__(self, name, as_names(getattr(self, name)))


def budget_of(value: object) -> float | Path | None:
    """Return a budget as a share, or as the folder of an earlier run whose schedules are repeated.

    >>> budget_of("5%"), budget_of(0.1), budget_of("none")
    (0.05, 0.1, None)

    Raises:
        UsageError: for another value.
    """
    if value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null")):
        return None
    text = str(value).strip()
    with suppress(ValueError):
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        if 0 < share <= 1 and not isinstance(value, bool):
            return share
    if isinstance(value, (str, Path)) and text and Path(text).is_dir():
        return Path(text)
    raise UsageError(
        f"budget is {value!r}; it must be a share of the training's CPU time, such as 0.05 or 5%, none, or the folder "
        "of a run whose schedules are repeated."
    )


def field_names(options: type[ExperimentConfig | RunFlags]) -> list[str]:
    """Return the names of a class's options in order."""
    return [item.name for item in fields(options)]


def union_members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself.

    >>> union_members(int | None)
    (<class 'int'>, <class 'NoneType'>)
    """
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def allowed_words(annotation: Any) -> list[str]:
    """Return the words that an annotation allows, or an empty list if it allows other values except null.

    >>> allowed_words(Literal["exact", "finite_difference"]), allowed_words(int | Literal["auto"])
    (['exact', 'finite_difference'], [])
    """
    members = [member for member in union_members(annotation) if member not in (None, type(None))]
    literal = all(get_origin(member) is Literal for member in members)
    return [str(word) for member in members for word in get_args(member)] if literal else []


def fits(value: Any, annotation: Any) -> bool:
    """Return whether a value has an annotated type; an integer is also a number, a boolean is neither.

    >>> fits(3, float), fits(True, int), fits(None, int | None), fits("a", Literal["a", "b"])
    (True, False, True, True)
    >>> fits({"a": [1]}, Mapping[str, Sequence[int]]), fits({"a": ["b"]}, Mapping[str, Sequence[int]])
    (True, False)
    """
    members = union_members(annotation)
    if len(members) > 1:
        return any(fits(value, member) for member in members)
    origin = get_origin(annotation) or annotation
    if origin is Literal:
        return any(type(value) is type(word) and value == word for word in get_args(annotation))
    if isinstance(value, bool) and origin in (int, float):
        return False
    if is_typeddict(annotation) or (is_dataclass(annotation) and isinstance(value, Mapping)):
        entries = get_type_hints(annotation).items()
        return isinstance(value, Mapping) and all(fits(value.get(name), of) for name, of in entries)
    if origin in (Mapping, dict) and get_args(annotation):
        key, of = get_args(annotation)
        return isinstance(value, origin) and all(fits(name, key) and fits(value[name], of) for name in value)
    if origin is Sequence:
        return isinstance(value, (list, tuple)) and all(fits(item, get_args(annotation)[0]) for item in value)
    kinds = (int, float) if origin is float else origin
    return origin is Any or not isinstance(origin, type) or isinstance(value, kinds)


def is_parsable(annotation: Any) -> bool:
    """Return whether the command line and files can give a value of the type.

    >>> is_parsable(Mapping[str, list[int | None]]), is_parsable(bytes), is_parsable(list[object])
    (True, False, False)
    """
    if is_typeddict(annotation):
        return all(map(is_parsable, get_type_hints(annotation).values()))
    if get_origin(annotation) in (Union, types.UnionType, Sequence, list, Mapping, dict):
        return all(map(is_parsable, get_args(annotation)))
    return get_origin(annotation) is Literal or annotation in (*WORDS, list, dict)


def describe_type(annotation: Any) -> str:
    """Describe in words what an annotation accepts.

    >>> describe_type(int | None), describe_type(Literal["raise", "skip"]), describe_type(list[int])
    ('an integer or null', 'raise or skip', 'list[int]')
    """
    members = union_members(annotation)
    if len(members) > 1:
        return " or ".join(describe_type(member) for member in members)
    if get_origin(annotation) is Literal:
        words = [str(word) for word in get_args(annotation)]
        return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    if annotation in WORDS:
        return WORDS[annotation]
    if is_typeddict(annotation) or is_dataclass(annotation):
        return f"an object with {' and '.join(get_type_hints(annotation))}"
    if get_origin(annotation) is Mapping:
        return f"an object (each value {describe_type(get_args(annotation)[1])})"
    if get_origin(annotation) is Sequence:
        return f"a list (each item {describe_type(get_args(annotation)[0])})"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
