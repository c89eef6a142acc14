"""What hooks remember in the middle of a small training, and going on from there in as many processes or others."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from loopscope.firing import HookManager
from loopscope.loops import NoPauses
from loopscope.state import LoopState, is_sharded, unsharded
from loopscope.state.digest import digest
from torch import Tensor, nn

from tests.training_hooks.reloading import through_a_file

MIDDLE = 3
"""The step after which it is looked at: within an epoch, and of windows of two steps."""
AS_ITS_PARAMETER = "as its parameter"
Results = dict[str, Any]
Visit = Callable[[tuple[str, ...], Tensor], Any]


def each_tensor(visit: Visit, value: Any, path: tuple[str, ...] = ()) -> Any:
    """Return nested content with what ``visit`` returns, given its path as well, in the place of every tensor."""
    if isinstance(value, Mapping):
        return {key: each_tensor(visit, item, (*path, str(key))) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(each_tensor(visit, item, (*path, str(index))) for index, item in enumerate(value))
    return visit(path, value) if isinstance(value, Tensor) else deepcopy(value)


def tensors(state: Any) -> Iterator[str]:
    """Yield the paths of tensors in nested content."""
    found: list[str] = []
    each_tensor(lambda path, tensor: found.append("/".join(path)), state)
    yield from found


class Middle(NoPauses):
    """Looks at a run after step :data:`MIDDLE`; with ``keeps`` in such a way that another one can go on from there."""

    def __init__(self, manager: HookManager, *, keeps: bool) -> None:
        self._manager = manager
        self._keeps = keeps
        self._parameters = dict(manager.task.model.named_parameters())
        self.remembered: dict[str, tuple[tuple[int, ...], Any]] = {}
        """Of each tensor in the hooks' states, by path, the shape, and the digest of what is plain, or how it lies."""
        self.content: Results = {}
        """The state of training and of the hooks: every tensor whole, and a copy."""

    def pause(self, loop: LoopState, *, unit_ended: bool) -> None:
        if loop.step == MIDDLE and not unit_ended:
            self._manager.run_isolated("checkpoint", self._take)

    def _take(self) -> None:
        with self._manager.between_steps():
            optimizer, hooks = self._manager.task.optimizer, self._manager.hooks.state_dict()
            each_tensor(self._note, hooks)
            through_a_file(hooks)  # as a loop of one's own does
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
        how: Any = digest(tensor)
        if is_sharded(tensor):
            owner = self._parameters.get(path[-1])
            how = AS_ITS_PARAMETER if owner is not None and layout(tensor) == layout(owner) else f"{layout(tensor)}"
        self.remembered["/".join(path)] = tuple(tensor.shape), how


def layout(tensor: Any) -> tuple[Any, ...]:
    return tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()


@torch.no_grad()
def put_back(content: Results, manager: HookManager, hooks: Sequence[str]) -> None:
    """Go on from what :class:`Middle` found: what is whole and named as a parameter is cut up as that parameter is."""
    parameters = dict(manager.task.model.named_parameters())

    def placed(path: tuple[str, ...], tensor: Tensor) -> Tensor:
        owner = parameters.get(path[-1])
        return laid_out_like(tensor, owner) if owner is not None and owner.shape == tensor.shape else tensor.clone()

    for name, value in parameters.items():
        value.copy_(laid_out_like(content["weights"][name], value))
        moments = {key: laid_out_like(each, value) for key, each in content["moments"][name].items()}
        manager.task.optimizer.state[value] = moments
    vars(manager.state.loop).update(each_tensor(placed, content["loop"]))
    manager.hooks.load_state_dict(each_tensor(placed, {name: content["hooks"][name] for name in hooks}))


def laid_out_like(tensor: Tensor, owner: nn.Parameter) -> Tensor:
    if not is_sharded(owner) or tensor.shape != owner.shape:
        return tensor.clone()
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = owner
    return distribute_tensor(tensor, sharded.device_mesh, sharded.placements)
