"""Finds what is missing in the files that a script saves by ``torch.save`` to resume from."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..errors import listed
from ..observing import optimizers_over, place, scaler_in_use, schedulers_of
from ..state import Transient
from .recording import registered

COUNTERS = {"step", "steps", "global_step", "epoch", "epochs", "iter", "iteration", "it", "update", "num_updates"}
"""Names of entries with which a script remembers how far it is, so that it may continue from there."""
FOR_INFERENCE = ("best", "final", "infer", "export", "deploy", "weights", "snapshot")
"""Parts of the names of files from which no training continues."""
SCORES = ("val", "acc", "best", "score", "metric", "f1", "auc", "bleu")
"""Parts of the names of entries by which a model was chosen."""
LIGHTNING = "pytorch-lightning_version"
DEPTH = 4


class SavedFiles(Transient):
    """Watches what a script saves between two updates of a model, in one file or in several."""

    def __init__(self) -> None:
        self._model = nn.Module()
        self._is_active: Callable[[], bool] = bool
        self._dicts: list[Mapping[Any, Any]] = []
        """All dicts within the files that were saved since the newest update."""
        self._objects: set[int] = set()
        """The ids of the optimizers, schedulers and scalers that were saved as objects."""
        self._names: list[str] = []
        self._function = place(torch, "save", self._observed)

    @contextmanager
    def recording(self, model: nn.Module, is_active: Callable[[], bool]) -> Iterator[None]:
        """Watch ``torch.save`` in the body."""
        self._model, self._is_active = model, is_active
        with registered(self._function.install):
            yield

    def _observed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_active():
                self._names.append(Path(f).name.lower() if isinstance(f, (str, Path)) else "")
                self._note(obj, DEPTH)
            return function(obj, f, *args, **kwargs)

        return save

    def _note(self, item: Any, depth: int) -> None:
        if isinstance(item, (Optimizer, GradScaler)) or hasattr(item, "get_last_lr"):
            self._objects.add(id(item))
        if depth and isinstance(item, Mapping):
            self._dicts.append(dict(item))
            for value in item.values():
                self._note(value, depth - 1)
        elif depth and isinstance(item, (list, tuple)):
            for value in item:
                self._note(value, depth - 1)

    def problem(self) -> str:
        """Return a sentence on what a training that continues from the newest files lacks; empty if nothing is known.

        Files to continue from have the model, and an optimizer, a schedule, a scaler or the number of a step. They are
        forgotten afterwards.
        """
        dicts, names, objects = self._dicts, self._names, self._objects
        self._dicts, self._names, self._objects = [], [], set()
        if not any(self._is_of_model(item) for item in dicts):
            return ""
        optimizers = optimizers_over(self._model.parameters())
        schedulers = [item for one in optimizers for item in schedulers_of(one) if _steps(item)]
        scaler = scaler_in_use()
        parts: list[Any] = [*filter(_has_state, optimizers), *schedulers, *([] if scaler is None else [scaler])]
        has = [id(part) in objects or any(_is_state_of(part, item) for item in dicts) for part in parts]
        if not any(has) and not self._counts_steps(dicts, names):
            return ""
        missing = [type(part).__name__ for part, is_saved in zip(parts, has, strict=True) if not is_saved]
        if not missing:
            return ""
        where = next(filter(None, names), "the saved file")
        reason = "another part of the training" if any(has) else "the number of a step"
        return f"{where}, which has the model and {reason}, lacks the state of {listed(missing, 3)}"

    def _is_of_model(self, item: Mapping[Any, Any]) -> bool:
        """Return whether a dict has all parameters of the model that learn, perhaps with a prefix."""
        names = [name for name, one in self._model.named_parameters() if one.requires_grad]
        keys = {str(key).removeprefix("module.").removeprefix("_orig_mod.") for key in item}
        return bool(names) and keys.issuperset(names)

    @staticmethod
    def _counts_steps(dicts: list[Mapping[Any, Any]], names: list[str]) -> bool:
        """Return whether a file without optimizer is one to continue from, and not that of a chosen model."""
        keys = {str(key).lower() for item in dicts for key in item}
        if LIGHTNING in keys or any(part in name for part in FOR_INFERENCE for name in names):
            return False
        numbers = {str(key).lower() for item in dicts for key, value in item.items() if type(value) is int}
        floats = {str(key).lower() for item in dicts for key, value in item.items() if type(value) is float}
        return bool(numbers & COUNTERS) and not any(part in key for part in SCORES for key in floats)


def _has_state(optimizer: Optimizer) -> bool:
    return any(isinstance(one, Tensor) and one.ndim for state in optimizer.state.values() for one in state.values())


def _steps(scheduler: Any) -> bool:
    """Return whether a schedule was stepped, which its construction does once."""
    return int(getattr(scheduler, "last_epoch", 0)) > 0


def _is_state_of(part: Any, saved: Mapping[Any, Any]) -> bool:
    """Return whether a dict is the state dict of an optimizer, a schedule or a scaler, or has the tensors of one."""
    if isinstance(part, Optimizer):
        own = {id(one) for state in part.state.values() for one in state.values() if isinstance(one, Tensor)}
        return {"state", "param_groups"} <= saved.keys() or any(id(item) in own for item in saved.values())
    return bool(saved) and set(part.state_dict()) <= set(saved)
