"""What FSDP2 (``fully_shard``) keeps beside a model: what is gathered and under way, and what it was told to do."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..errors import LoopscopeError
from .attributes import refill

_PLAIN = (bool, int, float, str, Enum, type(None))
_UNDER_WAY = frozenset({"_modules_to_run_forward", "_post_forward_indices", "post_forward_order"})
"""What a forward pass fills and a whole backward pass empties."""
_UNREDUCED = ("unsharded_accumulated_grad", "_partial_reduce_output")
_GATHERED = "_unsharded_param"


def fully_sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules that FSDP2 (``fully_shard``) gathers before their forward and scatters after backward."""
    # A model can only have been wrapped where this has been imported.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


@contextmanager
def resharded_afterwards(model: nn.Module) -> Iterator[None]:
    """Scatter what FSDP2 gathered for a forward without backward: its root would go on with the gathered copy.

    Left alone, that copy would replace the sharded parameters in ``model.parameters()``, and the next forward would
    use it whatever the optimizer did to the shards in between.
    """
    try:
        yield
    finally:
        for module in fully_sharded_modules(model):
            module.reshard()


class ShardingState(NamedTuple):
    """What the objects of FSDP2 held: attributes, the containers among these, gradients of gathered parameters."""

    spaces: list[dict[str, Any]]
    containers: list[tuple[Any, list[Any], list[Any]]]
    gradients: list[Tensor | None]

    def pending(self) -> list[Tensor]:
        """Return the gradients that are not yet reduced, whose bytes are training state."""
        parts = [space.get(key) for space in self.spaces for key in _UNREDUCED]
        return [item for item in (*self.gradients, *parts) if item is not None]


class FullSharding:
    """The objects in which FSDP2 keeps what it does; none for a model without it.

    They hang on no module, and are private: there is no public way to ask for what is under way or has been set. Read
    are their plain attributes, whichever this version of torch has.
    """

    def __init__(self, model: nn.Module) -> None:
        """Let FSDP2 set up now what it sets up at the first forward, which no rollback shall undo."""
        states = [module._get_fsdp_state() for module in fully_sharded_modules(model)]
        for state in states:
            state._lazy_init()  # a second call does nothing
        # of several groups each since torch 2.12
        groups = [vars(state).get("_fsdp_param_groups") or [state._fsdp_param_group] for state in states]
        self._groups = [group for each in groups for group in each if group is not None]
        found = [item for state in states for item in (state, state._state_ctx, state._comm_ctx)]
        found += [item for group in self._groups for item in (group, *group.fsdp_params)]
        found = [*dict.fromkeys(found)]
        self._spaces = [vars(item) for item in found]
        self._parameters = [space for space in self._spaces if "sharded_param" in space]
        self._others = others = [space for space in self._spaces if "sharded_param" not in space]
        self._plain = [(space, key) for space in others for key, value in space.items() if isinstance(value, _PLAIN)]
        self._phases = [space for space in others if "_training_state" in space]
        self._under_way = [(space, key) for space in others for key in _UNDER_WAY & space.keys()]

    def __bool__(self) -> bool:
        """Return whether any module is under fully_shard."""
        return bool(self._spaces)

    def refuse_gathered(self) -> None:
        """Raise :class:`LoopscopeError` where a forward pass without backward has left weights gathered.

        The next step would compute with this copy of them, which no rollback could keep.
        """
        if any(not group.is_sharded for group in self._groups):
            raise LoopscopeError(
                "Weights under fully_shard are still gathered, as a forward pass without backward leaves them, so that "
                "nothing could be rolled back here, and the next step would train by weights from before the last "
                "update. Call model.reshard() after such a pass, or evaluate by scope.evaluate."
            )

    def read(self) -> tuple[Any, ...]:
        """Return what is under way and what FSDP2 was told, and what hangs on gathered parameters."""
        gathered = [space[_GATHERED] for space in self._parameters if _GATHERED in space]
        hanging = [(item.grad, item._backward_hooks, item._post_accumulate_grad_hooks) for item in gathered]
        loaded = [each for each in hanging if each[0] is not None or each[1] or each[2]]
        return (*[space.get(key) for space, key in self._plain], *loaded)

    def scatter(self) -> None:
        """End what a pass that raised left under way, and free the gathered parameters."""
        for group in self._groups:
            group._to_sharded()  # reshard() does nothing amid a forward pass
        for space in self._phases:
            space["_training_state"] = type(space["_training_state"]).IDLE
        for space, key in self._under_way:
            space[key].clear()

    def restore_settings(self, before: tuple[Any, ...]) -> None:
        """Put back what :meth:`read` returned, but for what hangs on gathered parameters."""
        pairs = zip(self._plain, before, strict=False)
        changed = [(space, key, value) for (space, key), value in pairs if space.get(key) is not value]
        if any(isinstance(value, Enum) for *_, value in changed):  # or amid the run's own pass a tap would end it
            self.scatter()
        for space, key, value in changed:
            space[key] = value

    def save(self) -> ShardingState:
        """Return what all objects hold, by reference."""
        spaces = [space.copy() for space in self._spaces]
        held = [value for space in self._others for value in space.values() if type(value) in (list, dict, set)]
        containers = [(item, [*item], [*item.values()] if isinstance(item, dict) else [*item]) for item in held]
        gathered = [space.get(_GATHERED) for space in self._parameters]
        return ShardingState(spaces, containers, [None if item is None else item.grad for item in gathered])

    def restore(self, saved: ShardingState) -> None:
        """Make all objects hold what they held; gathered parameters without a gradient are made anew when needed."""
        self.scatter()
        for space, before in zip(self._spaces, saved.spaces, strict=True):
            refill(space, before.keys(), before.values())
        for container, keys, values in saved.containers:
            refill(container, keys, values)
        for space, gradient in zip(self._parameters, saved.gradients, strict=True):
            if gradient is not None:
                space[_GATHERED].grad = gradient
            elif _GATHERED in space:  # a hook, or other bytes, may have been left on it
                del space[_GATHERED]
                space["all_gather_outputs"] = []
