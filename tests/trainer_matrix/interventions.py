"""Interventions whose changes are rolled back."""

import gc
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from loopscope.hooks import HookPoint, InterventionHook, MetricInfo

POINTS = frozenset(HookPoint) - {HookPoint.PRE_UPDATE}


class Idle(InterventionHook):
    """An intervention that changes nothing."""

    name = "idle"
    hook_points = POINTS

    def intervene(self, run_ctx: Any, model_ctx: Any) -> Mapping[str, Any]:
        """Report a constant."""
        return {"value": 1.0}

    def describe_metrics(self) -> list[MetricInfo]:
        """Describe nothing; the metrics are not documented."""
        return []


class Restless(Idle):
    """An intervention that draws random numbers, and changes weights, buffers, gradients, modes and the optimizer."""

    name = "restless"

    def __init__(self) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []

    def intervene(self, run_ctx: Any, model_ctx: Any) -> Mapping[str, Any]:
        """Change what training depends on."""
        torch.rand(3), np.random.rand(3), random.random()
        model = model_ctx.model
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if not isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
                    tensor.zero_()
        for parameter in model.parameters():
            parameter.grad = None
        model.eval()
        for optimizer in self.optimizers_of(model):
            for group in optimizer.param_groups:
                group["lr"], group["added"] = 7.0, True
            for moments in optimizer.state.values():
                for value in moments.values() if isinstance(moments, dict) else ():
                    if type(value) is torch.Tensor:
                        value.zero_()
        return {"value": 2.0}

    def optimizers_of(self, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
        """Return the optimizers of a model, which no context gives to a hook, as a careless script might find them."""
        parameters = {*map(id, model.parameters())}
        if not self.optimizers:
            found = [item for item in gc.get_objects() if issubclass(type(item), torch.optim.Optimizer)]
            self.optimizers = [item for item in found if parameters & {*map(id, item.param_groups[0]["params"])}]
        return self.optimizers
