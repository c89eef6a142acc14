"""The model within what a script wraps around it, and who trains it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import require
from ..training import Ranks


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
def kept(replica: DistributedDataParallel | None) -> Iterator[None]:
    """Let the body call a replica without gradients, after which it would leave out a broadcast of the buffers."""
    before = (False, False) if replica is None else (replica.training, replica.require_forward_param_sync)
    try:
        yield
    finally:
        if replica is not None:
            replica.training, replica.require_forward_param_sync = before


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
