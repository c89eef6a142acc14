"""A reference solution: the final weights of an earlier run, against which hooks measure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError, listed
from .config import ExperimentConfig
from .records import CONFIG, environment, reference_name, versions, weights_name

IRRELEVANT = frozenset({"output_dir", "seed", "epochs", "max_epochs", "eval_every", "snapshot_every"})
"""Options that may differ between a run and its reference without making them two problems."""
IRRELEVANT_SURROUNDINGS = frozenset({"command", "platform"})


@dataclass(frozen=True)
class Reference:
    """Loaded weights by parameter name, shaped and placed like the model's, and where they come from."""

    path: Path
    weights: Mapping[str, Tensor]


def find_reference(given: Path | None, earlier: Sequence[Path], experiment: str, strategy: str) -> Path | None:
    """Return the file of the reference for one strategy: the one ``given``, else the first ``earlier`` one there is.

    ``given`` may be a file of weights, the folder of one run, which then serves every strategy, or a folder in which
    each strategy has its own: that of an experiment, or an output directory. Raises :class:`UsageError` if nothing of
    the kind is there.
    """
    if given is None:
        return next((path for path in earlier if path.is_file()), None)
    if given.is_file():
        return given
    if not given.exists():
        raise UsageError(f"--reference {given} does not exist; it takes a file of final weights or a run's folder.")
    folders = given / strategy, given / experiment / strategy
    places = [folder / name for name in (weights_name(strategy), reference_name(strategy)) for folder in folders]
    found = next((place for place in [*places, *given.glob(weights_name("*"))] if place.is_file()), None)
    if found is None:
        raise UsageError(
            f"--reference {given} holds no final weights of strategy {strategy!r}: there is no {weights_name('*')}, "
            f"{' or '.join(str(place.relative_to(given)) for place in places[:2])} in it."
        )
    return found


def load_reference(path: Path, model: nn.Module) -> Reference:
    """Load weights for a model, executing no code from the file.

    Raises :class:`UsageError` for a file that cannot be read, or that lacks a parameter or has it in another shape.
    """
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise UsageError(f"The reference {path} is not a file of weights ({type(error).__name__}).") from error
    found = content.get("parameters", content) if isinstance(content, dict) else {}
    saved = set(model.state_dict())  # which leaves out the factors of a low-bit layer: there it is its merged weight
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in saved}
    wrong = [
        f"{name} ({_shape(found.get(name))} there, {_shape(parameter)} here)"
        for name, parameter in parameters.items()
        if _shape(found.get(name)) != _shape(parameter)
    ]
    if wrong:
        raise UsageError(f"The reference {path} is of another model: {listed(wrong, 5)} differ.")
    return Reference(path, {name: found[name].to(parameter) for name, parameter in parameters.items()})


def _shape(value: Any) -> str:
    return "x".join(map(str, value.shape)) or "a number" if isinstance(value, Tensor) else "missing"


def differences(path: Path, config: ExperimentConfig, model: nn.Module) -> list[str]:
    """List how the run that left a reference differed in options, versions and surroundings, as far as it tells."""
    try:
        record = json.loads((path.parent / CONFIG).read_text("utf-8"))
        parts = [
            _differing(record["config"], config.as_dict(), IRRELEVANT),
            _differing(record["versions"], versions(), frozenset({"loopscope"})),
            _differing(record["environment"], environment(model), IRRELEVANT_SURROUNDINGS),
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return [line for part in parts for line in part]


def _differing(there: Mapping[str, Any], here: Mapping[str, Any], leave_out: frozenset[str]) -> Iterator[str]:
    for name in {**there, **here}:
        was, now = there.get(name), here.get(name)
        if name not in leave_out and was != now:
            yield f"{name} {was} there, {now} here"
