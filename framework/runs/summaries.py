"""Parts of the summary of a run, in plain values: its status, the size of its model, and changes of evaluations."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..checkpoints import StoppedError
from ..tensors import is_uninitialised


def deltas(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Return the changes of the numbers of an evaluation.

    >>> deltas({"loss": 3, "word": "a"}, {"loss": 1, "word": "b", "new": 2})
    {'loss': -2}
    """
    numbers = (int, float)
    both = [name for name in after if isinstance(after[name], numbers) and isinstance(before.get(name), numbers)]
    return {name: after[name] - before[name] for name in both}


def model_size(model: nn.Module) -> dict[str, int]:
    """Return the numbers of parameters and of trainable parameters, and the bytes of all parameters."""
    parameters = [parameter for parameter in model.parameters() if not is_uninitialised(parameter)]
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable_parameters": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
    }


def status_after(error: BaseException | None) -> str:
    """Return the status of a run that an error has ended; a search that prunes a trial only interrupts its run."""
    # Recognised by its name, so that Optuna is not imported.
    is_pruned = any(kind.__name__ == "TrialPruned" for kind in type(error).__mro__)
    if is_pruned or isinstance(error, (KeyboardInterrupt, StoppedError)):
        return "interrupted"
    return "completed" if error is None else "failed"


def status_of_script(error: BaseException | None) -> str:
    """Return the status of an attached run whose script an error has ended; a script may exit with success."""
    is_success = isinstance(error, SystemExit) and not error.code  # such as that of ``stop_after``
    return "completed" if is_success else status_after(error)
