"""Reference solutions: final weights of earlier runs that hooks measure against."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..durable_files import path_exists, plain_json, read_tensors
from ..errors import UsageError, listed, require
from ..option_words import option_text
from .config import ExperimentConfig
from .file_manifest import refuse_damage
from .records import CONFIG, RunRecord, differences, seed_name
from .run_description import environment, versions
from .run_folder import reference_name, weights_name

IRRELEVANT = frozenset({"output_dir", "seed", "epochs", "max_epochs", "eval_every", "snapshot_every"})
"""Options in which a run and its reference may differ and still train the same problem."""
IRRELEVANT_SURROUNDINGS = frozenset({"loopscope", "command", "platform", "processes", "sharing"})


@dataclass(frozen=True)
class Reference:
    """Loaded weights by parameter name, with the model's shapes and devices, and their file."""

    path: Path
    weights: Mapping[str, Tensor]


def find_reference(
    given: Path | None, earlier: Sequence[Path], experiment: str, strategy: str, seed: int
) -> Path | None:
    """Return the reference file for one strategy: the one ``given``, else the first existing ``earlier`` one.

    ``given`` may be a file of weights, the folder of one run, which then serves every strategy, or the folder of an
    experiment or an output directory, with a reference for each strategy. If it contains runs of several seeds, the
    one of the same ``seed`` is used.

    Raises:
        UsageError: if ``given`` contains no reference for this strategy and seed.
    """
    if given is None:
        return next((path for path in earlier if path.is_file()), None)
    shown = option_text("reference", given)
    require(path_exists(given), f"{shown} does not exist; it takes a file of final weights or a run's folder.")
    if given.is_file():
        return given
    folders, same = (given / strategy, given / experiment / strategy), seed_name(str(seed))
    among = [*folders, *(folder / same for folder in folders)]
    places = [folder / name for name in (weights_name(strategy), reference_name(strategy)) for folder in among]
    runs = [path for folder in (given, given / same) for path in folder.glob(weights_name("*"))]
    file = next((place for place in [*places, *runs] if place.is_file()), None)
    if file is None:
        pattern = f"{seed_name('*')}/{weights_name('*')}"
        seeds = sorted(str(path.parent) for folder in (given, *folders) for path in folder.glob(pattern))
        other_seeds = f" Folders of other seeds: {listed(list(dict.fromkeys(seeds)))}." if seeds else ""
        expected = f"{weights_name('*')}, {' or '.join(str(place.relative_to(given)) for place in places[:2])}"
        raise UsageError(
            f"{shown} has no final weights of strategy {strategy!r}: neither it nor {same} "
            f"contains {expected}.{other_seeds}"
        )
    return file


def load_reference(path: Path, model: nn.Module) -> Reference:
    """Load weights for a model, executing no code from the file.

    Raises:
        UsageError: for a file that is damaged or cannot be read, or that lacks a parameter or has it in another shape.
    """
    refuse_damage(path.parent, (path.suffix,), path.name)
    try:
        content = read_tensors(path)
    except Exception as error:
        raise UsageError(f"The reference {path} is not a file of weights ({type(error).__name__}).") from error
    weights = content if isinstance(content, dict) else {}
    if isinstance(weights.get("parameters"), dict):
        weights = weights["parameters"]
    saved = set(model.state_dict())  # without the factors of a low-bit layer, whose merged weight it contains
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in saved}
    wrong = [
        f"{name} ({_shape(weights.get(name))} in the reference, {_shape(parameter)} in the model)"
        for name, parameter in parameters.items()
        if _shape(weights.get(name)) != _shape(parameter)
    ]
    if wrong:
        raise UsageError(f"The reference {path} belongs to another model; different shapes: {listed(wrong, 5)}.")
    return Reference(path, {name: weights[name].to(parameter) for name, parameter in parameters.items()})


def _shape(value: Any) -> str:
    return "x".join(map(str, value.shape)) or "a number" if isinstance(value, Tensor) else "missing"


def differences_from_run(path: Path, config: ExperimentConfig, model: nn.Module) -> list[str]:
    """Return the differences of a reference's run from this one in options, versions and environment.

    The list is empty for a file of weights outside the folder of a run.

    Raises:
        UsageError: for a damaged record.
    """
    if not path_exists(path.parent / CONFIG):
        return []
    record = RunRecord.read(path.parent)
    differing = differences(record.config, plain_json(config.as_dict()), IRRELEVANT)
    if record.versions and record.environment:
        now = {**versions(), **environment(model)}
        differing += differences(record.surroundings, now, IRRELEVANT_SURROUNDINGS)
    return [f"{name} {old} in the reference, {new} now" for name, old, new in differing]
