"""The law that the state dict of a model determines its outputs."""

from copy import deepcopy
from typing import Any

import torch
from torch import nn

from ...errors import listed
from ..constructions import constructed_again
from ..law import Law, Outcome, broken, holds, not_checked
from ..recording import is_function
from ..rows import UndecidedError
from ..trial import Trial
from ..values import has_parameters


class CheckpointIsComplete(Law):
    """Load the state dict into other models, and compare their outputs.

    They are a copy of the model from an earlier step and, in ``loopscope check``, one that is constructed again with
    the same arguments and other random numbers. What the script itself saves is compared with the state of its
    training, if it saves anything by ``torch.save`` while it is watched.
    """

    name = "checkpoint_is_complete"
    statement = "checkpoints have all that outputs and later steps depend on"
    remedy = (
        "register the state as a buffer or a parameter, or return it by get_extra_state; save the state dicts of "
        "optimizer, schedule and scaler with that of the model"
    )

    def __init__(self) -> None:
        self._earlier: nn.Module | None = None

    def check(self, trial: Trial) -> Outcome:
        """Keep a copy at the first step; compare at the next one."""
        if is_function(trial.model):
            return not_checked("the model is no module with a state dict; its files are not compared")
        if hidden := _hidden_modules(trial.model):
            return broken(f"the state dict lacks the modules in {listed(hidden, 3)}, a plain list or dict")
        earlier, self._earlier = self._earlier, None
        if earlier is None:
            with trial.branch():
                self._earlier = deepcopy(trial.model)
            return self._constructed(trial)
        outcome = self._compare(trial, earlier)
        return outcome or holds()

    def _constructed(self, trial: Trial) -> Outcome:
        """Compare with a model that is constructed again; one whose class is changed afterwards is not checked."""
        try:
            with trial.branch():
                new = constructed_again(trial.model)
                _copy_numbers(trial.model, new)
                outcome = self._compare(trial, new, needs_names=True)
        except (UndecidedError, RuntimeError, ValueError):  # of load_state_dict or zip, for other modules
            return not_checked("")
        return outcome or not_checked("")

    def _compare(self, trial: Trial, other: nn.Module, *, needs_names: bool = False) -> Outcome | None:
        """Load the state dict into another model, and return a violation if its outputs differ."""
        other.load_state_dict(trial.model.state_dict())
        for module in other.modules():
            module.training = False
        pairs = dict(zip(trial.model.modules(), other.modules(), strict=True))
        loaded = trial.evaluate(needs_loss=False, train=False, modules=pairs).outputs
        original = trial.evaluate(needs_loss=False, train=False).outputs
        for one, two in zip(original, loaded, strict=True):
            if one.shape == two.shape and torch.equal(one.nan_to_num(), two.nan_to_num()):
                continue
            names = [
                name or "the model"
                for (name, module), copy in zip(trial.model.named_modules(), pairs.values(), strict=True)
                if _plain(module) != _plain(copy)
            ]
            if needs_names and not names:  # hooks of the script, for example
                return None
            size = float((one.double() - two.double()).abs().max()) if one.shape == two.shape else float("nan")
            where = f"; attributes of {listed(names, 3)} differ" if names else ""
            return broken(f"with the state dict loaded, an output differs by {size:.1e}{where}")
        return None


def _copy_numbers(model: nn.Module, other: nn.Module) -> None:
    """Copy numbers and texts from the modules of a model to those of another: a script may set hyperparameters.

    Raises:
        ValueError: the models have different modules.
    """
    for one, two in zip(model.modules(), other.modules(), strict=True):
        for name, value in vars(one).items():
            if isinstance(value, (bool, int, float, str)) and not name.startswith("_"):
                vars(two)[name] = value


def _hidden_modules(model: nn.Module) -> list[str]:
    """Return the attributes that have modules with parameters in plain containers, which no state dict contains."""
    if type(model) is nn.ModuleList:  # of several modules that an optimizer trains
        return [name for item in model for name in _hidden_modules(item)]
    known = {id(item) for item in model.modules()}
    found = []
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or not isinstance(value, (list, tuple, dict)):
                continue
            items = value.values() if isinstance(value, dict) else value
            if any(isinstance(one, nn.Module) and id(one) not in known and has_parameters(one) for one in items):
                found.append(f"{name}.{attribute}".removeprefix("."))
    return found


def _plain(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that no state dict contains, as comparable values."""
    internal = {"training", *vars(nn.Module())}
    named = {name: value for name, value in vars(module).items() if name not in internal}
    named |= {name: module._buffers[name] for name in module._non_persistent_buffers_set}
    return {name: _comparable(value) for name, value in named.items()}


def _comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.numel() < 10_000 else float(value.double().sum())
    if isinstance(value, (list, tuple)):
        return [_comparable(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _comparable(item) for key, item in value.items()}
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__
