"""``loopscope equal A B``: whether a changed training is better, worse or equal, by pairs of runs with equal seeds.

The trainings run in separate processes under ``loopscope watch``; this one reads their records.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ..errors import LoopscopeError, UsageError, counted, listed, require, unknown
from ..sequential_test import Judgement, judge, pairs_needed
from .equal_numbers import STATUS as NUMBERS_STATUS
from .equal_numbers import STEPS, compare_numbers, numbers_text, refuse_other_options
from .equal_sides import Side, sides_of
from .watch import CommandOfOthers, positive_count, refused_command

USAGE = """loopscope equal [OPTIONS] "COMMAND A" "COMMAND B"
       loopscope equal [OPTIONS] --git REVISION..REVISION "COMMAND"
       loopscope equal [OPTIONS] FOLDER FOLDER
       loopscope equal --numbers [--steps N] "COMMAND A" "COMMAND B"

Is B better than A, worse, or equal within a margin? Both commands are run unchanged, in pairs with the same number
added to every seed that the script sets, until the answer is known: its interval holds at every look. Two folders with
runs are compared as they are, paired in the order of their names. With --numbers, do two layouts compute the same? The
gradients and updates of their first steps are compared with what rounding changes.
Exit status: 0 for equal or better, 1 for worse or different, 2 for bad input, 3 if the runs do not decide.

  loopscope equal "python train.py" "python train.py --warmup 100" --metric val_loss --within 0.5%%
  loopscope equal --git main..HEAD "python train.py" --pairs 20
  loopscope equal --numbers "python train.py" "python train.py --accumulate 4"
