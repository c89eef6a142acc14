"""``loopscope equal --numbers A B``: whether two commands compute the same, up to rounding.

The noise of rounding is that of A again, from weights of which each is moved to the next number of its type.
"""

import argparse
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UsageError, counted, listed, require
from .equal_sides import Side, sides_of

FILE, FOLDER = "layout_numbers.json", "layout_numbers"
STEPS = 5
MOVES = 6
"""The most runs of A from moved weights."""
TIMES_NOISE = 3.0
"""A difference beyond this multiple of the largest noise is one between the commands."""
LEAST_PART = 1e-4
"""The part of a gradient or an update that a difference must be as well: kernels of other shapes may sum in another
order, which moved weights do not show, and mistakes change percents."""
CLEAR, FEWEST_MOVES = 100.0, 2
"""A difference beyond this multiple of its limit is clear after the fewest runs from moved weights."""
VISIBLE = 0.01
"""The error of all gradients, or of all updates, that must be visible for the answer that nothing differs."""
STATUS = {"equal": 0, "differ": 1, "undecided": 3}
NOT_FOR_NUMBERS = ("metric", "higher", "within", "pairs", "ledger")
PHRASES = {"start": "the start of {}", "gradient": "the gradient of {}", "update": "the updates of {}"}


class Key(NamedTuple):
    """A tensor at a step."""

    step: int
    kind: str
    """``start`` for the weights before the first step, ``gradient``, or ``update`` for the sum of all updates."""
    tensor: str


class TensorDifference(NamedTuple):
    """The distance of a tensor from that of A."""

    distance: float
    size: float
    """The norm of A's; zero for weights before the first step."""
    ulp: float
    """The norm of a change of every element by its last bit."""


Differences = Mapping[Key, TensorDifference]


@dataclass
class Comparison:
    """The differences of B from A, and those that rounding makes."""

    differences: Differences
    unmatched: Sequence[str] = ()
    """The tensors that only one of the commands has, or in another shape."""
    moved: list[Differences] = field(default_factory=list)
    """The differences of A from itself, once for each run from moved weights."""

    def noise(self, key: Key) -> float:
        """Return the largest difference of a tensor that rounding has made, of at least the last bits.

        It is infinite if it is not a number.
        """
        values = [one[key].distance for one in self.moved if key in one]
        return math.inf if any(map(math.isnan, values)) else max(*values, self.differences[key].ulp, 0.0)

    def beyond(self) -> list[Key]:
        """Return the tensors whose difference is more than rounding, in the order of the steps."""
        return [key for key in self.differences if not self.differences[key].distance <= self._limit(key)]

    def _limit(self, key: Key) -> float:
        return max(TIMES_NOISE * self.noise(key), LEAST_PART * self.differences[key].size)

    @property
    def is_clear(self) -> bool:
        """Whether further noise will not change the answer: nothing is beyond it, or the first difference far."""
        beyond = self.beyond()
        first = [key for key in beyond if key[:2] == beyond[0][:2]]
        is_far = any(not self.differences[key].distance <= CLEAR * self._limit(key) for key in first)
        return not beyond or (len(self.moved) >= FEWEST_MOVES and is_far)

    def visible(self, kind: str) -> float:
        """Return the smallest error of all gradients, or of all updates, that rounding does not hide at some step."""
        steps = {key.step for key in self.differences if key.kind == kind}
        return min((self._visible_at(step, kind) for step in steps), default=math.inf)

    def _visible_at(self, step: int, kind: str) -> float:
        keys = [key for key in self.differences if (key.step, key.kind) == (step, kind)]
        size = math.hypot(*(self.differences[key].size for key in keys))
        noise = math.hypot(*(self.noise(key) for key in keys))
        return max(LEAST_PART, TIMES_NOISE * noise / size) if size else math.inf

    def answer(self) -> dict[str, Any]:
        """Return the answer and its reasons as plain values."""
        beyond = self.beyond()
        visible = {kind: self.visible(kind) for kind in ("gradient", "update")}
        is_decided = max(visible.values()) <= VISIBLE and not self.unmatched
        content: dict[str, Any] = {
            "schema": 1,
            "answer": "differ" if beyond else "equal" if is_decided else "undecided",
            "steps": max(key.step for key in self.differences),
            "compared": len(self.differences),
            "moved": len(self.moved),
            "same_bits": not any(item.distance for item in self.differences.values()),
            "visible": {kind: value if math.isfinite(value) else None for kind, value in visible.items()},
            "unmatched": list(self.unmatched[:9]),
        }
        if beyond:
            together = [key for key in beyond if key[:2] == beyond[0][:2]]
            largest = max(together, key=self._multiple)
            distance, size, _ = self.differences[largest]
            numbers = {"distance": distance, "size": size, "noise": self.noise(largest)}
            content |= {"first": {**largest._asdict(), **numbers}, "others": len(together) - 1}
        return content

    def _multiple(self, key: Key) -> float:
        """Return a difference in units of its noise."""
        distance, noise = self.differences[key].distance, self.noise(key)
        return math.inf if math.isnan(distance) or not noise else distance / noise


