"""The model within what a script wraps around it, and who trains it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..data import Batch
from ..errors import UsageError, require
from ..training import Ranks
from .attach_options import Loss


def unwrapped(model: Any) -> tuple[nn.Module, DistributedDataParallel | None, bool]:
    """Return the model within those that hold it, the replica among them, and whether torch.compile made one."""
    replica, compiled = None, False
    while True:
        if isinstance(model, DistributedDataParallel):
            replica, model = model, model.module
        # torch has no public name for the wrapper, and its class takes seconds to import
        elif type(model).__module__ == "torch._dynamo.eval_frame":
            compiled, model = True, model._orig_mod
        else:
            return model, replica, compiled


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object an attribute of its own for the body."""
    space = vars(owner)
    before = {name: space[name]} if name in space else {}
    space[name] = value
    try:
        yield
    finally:
        del space[name]
        space.update(before)


@contextmanager
def kept(replica: DistributedDataParallel | None) -> Iterator[None]:
    """Let the body call a replica without gradients, after which it would leave out a broadcast of the buffers."""
    before = (False, False) if replica is None else (replica.training, replica.require_forward_param_sync)
    try:
        yield
    finally:
        if replica is not None:
            replica.training, replica.require_forward_param_sync = before


def past(replica: DistributedDataParallel | None, loss: Loss) -> Loss:
    """Return the loss for passes of hooks, which must not go through a replica: its reducer counts on each of them."""
    if replica is None:
        return loss

    def refuse(*_: object) -> None:
        raise UsageError(
            "The loss for hooks calls the model in DistributedDataParallel, whose reducer would take their passes for "
            "steps; call the model that it is given: loss=lambda model, batch: criterion(model(batch[0]), batch[1])."
        )

    def computed(model: nn.Module, batch: Batch) -> Tensor:
        with replica.register_forward_pre_hook(refuse):
            return loss(model, batch)

    return computed


def trainers_of(model: nn.Module, replica: DistributedDataParallel | None) -> Ranks:
    """Return who trains a model; raises :class:`UsageError` where one of several processes cannot tell."""
    ranks = Ranks.of(model, replica)
    world = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    require(
        ranks.are_many or world == 1,
        f"This process is one of {world}, and the model does not tell which of them train it: it is neither in "
        "DistributedDataParallel nor sharded by fully_shard (FSDP2). If the loop averages gradients by itself, give "
        "ranks=loopscope.training.Ranks(data=[group]), its process group; if each process trains alone, ranks=Ranks().",
    )
    return ranks


def check_trained(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise :class:`UsageError` where the optimizer trains no parameter of the model."""
    known = {id(parameter) for parameter in model.parameters()}
    theirs = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    require(
        any(id(parameter) in known for parameter in theirs),
        f"The optimizer ({type(optimizer).__name__}) trains no parameter of the model ({type(model).__name__}); "
        "give the model whose parameters it was made with.",
    )
