"""Context managers that change buffers, modes, gradients or weights temporarily and always restore them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad_mode

from ..errors import LoopscopeError, unknown
from ..state import EXTRAS, ModuleOrGroup, TrainingState, nested
from ..state.parameter_groups import learning_rate_of
from ..tensors import fully_sharded_modules, is_wrapper
from .guardian import copy_each


@contextmanager
def _borrowed(owners: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    """Set one attribute of all ``owners`` for the body, and restore its values."""
    previous = [(owner, getattr(owner, name)) for owner in owners]
    try:
        for owner, _ in previous:
            setattr(owner, name, value)
        yield
    finally:
        for owner, item in previous:
            if getattr(owner, name) is not item:
                setattr(owner, name, item)


def borrowed_modes(owner: ModuleOrGroup, *, train: bool) -> AbstractContextManager[None]:
    """Set every module to train or eval mode for the body, and restore the modes."""
    # Attributes are set directly, since a model may override train() to keep parts of it in eval mode.
    return _borrowed(owner.modules(), "training", train)


def borrowed_gradients(owner: ModuleOrGroup) -> AbstractContextManager[None]:
    """Run the body without gradients on the parameters of ``owner``, and restore them afterwards."""
    return _borrowed(owner.parameters(), "grad", None)


@contextmanager
def suspended_accumulation_hooks(owner: ModuleOrGroup) -> Iterator[None]:
    """Run the body without the hooks that parameters call after a gradient has accumulated.

    They may step an optimizer within the backward pass, or average gradients over processes, which a measurement must
    not do. Hooks on the gradients themselves still run.
    """
    # Private: torch has no public function that lists these hooks. C++ reads this dict in every backward pass.
    tables = [table for parameter in owner.parameters() if (table := parameter._post_accumulate_grad_hooks)]
    hooks = [dict(table) for table in tables]
    try:
        for table in tables:
            table.clear()
        yield
    finally:
        for table, previous in zip(tables, hooks, strict=True):
            table.update(previous)


@contextmanager
def borrowed_extras(state: TrainingState) -> Iterator[None]:
    """Restore, after the body, the declared state of strategy and experiment, if it has changed."""
    states = {name: extra.state_dict() for name, extra in state.extras.items()}
    if not any(states.values()):
        yield
        return
    previous, tensors = state.digest([EXTRAS]), [leaf for _, leaf in nested("", states) if isinstance(leaf, Tensor)]
    copies = [tensor.detach().clone() for tensor in tensors]
    # Tensors are not copied here: load_state_dict may keep a reference to the very tensors.
    kept = deepcopy(states, {id(tensor): tensor for tensor in tensors})
    # Copying the bytes back would count as a write, as in :class:`.ModulesCopy`.
    with grad_mode._unsafe_preserve_version_counter(tuple(tensors)):
        try:
            yield
        finally:
            if state.digest([EXTRAS]) != previous:
                copy_each(tensors, copies)
                for name, extra in state.extras.items():
                    extra.load_state_dict(kept[name])


@contextmanager
def borrowed_group_options(
    groups: Sequence[dict[str, Any]], learning_rates: Sequence[float] | None, rate_factor: float, decay: float | None
) -> Iterator[None]:
    """Set the learning rates of the parameter groups, or multiply them, and set their weight decay, for the body.

    Raises:
        LoopscopeError: unless there is one learning rate for each group, and each one to change is a number.
    """
    if learning_rates is not None and len(learning_rates) != len(groups):
        raise LoopscopeError(
            f"take_step was given {len(learning_rates)} learning rates, but the optimizer has {len(groups)} parameter "
            "groups; pass one for each group."
        )
    changes_rates = learning_rates is not None or rate_factor != 1
    for index, group in enumerate(groups):
        if changes_rates and math.isnan(float(learning_rate_of(group))):
            raise LoopscopeError(
                f"Parameter group {index} has no numeric learning rate (lr={group.get('lr')!r}), so take_step cannot "
                "change it; call it without learning_rates and rate_factor, or give the optimizer a learning rate."
            )
    names: list[str] = ["lr", "weight_decay"]
    previous = [{name: group[name] for name in names if name in group} for group in groups]
    try:
        for index, (group, options) in enumerate(zip(groups, previous, strict=True)):
            if learning_rates is not None:
                # A capturable or compiled optimizer keeps its learning rate in a tensor.
                rate = learning_rates[index]
                group["lr"] = torch.full_like(options["lr"], rate) if isinstance(options["lr"], Tensor) else rate
            if rate_factor != 1:
                group["lr"] = group["lr"] * rate_factor
            if decay is not None and "weight_decay" in group:
                group["weight_decay"] = decay
        yield
    finally:
        for group, options in zip(groups, previous, strict=True):
            group.update(options)


@contextmanager
def borrowed_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace the named parameters and buffers, under all names of each, by other tensors for the body.

    The live tensors are not written to: the entries of the modules' tables are exchanged. References that modules keep
    outside of their tables, as recurrent ones do, are restored by :func:`.undone_in_modules`, which must be entered
    before. Tensors are converted to the dtype and device of the originals.

    Raises:
        LoopscopeError: for an unknown name, a different shape, and under FSDP2, whose wrappers hold separate references
            to the parameters.
    """
    if fully_sharded_modules(model):
        raise LoopscopeError(
            "The weights of a model under FSDP2 (fully_shard) cannot be replaced: FSDP2 gathers the parameters that it "
            "was created with. Evaluate a copy of the model that is not sharded."
        )
    replacements = _replacements(model, weights)
    tables: list[Any] = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    contents = [(table, table.copy()) for table in tables]
    try:
        for table, previous in contents:
            table.update({key: replacements[id(live)] for key, live in previous.items() if id(live) in replacements})
        yield
    finally:
        for table, previous in contents:
            table.clear()
            table.update(previous)


def _replacements(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[int, Any]:
    """Return the replacements by the id of the live tensor: parameters for parameters."""
    live: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    replacements: dict[int, Any] = {}
    for name, value in weights.items():
        if name not in live:
            raise unknown("weight", name, live)
        live_tensor = live[name]
        if value.shape != live_tensor.shape:
            raise LoopscopeError(
                f"The replacement of {name!r} has shape {tuple(value.shape)}, but the model's weight has "
                f"{tuple(live_tensor.shape)}; pass a tensor of that shape."
            )
        replacement = value.detach().to(device=live_tensor.device, dtype=live_tensor.dtype)
        # Parameters are replaced by parameters, since modules may check isinstance() before they use one.
        if isinstance(live_tensor, nn.Parameter):
            replacement = nn.Parameter(replacement, live_tensor.requires_grad)
        if not is_wrapper(live_tensor):
            vars(replacement).update(vars(live_tensor))  # attributes that a forward pass may read
        replacements[id(live_tensor)] = replacement
    return replacements