def refuse_other_options(given: argparse.Namespace, defaults: argparse.Namespace) -> None:
    """Raise :class:`UsageError` for options that ``--numbers`` does not use, or that need it."""
    require(
        given.numbers or given.steps is None, "--steps needs --numbers: without it the commands train to their end."
    )
    if given.numbers:
        for name in NOT_FOR_NUMBERS:
            is_default = getattr(given, name) == getattr(defaults, name)
            require(is_default, f"--numbers compares gradients and weights, and takes no --{name}; leave it out.")


def compare_numbers(given: argparse.Namespace) -> dict[str, Any]:
    """Run both commands for some steps, A also from moved weights, and return the answer.

    Raises:
        UsageError: if a command fails, or the two have nothing to compare.
    """
    with ExitStack() as contexts:
        a, b = sides_of(given, contexts)
        return _Runs(a, b, given.steps or STEPS, Path(given.out).absolute()).answer()


@dataclass
class _Runs:
    a: Side
    b: Side
    steps: int
    out: Path

    def answer(self) -> dict[str, Any]:
        """Run what is needed, and return the answer."""
        reference = self.out / "numbers_a"
        try:
            precision = self._run(self.a, reference, {})["precision"]
            compared = {"layout_numbers": {"reference": str(reference)}}
            content = self._run(self.b, self.out / "numbers_b", compared)
            comparison = Comparison(differences_of(content, " ".join(self.b.command)), content["unmatched"])
            for move in range(MOVES):
                options = {**compared, "moved_weights": {"seed": move, "precision": precision}}
                name = f"numbers_a_moved_{move + 1}"
                comparison.moved.append(
                    differences_of(self._run(self.a, self.out / name, options), " ".join(self.a.command))
                )
                self._require_moved(comparison.moved[-1])
                if comparison.is_clear:
                    break
            return comparison.answer()
        finally:
            shutil.rmtree(reference / FOLDER, ignore_errors=True)  # several times as large as the model

    def _run(self, side: Side, folder: Path, hook_options: Mapping[str, Any]) -> dict[str, Any]:
        """Run a command, and return what the hook has written."""
        hooks = list({"layout_numbers": {}, **hook_options})
        options = {"hooks": hooks, "hook_options": hook_options, "budget": "none", "stop_after": self.steps}
        side.run(folder, options)
        try:
            return dict(json.loads((folder / FILE).read_text("utf-8")))
        except FileNotFoundError:
            problem = f"loopscope has seen no update in {' '.join(side.command)}; its output is in {folder}.txt."
            raise UsageError(problem) from None

    def _require_moved(self, moved: Differences) -> None:
        is_moved = any(item.distance for key, item in moved.items() if key.kind == "start")
        require(is_moved, f"The weights of {' '.join(self.a.command)} were not moved: its passes could not be seen.")


def differences_of(content: Mapping[str, Any], command: str) -> Differences:
    """Return the differences that a run of a command has found; raises :class:`UsageError` if there are none."""
    entries: dict[Key, TensorDifference] = {}
    for entry in content["entries"]:
        key = Key(entry["step"], entry["kind"], entry["tensor"])
        size = 0.0 if key.kind == "start" else entry["size"]
        require(math.isfinite(size), f"{_phrase(key)} at step {key.step} of A is not finite; compare fewer --steps.")
        entries[key] = TensorDifference(entry["distance"], size, entry["ulp"])
    if not entries:
        known = listed(content["unmatched"], 4) or "none"
        raise UsageError(f"{command} has no tensor of the name and shape of one of A: {known}.")
    return entries


def _phrase(key: Key) -> str:
    return PHRASES[key.kind].format(key.tensor)


def numbers_text(answer: Mapping[str, Any]) -> str:
    """Return the answer as text."""
    return "\n".join(_lines(answer))


def _lines(answer: Mapping[str, Any]) -> Iterator[str]:
    steps = counted(answer["steps"], "step")
    tensors = f"{answer['compared']:,} gradients, updates and starting weights of {steps}"
    if answer["answer"] == "differ":
        first = answer["first"]
        key = Key(first["step"], first["kind"], first["tensor"])
        place = f"at step {key.step}" if key.step else "before the first step"
        others = f"; {counted(answer['others'], 'other tensor')} of this kind too" if answer["others"] else ""
        part = f", {_percent(first['distance'] / first['size'])} of A's norm" if first["size"] else ""
        noise = first["noise"]
        times = f"{first['distance'] / noise:,.3g} times" if noise else "and"
        yield (
            f"B differs from A {place}: {_phrase(key)} by {first['distance']:.3g}{part}, {times} the largest of "
            f"{counted(answer['moved'], 'difference')} that rounding makes ({noise:.3g}){others}."
        )
    elif answer["answer"] == "equal":
        bits = "bit for bit" if answer["same_bits"] else "up to rounding"
        yield f"A and B compute the same, {bits}, in {tensors}."
    else:
        yield f"Whether A and B compute the same cannot be determined: no difference beyond rounding in {tensors}."
    if answer["unmatched"]:
        yield f"Not compared, since only one of them has it, or in another shape: {listed(answer['unmatched'], 4)}."
    if answer["answer"] != "differ":
        gradient, update = (_percent(answer["visible"][kind]) for kind in ("gradient", "update"))
        remedy = "" if answer["answer"] == "equal" else "; train in float32 to see more"
        yield f"Rounding hides errors below {gradient} of all gradients, and below {update} of all updates{remedy}."


def _percent(share: float | None) -> str:
    return "100 %" if share is None else f"{100 * share:.2g} %"
