"""Borrowing from the training state: buffers, modes and gradients that are lent and put back, whatever happens."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad_mode

from ..errors import LoopscopeError, unknown
from ..state import (
    EXTRAS,
    TensorIdentities,
    TrainingState,
    fully_sharded_modules,
    is_uninitialised,
    nested,
    reachable_from_modules,
    resharded_afterwards,
)
from .guardian import copy_each

_NOTHING = nn.Module()


@contextmanager
def borrowed_buffers(model: nn.Module) -> Iterator[None]:
    """Let the body write to clones of the buffers; the true ones are put back, untouched, afterwards.

    What else modules and hooks on them hold is put back as well: attributes, what containers and objects on them hold,
    the bytes of their tensors and of modules that are no children, arrays, generators.
    """
    modules = list(model.modules())
    tables = [table for module in modules for table in (vars(module), module._buffers)]
    contents = [table.copy() for table in tables]
    clones: dict[int, torch.Tensor] = {}
    with _borrowed_objects(modules), _borrowed_renormed(modules):
        try:
            with torch.no_grad():
                for module in modules:
                    for name, buffer in module._buffers.items():
                        if buffer is not None and not is_uninitialised(buffer):  # one without a shape has no bytes
                            # Into the table, since a module may override setattr(); buffers that are shared stay so.
                            module._buffers[name] = clones.setdefault(id(buffer), buffer.clone())
            yield
        finally:
            for table, before in zip(tables, contents, strict=True):
                if len(table) != len(before) or any(map(is_not, table.values(), before.values())):
                    table.clear()
                    table.update(before)


@contextmanager
def _borrowed_objects(modules: list[nn.Module]) -> Iterator[None]:
    """Put back, after the body, whatever hangs on modules beside their tables."""
    held = reachable_from_modules(modules)
    if not (held.tensors or held.natives):
        try:
            yield
        finally:
            held.restore()
        return
    # A tensor without a version is one of inference mode, which nothing can write to outside of it.
    tensors = [tensor for tensor in held.tensors if not tensor.is_inference()]
    identities, natives = TensorIdentities(tensors, persistent=False), held.read_natives()
    copies = [tensor.detach().clone() for tensor in identities.bytes]
    # Copying back counts as a write, though nothing is changed in the end: the counts are put back with the bytes.
    # torch keeps this for its own wrappers; there is no public way.
    with grad_mode._unsafe_preserve_version_counter(tuple(tensors)), borrowed_gradients(_NOTHING, identities.owners):
        try:
            yield
        finally:
            held.restore()
            held.write_natives(natives)
            with torch.no_grad():
                identities.restore()
            copy_each(identities.bytes, copies)


@contextmanager
def _borrowed_renormed(modules: list[nn.Module]) -> Iterator[None]:
    """Put back, after the body, weights of embeddings with a ``max_norm``: each forward pass shortens rows in place."""
    embeddings = [module for module in modules if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    found = [module._parameters.get("weight") for module in embeddings if module.max_norm is not None]
    weights: list[torch.Tensor] = [weight for weight in found if weight is not None]
    copies = [weight.detach().clone() for weight in weights]
    with grad_mode._unsafe_preserve_version_counter(tuple(weights)):  # as above
        try:
            yield
        finally:
            copy_each(weights, copies)


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
def borrowed_gradients(model: nn.Module, others: Iterable[Tensor] = ()) -> Iterator[None]:
    """Start the body without gradients; the true ones, those of other tensors too, are put back afterwards."""
    gradients = [(parameter, parameter.grad) for parameter in chain(model.parameters(), others)]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def borrowed_extras(state: TrainingState) -> Iterator[None]:
    """Put back, after the body, what strategy and experiment declare as their state, if it is another then."""
    states = {name: extra.state_dict() for name, extra in state.extras.items()}
    if not any(states.values()):
        yield
        return
    before, tensors = state.digest([EXTRAS]), [leaf for _, leaf in nested("", states) if isinstance(leaf, Tensor)]
    copies = [tensor.detach().clone() for tensor in tensors]
    # The tensors stay the ones they are, for those that load_state_dict takes over.
    kept = deepcopy(states, {id(tensor): tensor for tensor in tensors})
    with grad_mode._unsafe_preserve_version_counter(tuple(tensors)):
        try:
            yield
        finally:
            if state.digest([EXTRAS]) != before:
                copy_each(tensors, copies)
                for name, extra in state.extras.items():
                    extra.load_state_dict(kept[name])


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
    with resharded_afterwards(model), borrowed_buffers(model), borrowed_modes(model, train=False):
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
