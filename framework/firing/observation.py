"""What an observer may ask for beyond reading fields: a forward pass, and the optimizer's settings."""

from collections.abc import Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ..errors import unknown
from ..hooks import ForwardResult, OptimizerGroup
from ..isolation import borrowed_buffers, borrowed_modes
from ..state import TrainingState, gathered_for_a_while


def forward_pass(state: TrainingState, inputs: Any, capture: Sequence[str], train: bool) -> ForwardResult:
    """Run the model without gradients, leaving modes, buffers, module hooks and streams as they were.

    Captured outputs are copies, made before a later module can write to them; a module called more than once gives
    its last output.
    """
    model = state.model
    modules = dict(model.named_modules(remove_duplicate=False))
    captured: dict[str, Any] = {}
    for name in capture:
        if name not in modules:
            raise unknown("module", name, modules)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(state.streams.isolated())
        stack.enter_context(borrowed_buffers(model))
        stack.enter_context(borrowed_modes(model, train=train))
        stack.enter_context(gathered_for_a_while(model))
        for name in capture:
            handle = modules[name].register_forward_hook(_keeper(captured, name))
            stack.callback(handle.remove)
        output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    return ForwardResult(output, captured)


def _keeper(captured: dict[str, Any], name: str) -> Any:
    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        captured[name] = tree_map_only(Tensor, Tensor.clone, output)

    return keep


def optimizer_groups(model: nn.Module, optimizer: Optimizer) -> tuple[OptimizerGroup, ...]:
    """Copy the optimizer's parameter groups into frozen views."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return tuple(
        OptimizerGroup(
            names=tuple(names[parameter] for parameter in group["params"] if parameter in names),
            lr=float(group["lr"]),
            weight_decay=float(group.get("weight_decay", 0.0)),
            betas=tuple(group["betas"]) if "betas" in group else None,  # type: ignore[arg-type]
            options=MappingProxyType(
                {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in group.items()
                    if key != "params"
                }
            ),
        )
        for group in optimizer.param_groups
    )
