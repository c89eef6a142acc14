"""A reference solution: the final weights of an earlier run, against which hooks measure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..durable_files import is_there, plain_json, read_tensors
from ..errors import UsageError, listed
from .config import ExperimentConfig
from .records import CONFIG, RunRecord, differences, environment, seed_name, versions
from .run_folder import reference_name, weights_name

IRRELEVANT = frozenset({"output_dir", "seed", "epochs", "max_epochs", "eval_every", "snapshot_every"})
"""Options that may differ between a run and its reference without making them two problems."""
IRRELEVANT_SURROUNDINGS = frozenset({"loopscope", "command", "platform", "processes", "sharing"})


@dataclass(frozen=True)
class Reference:
    """Loaded weights by parameter name, shaped and placed like the model's, and where they come from."""

    path: Path
    weights: Mapping[str, Tensor]


def find_reference(
    given: Path | None, earlier: Sequence[Path], experiment: str, strategy: str, seed: int
) -> Path | None:
    """Return the file of the reference for one strategy: the one ``given``, else the first ``earlier`` one there is.

    ``given`` may be a file of weights, the folder of one run, which then serves every strategy, or a folder in which
    each strategy has its own: that of an experiment, or an output directory. Where runs lie there by their seeds, it is
    the one of the same ``seed``. Raises :class:`UsageError` if nothing of the kind is there.
    """
    if given is None:
        return next((path for path in earlier if path.is_file()), None)
    if not is_there(given):
        raise UsageError(f"--reference {given} does not exist; it takes a file of final weights or a run's folder.")
    if given.is_file():
        return given
    folders, same = (given / strategy, given / experiment / strategy), seed_name(str(seed))
    among = [*folders, *(folder / same for folder in folders)]
    places = [folder / name for name in (weights_name(strategy), reference_name(strategy)) for folder in among]
    runs = [path for folder in (given, given / same) for path in folder.glob(weights_name("*"))]
    found = next((place for place in [*places, *runs] if place.is_file()), None)
    if found is None:
        pattern = f"{seed_name('*')}/{weights_name('*')}"
        seeds = sorted(str(path.parent) for folder in (given, *folders) for path in folder.glob(pattern))
        remedy = f" Of other seeds there are: {listed(list(dict.fromkeys(seeds)))}." if seeds else ""
        raise UsageError(
            f"--reference {given} holds no final weights of strategy {strategy!r}: there is no {weights_name('*')}, "
            f"{' or '.join(str(place.relative_to(given)) for place in places[:2])} in it, and none in {same}.{remedy}"
        )
    return found


def load_reference(path: Path, model: nn.Module) -> Reference:
    """Load weights for a model, executing no code from the file.

    Raises :class:`UsageError` for a file that cannot be read, or that lacks a parameter or has it in another shape.
    """
    try:
        content = read_tensors(path)
    except Exception as error:
        raise UsageError(f"The reference {path} is not a file of weights ({type(error).__name__}).") from error
    found = content if isinstance(content, dict) else {}
    if isinstance(found.get("parameters"), dict):
        found = found["parameters"]
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


def differences_from_run(path: Path, config: ExperimentConfig, model: nn.Module) -> list[str]:
    """List how the run that left a reference differed in options, versions and surroundings.

    A file of weights need not lie in the folder of a run; raises :class:`UsageError` for a record that is damaged.
    """
    if not is_there(path.parent / CONFIG):
        return []
    before = RunRecord.read(path.parent)
    differing = differences(before.config, plain_json(config.as_dict()), IRRELEVANT)
    if before.versions and before.environment:
        now = {**versions(), **environment(model)}
        differing += differences(before.surroundings, now, IRRELEVANT_SURROUNDINGS)
    return [f"{name} {old} there, {new} here" for name, old, new in differing]
