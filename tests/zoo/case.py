"""Cases of the zoo: trainings with one planted fault, and healthy trainings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.zoo.recorder import Recorder

Kind = Literal["fault", "healthy"]
Model = Literal["mlp", "cnn", "gpt", "lstm"]
Way = Literal["custom loop", "attach step", "hugging face", "lightning", "experiment"]
Build = Callable[[Recorder], None]


@dataclass(frozen=True)
class Case:
    """A small training, with one fault or without.

    Args:
        name: the name in tables, with hyphens.
        kind: ``fault`` or ``healthy``.
        model: the kind of model.
        way: how the hooks are attached.
        build: runs the whole training with the hooks of a recorder.
        expected: ids of findings that name the cause; empty for a healthy training.
        hidden: the record cannot show the cause with certainty: no finding is accepted, a wrong cause is not.
        knowable: the first step after which the record can show the cause; 0 for start-up facts.
        falls: the loss of a healthy training falls; otherwise its loss says nothing about its health.
        group: the group of hooks.
        mentions: a text that the right finding contains, such as the name of a module.
    """

    name: str
    kind: Kind
    model: Model
    way: Way
    build: Build
    expected: tuple[str, ...] = ()
    hidden: bool = False
    knowable: int = 1
    falls: bool = True
    group: str = "health"
    mentions: str = ""

    @property
    def sentence(self) -> str:
        """What happens in the training: the first line of the docstring of its function."""
        return (self.build.__doc__ or "").strip().partition("\n")[0]


CASES: dict[str, Case] = {}
"""All cases by name, filled when the modules of ``tests.zoo.table`` are imported."""


def fault(
    model: Model,
    expected: tuple[str, ...],
    *,
    way: Way = "custom loop",
    hidden: bool = False,
    knowable: int = 1,
    mentions: str = "",
) -> Callable[[Build], Build]:
    """Register a function as a training with a planted fault."""

    def register(build: Build) -> Build:
        return _add(Case(_name(build), "fault", model, way, build, expected, hidden, knowable, mentions=mentions))

    return register


def healthy(
    model: Model, *, way: Way = "custom loop", falls: bool = True, group: str = "health"
) -> Callable[[Build], Build]:
    """Register a function as a healthy training."""

    def register(build: Build) -> Build:
        return _add(Case(_name(build), "healthy", model, way, build, falls=falls, group=group))

    return register


def _name(build: Build) -> str:
    return build.__name__.replace("_", "-")


def _add(case: Case) -> Build:
    if case.name in CASES:
        raise ValueError(f"Two cases are named {case.name!r}; rename one of them.")
    if not case.sentence:
        raise ValueError(f"The case {case.name!r} has no docstring; describe its training in one line.")
    CASES[case.name] = case
    return case.build
