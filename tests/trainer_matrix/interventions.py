"""Interventions whose changes are rolled back."""

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
        return {"value": 2.0}
