"""``loopscope diff``: where two runs part."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from ..checkpoints import Parting, differing, moments_of, open_checkpoint
from ..errors import LoopscopeError, UsageError
from ..runs import CHECKPOINTS, CONFIG, require, weights_name
from .parser import CommandParser


class DifferentRunsError(LoopscopeError):
    """Two runs are not the same."""


def diff(words: Sequence[str], show: Callable[[str], None]) -> None:
    """Compare two runs; raises :class:`DifferentRunsError` if they differ, :class:`UsageError` if nothing compares."""
    parser = CommandParser(
        "diff RUN RUN",
        "Compare two runs bit for bit: the checkpoints that both have, the metrics in their JSONL files, their final "
        "weights. Say at which step and in which tensor they part, and end with status 1 if they do.",
    )
    parser.add_argument("RUN", nargs="*", help="the folder of one strategy, OUTPUT/EXPERIMENT/STRATEGY")
    runs = parser.parse(words)["RUN"]
    require(len(runs) == 2, f"loopscope diff takes the folders of two runs, but got {len(runs)}.")
    a, b = map(Path, runs)
    recorded = [_recorded(run) for run in (a, b)]
    for line in _other_options(*recorded):
        show(f"{line}\n")
    checked = [_checkpoints(a, b), _metrics(a, b, recorded), _weights(a, b, recorded)]
    compared = [text for text, _ in checked if text]
    require(bool(compared), f"{a} and {b} have no checkpoint of the same step, no JSONL and no weights in common.")
    show("".join(f"{text}\n" for text in compared))
    parted = [parting for _, parting in checked if parting]
    if parted:
        raise DifferentRunsError(f"The runs part {parted[0]}.")
    show("The runs are the same.\n")


def _recorded(run: Path) -> Mapping[str, Any]:
    try:
        content: dict[str, Any] = json.loads((run / CONFIG).read_text("utf-8"))
        return {**content, "strategy": str(content["strategy"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{run} is not the folder of a run: there is no readable {CONFIG} in it.") from error


def _other_options(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Say in which options two runs differ."""
    lines = []
    for part in ("config", "hooks", "versions", "environment"):
        old, new = a.get(part, {}), b.get(part, {})
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        lines += [f"{part}: {name}: {old.get(name)} / {new.get(name)}" for name in names if name != "output_dir"]
    return [line for line in lines if not line.startswith("environment: command")]


def _checkpoints(a: Path, b: Path) -> tuple[str, str]:
    left, right = moments_of(a / CHECKPOINTS), moments_of(b / CHECKPOINTS)
    common = [moment for moment in left if moment in right]
    for epoch, step in common:
        contents = [open_checkpoint(found[epoch, step]).content() for found in (left, right)]
        names = differing(*contents)
        if names:
            return f"Checkpoints: {', '.join(names[:5])} differ at step {step:,}.", str(Parting(epoch, step, names))
    steps = ", ".join(f"{step:,}" for _, step in common)
    return (f"Checkpoints of steps {steps}: the same." if common else ""), ""


def _metrics(a: Path, b: Path, recorded: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    paths = [run / f"{of['strategy']}.jsonl" for run, of in zip((a, b), recorded, strict=True)]
    if not all(path.is_file() for path in paths):
        return "", ""
    left, right = [path.open(encoding="utf-8", errors="replace") for path in paths]
    with left, right:
        for number, (line_a, line_b) in enumerate(zip_longest(left, right), start=1):
            if line_a != line_b:
                return _first_metric(number, line_a, line_b)
    return "Metrics in JSONL: the same.", ""


def _first_metric(number: int, line_a: str | None, line_b: str | None) -> tuple[str, str]:
    if line_a is None or line_b is None:
        return f"Metrics in JSONL: one of them ends before line {number}.", f"in the number of metrics, line {number}"
    try:
        a, b = json.loads(line_a), json.loads(line_b)
    except ValueError:
        return f"Metrics in JSONL: line {number} is cut off or damaged.", f"in the metrics, line {number}"
    name = next((key for key in {**a, **b} if json.dumps(a.get(key)) != json.dumps(b.get(key))), "the order of metrics")
    return f"Metrics in JSONL: {name} differs in line {number}.", f"by step {a.get('step')}, in the metric {name}"


def _weights(a: Path, b: Path, recorded: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    paths = [run / weights_name(of["strategy"]) for run, of in zip((a, b), recorded, strict=True)]
    if not all(path.is_file() for path in paths):
        return "", ""
    contents = [{"streams": {}, "state": _loaded(path)} for path in paths]
    names = differing(*contents)
    if names:
        return f"Final weights: {', '.join(names[:5])} differ.", f"by the final weights, first in {names[0]}"
    return "Final weights: the same.", ""


def _loaded(path: Path) -> Any:
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise UsageError(f"{path} cannot be read as weights: it is damaged, or not one of loopscope's.") from error
