"""Borrowing from the training state: buffers, modes and gradients that are lent and put back, whatever happens."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import LoopscopeError, unknown
from ..state import ATOMS, NATIVE, Structure, fully_sharded_modules, gathered_for_a_while


@contextmanager
def borrowed_buffers(model: nn.Module) -> Iterator[None]:
    """Let the body write to clones of the buffers; the true ones are put back, untouched, afterwards.

    What the body sets on modules, or puts into containers that hang on them, as a forward pass that keeps its attention
    weights does, is put back as well.
    """
    modules = list(model.modules())
    tables = [table for module in modules for table in (vars(module), module._buffers)]
    own = [item for module in modules for key, item in vars(module).items() if key not in NATIVE]
    inside = Structure([item for item in own if type(item) not in ATOMS], apart={*map(id, modules)})
    contents = [table.copy() for table in tables]
    clones: dict[int, torch.Tensor] = {}
    try:
        with torch.no_grad():
            for module in modules:
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        # Into the table, since a module may override setattr(); buffers that are shared stay so.
                        module._buffers[name] = clones.setdefault(id(buffer), buffer.clone())
        yield
    finally:
        for table, before in zip(tables, contents, strict=True):
            if len(table) != len(before) or any(map(is_not, table.values(), before.values())):
                table.clear()
                table.update(before)
        inside.put_back()


@contextmanager
def borrowed_modes(model: nn.Module, *, train: bool | None) -> Iterator[None]:
    """Put every module into train or eval mode for the body (``None``: leave the modes, but put them back)."""
    # Attributes are set one by one, since a model may override train() to keep parts of it in eval mode.
    modes = [(module, module.training) for module in model.modules()]
    try:
        if train is not None:
            for module, _ in modes:
                module.training = train
        yield
    finally:
        for module, mode in modes:
            if module.training is not mode:
                module.training = mode


@contextmanager
def borrowed_gradients(model: nn.Module) -> Iterator[None]:
    """Start the body without gradients; the true ones are put back afterwards."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def borrowed_learning_rates(groups: Sequence[dict[str, Any]], rates: Sequence[float] | None) -> Iterator[None]:
    """Give the optimizer's parameter groups these learning rates for the body (``None``: leave theirs).

    Raises :class:`LoopscopeError` unless there is one for each.
    """
    if rates is None:
        yield
        return
    if len(rates) != len(groups):
        raise LoopscopeError(
            f"take_step was given {len(rates)} learning rates, but the optimizer has {len(groups)} parameter groups; "
            "pass one for each."
        )
    before = [group["lr"] for group in groups]
    try:
        for group, held, rate in zip(groups, before, rates, strict=True):
            # A capturable or compiled optimizer keeps its rate in a tensor.
            group["lr"] = torch.full_like(held, rate) if isinstance(held, torch.Tensor) else rate
        yield
    finally:
        for group, held in zip(groups, before, strict=True):
            group["lr"] = held


@contextmanager
def borrowed_for_evaluation(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode for the body; modes, buffers, attributes and shards are put back."""
    with gathered_for_a_while(model), borrowed_buffers(model), borrowed_modes(model, train=False):
        yield


@contextmanager
def borrowed_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Put other tensors in the place of the named parameters and buffers for the body, under all names of each.

    The live tensors are not touched: the entries of the modules' tables are exchanged. What modules keep beside
    their tables, as recurrent ones do, is put back by :func:`borrowed_buffers`, to be entered before. Tensors are
    converted to dtype and device of those that they stand for. Raises :class:`LoopscopeError` for a name that the
    model lacks, a shape that differs, and under FSDP2, whose wrappers hold references of their own to the parameters.
    """
    if fully_sharded_modules(model):
        raise LoopscopeError(
            "Other weights cannot be lent to a model under FSDP2 (fully_shard): it gathers the parameters that it was "
            "given. Evaluate a copy of the model that is not sharded."
        )
    replacements = _replacements(model, weights)
    tables: list[Any] = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    contents = [(table, table.copy()) for table in tables]
    try:
        for table, before in contents:
            table.update({key: replacements[id(live)] for key, live in before.items() if id(live) in replacements})
        yield
    finally:
        for table, before in contents:
            table.clear()
            table.update(before)


def _replacements(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[int, Any]:
    """Return what to put in the place of each live tensor, by its id: parameters for parameters."""
    live: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    found: dict[int, Any] = {}
    for name, value in weights.items():
        if name not in live:
            raise unknown("weight", name, live)
        own = live[name]
        if value.shape != own.shape:
            raise LoopscopeError(
                f"The weight lent for {name!r} has shape {tuple(value.shape)}, but the model's has {tuple(own.shape)}."
            )
        lent = value.detach().to(device=own.device, dtype=own.dtype)
        # Parameters stand for parameters, since modules may ask isinstance() before they use one.
        found[id(own)] = nn.Parameter(lent, own.requires_grad) if isinstance(own, nn.Parameter) else lent
    return found
