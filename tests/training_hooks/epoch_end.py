"""A context as hooks see it at POST_EPOCH, made by hand around a model."""

from typing import Any

from loopscope.hooks import ForwardResult, HookPoint, ObserverServices, RunDataContext
from loopscope.training import Profiler, Ranks
from torch import Tensor, nn


def no_gradients(batch: Any) -> dict[str, Tensor]:
    raise AssertionError("this context has no loss to differentiate")


def epoch_end(model: nn.Module, **fields: Any) -> RunDataContext:
    services = ObserverServices(
        forward=lambda inputs, capture, train: ForwardResult(
            model(*inputs) if isinstance(inputs, tuple) else model(inputs), {}
        ),
        batch_gradients=no_gradients,
        evaluate=lambda weights: {},
        optimizer_groups=tuple,
        last_metrics=lambda point: {},
        ranks=Ranks(),
    )
    settings: dict[str, Any] = {"hook_point": HookPoint.POST_EPOCH, "epoch": 0, "step": 1, **fields}
    return RunDataContext(model=model, config=None, loader=None, services=services, profiler=Profiler(), **settings)