"""
ALPHA = 0.05
"""The probability that any answer of a question, or of all questions of a ledger, is wrong."""
MOST_VALUES, MOST_DECIDING = 30, 3
STATUS = {"better": 0, "equal": 0, "worse": 1, "undecided": 3}
Values = Mapping[str, float]


def equal_parser() -> argparse.ArgumentParser:
    """Build the parser of ``loopscope equal``."""
    parser = CommandOfOthers("loopscope equal", usage=USAGE, add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("sides", nargs="*", metavar="COMMAND", help="two commands, each as one word, or two folders with runs")
    add("--git", metavar="A..B", help="run one command in the trees of two revisions")
    add("--metric", metavar="NAME", help="the metric that decides (the validation loss, or else the loss)")
    add("--higher", action="store_true", help="higher values of the metric are better (lower, except for accuracies)")
    add("--within", metavar="MARGIN", type=_margin, default="1%", help="differences that do not matter (1%%)")
    add("--pairs", metavar="N", type=positive_count, default=12, help="the most pairs of runs (12)")
    add("--ledger", metavar="FILE", help="share one error of 5 %% among all questions that name this file")
    add("--numbers", action="store_true", help="compare gradients and updates up to rounding, not a metric")
    add("--steps", metavar="N", type=positive_count, help=f"the steps that --numbers compares ({STEPS})")
    add("--out", metavar="DIR", default="loopscope-runs/equal", help="the folder of the runs (loopscope-runs/equal)")
    add("--json", action="store_true", help="write one JSON object of at most 4 kB")
    add("--help", "-h", action="help", help="show this text and exit")
    return parser


def _margin(text: str) -> str:
    number = text.removesuffix("%")
    try:
        if not 0 < float(number) < math.inf:
            raise ValueError
    except ValueError:
        problem = f"{text!r} is not a margin: give a share of A's mean such as 0.5%, or a difference such as 0.01"
        raise argparse.ArgumentTypeError(problem) from None
    return text


def equal(words: Sequence[str]) -> int:
    """Answer the question, and return the exit status."""
    parser = equal_parser()
    given = parser.parse_intermixed_args(words)
    try:
        refuse_other_options(given, parser.parse_args([]))
        if given.numbers:
            compared = compare_numbers(given)
            sys.stdout.write(f"{json.dumps(compared) if given.json else numbers_text(compared)}\n")
            return NUMBERS_STATUS[compared["answer"]]
        with ExitStack() as contexts:
            recorded = _recorded_pairs(given)
            question = Question.of(given)
            for pair in recorded or _run_pairs(given, contexts):
                question.add(*pair)
                if recorded is None and question.is_decided:
                    break
        answer = question.answer()
    except LoopscopeError as error:
        return refused_command(" ".join(str(error).split()))
    if given.ledger:
        _note(Path(given.ledger), question, answer["answer"])
    sys.stdout.write(f"{json.dumps(answer) if given.json else _sentence(answer)}\n")
    return STATUS[answer["answer"]]


class Question:
    """The pairs of values so far, and what they say."""

    def __init__(self, key: Mapping[str, Any], metric: str | None, within: str, alpha: float, *, higher: bool) -> None:
        self.key, self.alpha = key, alpha
        self._metric, self._within, self._is_higher = metric, within, higher
        self._pairs: list[tuple[Values, Values]] = []
        self._repeated: Values = {}

    @classmethod
    def of(cls, given: argparse.Namespace) -> "Question":
        """Return the question of a command line, with its share of the error of a ledger."""
        key = {name: getattr(given, name) for name in ("sides", "git", "metric", "within", "higher")}
        alpha = ALPHA if given.ledger is None else _share(_number(Path(given.ledger), key))
        return cls(key, given.metric, given.within, alpha, higher=given.higher)

    def add(self, a: Values, b: Values, repeated: Values | None = None) -> None:
        """Add the final values of the metrics of a pair, and of a second run of A with the same seed.

        Raises:
            UsageError: if the metric is missing.
        """
        self._pairs.append((a, b))
        self._metric = _full_name(self._metric, [name for name in a if name in b])
        self._repeated = repeated or self._repeated

    @property
    def is_decided(self) -> bool:
        """Whether the pairs so far give an answer."""
        return self._judge(self._metric or "").answer != "undecided"

    def answer(self) -> dict[str, Any]:
        """Return the answer and its reasons as plain values."""
        require(bool(self._pairs), "There are no pairs of runs to compare.")
        name = self._metric or ""
        judged, values = self._judge(name), [[a[name], b[name]] for a, b in self._pairs]
        content: dict[str, Any] = {
            "schema": 1,
            "answer": judged.answer,
            "metric": name,
            "pairs": len(self._pairs),
            "mean_a": sum(a for a, _ in values) / len(values),
            "difference": judged.mean,
            "low": judged.low,
            "high": judged.high,
            "margin": self._margin(name),
            "alpha": self.alpha,
            "repeat_of_a": self._repeated[name] - values[0][0] if name in self._repeated else None,
            "values": values[:MOST_VALUES],
        }
        if judged.answer == "undecided":
            content |= {"pairs_needed": judged.needed, "deciding": self._deciding(judged.needed)}
        return {key: None if item in (math.inf, -math.inf) else item for key, item in content.items()}

    def _judge(self, name: str) -> Judgement:
        differences = [b[name] - a[name] for a, b in self._pairs]
        for side, ends in zip("AB", zip(*self._pairs, strict=True), strict=True):
            is_finite = all(math.isfinite(end[name]) for end in ends)
            require(is_finite, f"{name} is not finite in a run of {side}: loopscope doctor names the cause.")
        return judge(differences, self._margin(name), self.alpha, lower_is_better=not self._higher(name))

    def _margin(self, name: str) -> float:
        number = float(self._within.removesuffix("%"))
        is_share = self._within.endswith("%")
        return abs(sum(a[name] for a, _ in self._pairs) / len(self._pairs)) * number / 100 if is_share else number

    def _higher(self, name: str) -> bool:
        from ..report import direction_of

        return self._is_higher or direction_of(name) < 0

    def _deciding(self, needed: int | None) -> dict[str, int]:
        """Return the metrics that a share of their mean decides with fewest pairs, if with fewer than this one."""
        if not self._within.endswith("%") or len(self._pairs) < 2:
            return {}
        found: dict[str, int] = {}
        for name in sorted(set.intersection(*({*a} & {*b} for a, b in self._pairs)) - {self._metric}):
            differences = [b[name] - a[name] for a, b in self._pairs]
            if not any(differences) or not all(map(math.isfinite, differences)):
                continue
            pairs = pairs_needed(fmean(differences), stdev(differences), self._margin(name), self.alpha)
            is_known = any(other.rpartition("/")[2] == name.rpartition("/")[2] for other in found)
            if pairs is not None and not is_known and (needed is None or pairs < needed):
                found[name] = pairs
        return dict(sorted(found.items(), key=itemgetter(1))[:MOST_DECIDING])


def _full_name(wanted: str | None, names: Sequence[str]) -> str:
    """Return the full name of a metric that both runs of a pair have; without one, that of the validation loss or loss.

    Raises:
        UsageError: if there is none, or several end in this name.
    """
    from ..report import ordered

    if wanted is None:
        main = ordered(dict.fromkeys(names, 1), ()).main
        require(
            bool(main), f"The runs record no loss: name a metric with --metric. Known: {listed(names, 8) or 'none'}."
        )
        return main[-1]
    found = [name for name in names if name in (wanted, f"reported/{wanted}")]
    found = found or [name for name in names if name.rpartition("/")[2] == wanted]
    if not found:
        raise unknown("metric", wanted, names)
    require(len(found) == 1, f"--metric {wanted} is ambiguous: {listed(found)}; give the full name.")
    return found[0]


def _final_values(folder: Path) -> Values:
    """Return the mean of the last tenth of the values of each metric of a run, of at least one value."""
    from ..runs import read_history

    curves = read_history(folder).curves
    return {
        name: float(curve.values[-max(1, len(curve) // 10) :].mean()) for name, curve in curves.items() if len(curve)
    }


def _recorded_pairs(given: argparse.Namespace) -> Iterator[tuple[Values, Values]] | None:
    """Return the pairs of two folders with runs, paired by their order; ``None`` if commands were given."""
    if given.git or len(given.sides) != 2 or not all(map(os.path.isdir, given.sides)):
        return None
    from ..many_runs import find_runs

    a, b = ([run.path for run in find_runs(Path(side))] for side in given.sides)
    numbers = f"{counted(len(a), 'run')} and {counted(len(b), 'run')}"
    require(len(a) == len(b), f"The folders have {numbers}; runs are paired in the order of their names.")
    return ((_final_values(left), _final_values(right)) for left, right in zip(a, b, strict=True))


def _run_pairs(given: argparse.Namespace, contexts: ExitStack) -> Iterator[tuple[Values, ...]]:
    """Return the pairs of runs of two commands, each made when it is asked for; A also runs first in turn."""
    a, b = sides_of(given, contexts)
    return _pairs_of(a, b, given.pairs, Path(given.out).absolute())


def _pairs_of(a: Side, b: Side, number: int, out: Path) -> Iterator[tuple[Values, ...]]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for seed in progress.track(range(number), description="pairs of runs"):
            values = {side.name: _values_of(side, out, seed) for side in ((a, b) if seed % 2 == 0 else (b, a))}
            repeated = [_values_of(a, out, seed, again=True)] if seed == 0 else []
            yield values["a"], values["b"], *repeated


def _values_of(side: Side, out: Path, seed: int, *, again: bool = False) -> Values:
    """Run a command with a number added to its seeds, and return the final values of its metrics."""
    folder = out / f"{side.name}_{seed}{'_again' if again else ''}"
    side.run(folder, {"with_hooks": "none"}, seed)
    return _final_values(folder)


def _share(number: int) -> float:
    """Return the error of a question of a ledger: the shares of all questions together are at most :data:`ALPHA`.

    >>> round(sum(map(_share, range(1, 10_000))), 3)
    0.05
    """
    return ALPHA * 6 / (math.pi * number) ** 2


def _entries(ledger: Path) -> list[dict[str, Any]]:
    """Read the questions of a ledger; raises :class:`UsageError` for another file."""
    try:
        return [dict(json.loads(line)) for line in ledger.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{ledger} cannot be read as a ledger ({error}); give another file.") from error


def _number(ledger: Path, key: Mapping[str, Any]) -> int:
    """Return the number of a question in a ledger: a new one, or that of the same question."""
    keys = [{name: entry.get(name) for name in key} for entry in _entries(ledger)]
    distinct = [entry for index, entry in enumerate(keys) if entry not in keys[:index]]
    return distinct.index(dict(key)) + 1 if dict(key) in distinct else len(distinct) + 1


def _note(ledger: Path, question: Question, answer: str) -> None:
    with ledger.open("a", encoding="utf-8") as file:
        file.write(f"{json.dumps({**question.key, 'alpha': question.alpha, 'answer': answer})}\n")


def _sentence(answer: Mapping[str, Any]) -> str:
    """Return the answer as text."""
    from ..console import number_text

    mean, name, pairs = answer["mean_a"], answer["metric"], answer["pairs"]

    def shown(value: float | None) -> str:
        if value is None:
            return "unknown"
        return f"{100 * value / abs(mean):+.2f} %" if mean else f"{value:+.4g}"

    interval = f"{100 * (1 - answer['alpha']):.4g} % interval {shown(answer['low'])} to {shown(answer['high'])}"
    margin = shown(answer["margin"]).removeprefix("+")
    heads = {
        "better": "B is better",
        "worse": "B is worse",
        "equal": f"B is equal to A within {margin}",
        "undecided": "The pairs do not decide",
    }
    difference = f"{name} of B differs by {shown(answer['difference'])} of A's {number_text(mean)} ({interval})"
    lines = [f"{heads[answer['answer']]}: {difference}, after {counted(pairs, 'pair')}."]
    if answer["repeat_of_a"]:
        lines.append(
            f"A is not deterministic: run again with the same seed it differs by {shown(answer['repeat_of_a'])}."
        )
    if answer["answer"] == "undecided":
        needed = answer["pairs_needed"]
        lines.append(
            f"About {counted(needed, 'pair')} would decide." if needed else "No reasonable number of pairs decides."
        )
        for other, number in answer["deciding"].items():
            lines.append(f"{other} would decide within the same margin with about {counted(number, 'pair')}.")
    return "\n".join(lines)
