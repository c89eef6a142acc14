"""The law that the state dict of a model determines its outputs."""

from copy import deepcopy
from typing import Any

import torch
from torch import nn

from ...errors import listed
from ..law import Law, LawRegistry, Outcome, broken, holds, not_checked
from ..trial import Trial


@LawRegistry.register
class CheckpointIsComplete(Law):
    """Load the state dict of a later step into a copy of the model from an earlier step, and compare their outputs."""

    name = "checkpoint_is_complete"
    statement = "the state dict is all that outputs depend on"
    remedy = "register the state as a buffer or a parameter, or return it by get_extra_state"

    def __init__(self) -> None:
        self._earlier: nn.Module | None = None

    def check(self, trial: Trial) -> Outcome:
        """Keep a copy at the first step; compare at the next one."""
        if hidden := _hidden_modules(trial.model):
            return broken(f"the state dict lacks the modules in {listed(hidden, 3)}, a plain list or dict")
        earlier, self._earlier = self._earlier, None
        if earlier is None:
            with trial.branch():
                self._earlier = deepcopy(trial.model)
            return not_checked("")
        earlier.load_state_dict(trial.model.state_dict())
        for module in earlier.modules():
            module.training = False
        pairs = dict(zip(trial.model.modules(), earlier.modules(), strict=True))
        loaded = trial.evaluate(needs_loss=False, train=False, modules=pairs).outputs
        original = trial.evaluate(needs_loss=False, train=False).outputs
        for one, other in zip(original, loaded, strict=True):
            if not torch.equal(one.nan_to_num(), other.nan_to_num()):
                size = float((one.double() - other.double()).abs().max())
                names = [
                    name
                    for (name, module), copy in zip(trial.model.named_modules(), pairs.values(), strict=True)
                    if _plain(module) != _plain(copy)
                ]
                where = f"; attributes of {listed([name or 'the model' for name in names], 3)} differ" if names else ""
                return broken(f"with the state dict loaded, an output differs by {size:.1e}{where}")
        return holds()


def _hidden_modules(model: nn.Module) -> list[str]:
    """Return the attributes that have modules with parameters in plain containers, which no state dict contains."""
    known = {id(item) for item in model.modules()}
    found = []
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or not isinstance(value, (list, tuple, dict)):
                continue
            items = value.values() if isinstance(value, dict) else value
            if any(isinstance(one, nn.Module) and id(one) not in known and _has_parameters(one) for one in items):
                found.append(f"{name}.{attribute}".removeprefix("."))
    return found


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _plain(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that no state dict contains, as comparable values."""
    internal = {"training", *vars(nn.Module())}
    return {name: _comparable(value) for name, value in vars(module).items() if name not in internal}


def _comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.numel() < 10_000 else float(value.double().sum())
    if isinstance(value, (list, tuple)):
        return [_comparable(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _comparable(item) for key, item in value.items()}
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__
