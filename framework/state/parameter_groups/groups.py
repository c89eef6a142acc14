"""Parameter groups of optimizers, which ranks may split by device mesh, and the lists of schedulers by group."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

SPLIT_FROM = "split_from"
"""Key of a parameter group that gives the index of the original group, before ranks split it."""
BY_GROUP = frozenset({"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"})
"""Attributes of torch's schedulers that are lists with one item per parameter group."""


def split_groups(optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
    """Split parameter groups by device mesh, because a fused kernel cannot update tensors of different meshes.

    Each new group stores the index of its original group, so that checkpoints can merge them. Lists of a scheduler with
    one entry per group are expanded accordingly.
    """
    groups: list[dict[str, Any]] = []
    count = len(optimizer.param_groups)
    for index, group in enumerate(optimizer.param_groups):
        by_mesh: dict[Any, list[Any]] = {}
        for parameter in group["params"]:
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        groups += [{**group, "params": parameters, SPLIT_FROM: index} for parameters in by_mesh.values()]
    optimizer.param_groups[:] = groups
    schedulers = [] if scheduler is None else [scheduler, *getattr(scheduler, "_schedulers", ())]
    for item in schedulers:
        for name in BY_GROUP & vars(item).keys():
            if isinstance(values := getattr(item, name), list) and len(values) == count:
                setattr(item, name, [values[group[SPLIT_FROM]] for group in groups])


# The next four also read optimizers that a misbehaving hook has broken: the hook's change is reported, and the end of
# the run, which reads the state again, must not raise another error.


def moments_of(optimizer: Any) -> Mapping[Any, Any]:
    """Return the state of an optimizer by parameter; empty if a hook has replaced it by something else."""
    state = getattr(optimizer, "state", None)
    return state if isinstance(state, Mapping) else {}


def groups_of(optimizer: Any) -> Sequence[Any]:
    """Return the parameter groups of an optimizer; empty if a hook has replaced them by something else."""
    groups = getattr(optimizer, "param_groups", None)
    return groups if isinstance(groups, (list, tuple)) else ()


def parameters_of(group: Any) -> Iterable[Any]:
    """Return the parameters of a group; none if it is no group, or its parameters are no list."""
    items = group.get("params") if isinstance(group, Mapping) else None
    return items if isinstance(items, Iterable) and not isinstance(items, (Tensor, str)) else ()


def trained_by(optimizer: Any) -> list[Any]:
    """Return the parameters of all groups of an optimizer."""
    return [item for group in groups_of(optimizer) for item in parameters_of(group)]


def original_groups(optimizer: Any) -> list[int]:
    """Return, for each group of an optimizer, the index of its original group before ranks split it."""
    groups = groups_of(optimizer) if isinstance(optimizer, Optimizer) else []
    return [group.get(SPLIT_FROM, index) for index, group in enumerate(groups)]


def regrouped(form: Any, count: int, positions: Sequence[int]) -> Any:
    """Return a scheduler's plain form; lists of one item per group (``count``) keep the items at ``positions``."""
    if isinstance(form, list):
        return [regrouped(item, count, positions) for item in form]
    if not isinstance(form, Mapping):
        return form
    items_by_key = {key: regrouped(item, count, positions) for key, item in form.items()}
    for key in BY_GROUP & items_by_key.keys():
        if isinstance(form[key], Mapping) and len(items := form[key].get("list", ())) == count:
            items_by_key[key] = {"list": [items[position] for position in positions]}
    return items_by_key
