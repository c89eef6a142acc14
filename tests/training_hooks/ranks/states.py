"""State of hooks in the middle of a small training, and its restoration by equally many or fewer processes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from loopscope.engine import HookManager
from loopscope.loops import NoPauses
from loopscope.state import LoopState
from loopscope.state.digest import digest
from loopscope.tensors import is_sharded, unsharded
from torch import Tensor, nn

from tests.training_hooks.reloading import through_a_file

MIDDLE = 3
"""The step after which the state is recorded, inside an epoch and inside a window of two steps."""
AS_ITS_PARAMETER = "as its parameter"
Results = dict[str, Any]
Visit = Callable[[tuple[str, ...], Tensor], Any]


def each_tensor(visit: Visit, value: Any, path: tuple[str, ...] = ()) -> Any:
    """Return nested content with every tensor replaced by the result of ``visit(path, tensor)``."""
    if isinstance(value, Mapping):
        return {key: each_tensor(visit, item, (*path, str(key))) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(each_tensor(visit, item, (*path, str(index))) for index, item in enumerate(value))
    return visit(path, value) if isinstance(value, Tensor) else deepcopy(value)


def tensors(state: Any) -> Iterator[str]:
    """Yield the paths of tensors in nested content."""
    paths: list[str] = []
    each_tensor(lambda path, tensor: paths.append("/".join(path)), state)
    yield from paths


class Middle(NoPauses):
    """Records the state of hooks after step :data:`MIDDLE`, and with ``keeps`` all that another run needs to resume."""

    def __init__(self, manager: HookManager, *, keeps: bool) -> None:
        self._manager = manager
        self._keeps = keeps
        self._parameters = dict(manager.task.model.named_parameters())
        self.remembered: dict[str, tuple[tuple[int, ...], Any]] = {}
        """Shape and digest of each tensor in the hooks' states by path; for sharded tensors the layout instead."""
        self.content: Results = {}
        """The states of training and hooks, with an unsharded copy of every tensor."""

    def pause(self, loop: LoopState, *, unit_ended: bool) -> None:
        if loop.step == MIDDLE and not unit_ended:
            self._manager.run_isolated("checkpoint", self._take)

    def _take(self) -> None:
        with self._manager.between_steps():
            optimizer, hooks = self._manager.task.optimizer, self._manager.hooks.state_dict()
            each_tensor(self._note, hooks)
            through_a_file(hooks)  # as a custom training loop saves them
            if not self._keeps:
                return
            content = {
                "weights": {name: value.detach() for name, value in self._parameters.items()},
                "moments": {name: optimizer.state[value] for name, value in self._parameters.items()},
                "loop": self._manager.state.loop.state_dict(),
                "hooks": hooks,
            }
            self.content = each_tensor(lambda _, tensor: unsharded(tensor).clone(), content)

    def _note(self, path: tuple[str, ...], tensor: Tensor) -> None:
        content: Any = digest(tensor)
        if is_sharded(tensor):
            owner = self._parameters.get(path[-1])
            is_like_owner = owner is not None and layout(tensor) == layout(owner)
            content = AS_ITS_PARAMETER if is_like_owner else f"{layout(tensor)}"
        self.remembered["/".join(path)] = tuple(tensor.shape), content


def layout(tensor: Any) -> tuple[Any, ...]:
    return tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()


@torch.no_grad()
def restore(content: Results, manager: HookManager, hooks: Sequence[str]) -> None:
    """Restore the content of :class:`Middle`; tensors with the name and shape of a parameter get its sharding."""
    parameters = dict(manager.task.model.named_parameters())

    def placed(path: tuple[str, ...], tensor: Tensor) -> Tensor:
        owner = parameters.get(path[-1])
        return laid_out_like(tensor, owner) if owner is not None and owner.shape == tensor.shape else tensor.clone()

    for name, value in parameters.items():
        value.copy_(laid_out_like(content["weights"][name], value))
        moments = {key: laid_out_like(moment, value) for key, moment in content["moments"][name].items()}
        manager.task.optimizer.state[value] = moments
    vars(manager.state.loop).update(each_tensor(placed, content["loop"]))
    manager.hooks.load_state_dict(each_tensor(placed, {name: content["hooks"][name] for name in hooks}))


def laid_out_like(tensor: Tensor, owner: nn.Parameter) -> Tensor:
    if not is_sharded(owner) or tensor.shape != owner.shape:
        return tensor.clone()
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = owner
    return distribute_tensor(tensor, sharded.device_mesh, sharded.placements)
