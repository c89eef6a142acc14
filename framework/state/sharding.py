"""The state of FSDP2 (``fully_shard``) outside of a model: gathered parameters, pending work and settings."""

from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import LoopscopeError
from ..tensors import fully_sharded_modules
from .module_group import ModuleOrGroup
from .values import refill

_PLAIN = (bool, int, float, str, Enum, type(None))
_UNDER_WAY = frozenset({"_modules_to_run_forward", "_post_forward_indices", "post_forward_order"})
"""Containers that a forward pass fills and a complete backward pass empties."""
_UNREDUCED = ("unsharded_accumulated_grad", "_partial_reduce_output")
_GATHERED = "_unsharded_param"


class ShardingState(NamedTuple):
    """Saved contents of FSDP2's objects: attributes, containers in them, gradients of gathered parameters."""

    spaces: list[dict[str, Any]]
    containers: list[tuple[Any, list[Any], list[Any]]]
    gradients: list[Tensor | None]

    def pending(self) -> list[Tensor]:
        """Return the gradients that are not yet reduced; their bytes are training state."""
        parts = [space.get(key) for space in self.spaces for key in _UNREDUCED]
        return [item for item in (*self.gradients, *parts) if item is not None]


class FullSharding:
    """The private objects of FSDP2 with its pending work and settings; empty for a model without FSDP2.

    No module holds these objects, and no public function returns pending work or settings. All plain attributes that
    the installed version of torch has are read.
    """

    def __init__(self, model: ModuleOrGroup) -> None:
        """Run FSDP2's lazy initialisation now instead of at the first forward pass, so that no rollback undoes it."""
        states = [module._get_fsdp_state() for module in fully_sharded_modules(model)]
        for state in states:
            state._lazy_init()  # a second call does nothing
        # since torch 2.12 a module may have several groups
        groups = [vars(state).get("_fsdp_param_groups") or [state._fsdp_param_group] for state in states]
        self._groups = [group for module_groups in groups for group in module_groups if group is not None]
        objects = [item for state in states for item in (state, state._state_ctx, state._comm_ctx)]
        objects += [item for group in self._groups for item in (group, *group.fsdp_params)]
        objects = [*dict.fromkeys(objects)]
        self._spaces = [vars(item) for item in objects]
        self._parameters = [space for space in self._spaces if "sharded_param" in space]
        self._others = others = [space for space in self._spaces if "sharded_param" not in space]
        self._plain = [(space, key) for space in others for key, value in space.items() if isinstance(value, _PLAIN)]
        self._phases = [space for space in others if "_training_state" in space]
        self._under_way = [(space, key) for space in others for key in _UNDER_WAY & space.keys()]

    def __bool__(self) -> bool:
        """Return whether any module is under ``fully_shard``."""
        return bool(self._spaces)

    def refuse_gathered(self) -> None:
        """Raise :class:`LoopscopeError` if a forward pass without backward has left weights gathered.

        The next step would compute with the gathered copy, which a rollback cannot preserve.
        """
        if any(not group.is_sharded for group in self._groups):
            raise LoopscopeError(
                "Weights under fully_shard are still gathered after a forward pass without backward, so nothing can be "
                "rolled back here, and the next step would use weights from before the last update. Call "
                "model.reshard() after such a pass, or evaluate with scope.evaluate."
            )

    def gathered(self) -> list[Any]:
        """Return the gathered parameters, which autograd graphs hold; between passes their storage is freed."""
        return [space[_GATHERED] for space in self._parameters if _GATHERED in space]

    def read(self) -> tuple[Any, ...]:
        """Return pending work, settings, and gradients and hooks of gathered parameters."""
        attached = [(item.grad, item._backward_hooks, item._post_accumulate_grad_hooks) for item in self.gathered()]
        loaded = [entry for entry in attached if entry[0] is not None or entry[1] or entry[2]]
        return (*[space.get(key) for space, key in self._plain], *loaded)

    def scatter(self) -> None:
        """Cancel the pending work of a pass that raised, and free the gathered parameters."""
        for group in self._groups:
            group._to_sharded()  # reshard() does nothing during a forward pass
        for space in self._phases:
            # FSDP2's enum of phases is private; reading its class from the value needs no import.
            space["_training_state"] = type(space["_training_state"]).IDLE
        for space, key in self._under_way:
            space[key].clear()

    def restore_settings(self, previous: tuple[Any, ...]) -> None:
        """Restore the result of :meth:`read`, except gradients and hooks of gathered parameters."""
        pairs = zip(self._plain, previous, strict=False)
        changed = [(space, key, value) for (space, key), value in pairs if space.get(key) is not value]
        # Only for a changed phase (an enum): otherwise a tap during the run's pass would cancel the pass.
        if any(isinstance(value, Enum) for *_, value in changed):
            self.scatter()
        for space, key, value in changed:
            space[key] = value

    def save(self) -> ShardingState:
        """Return the contents of all objects, by reference."""
        spaces = [space.copy() for space in self._spaces]
        values = [value for space in self._others for value in space.values() if type(value) in (list, dict, set)]
        containers = [(item, [*item], [*item.values()] if isinstance(item, dict) else [*item]) for item in values]
        gathered = [space.get(_GATHERED) for space in self._parameters]
        return ShardingState(spaces, containers, [None if item is None else item.grad for item in gathered])

    def restore(self, saved: ShardingState) -> None:
        """Restore the contents of all objects; FSDP2 recreates gathered parameters without a gradient when needed."""
        self.scatter()
        for space, previous in zip(self._spaces, saved.spaces, strict=True):
            refill(space, previous.keys(), previous.values())
        for container, keys, values in saved.containers:
            refill(container, keys, values)
        for space, gradient in zip(self._parameters, saved.gradients, strict=True):
            if gradient is not None:
                space[_GATHERED].grad = gradient
            elif _GATHERED in space:  # it may have hooks, or changed bytes
                del space[_GATHERED]
                space["all_gather_outputs"] = []
