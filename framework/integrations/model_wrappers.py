"""Wrappers around a model, DistributedDataParallel and torch.compile, and the ranks that train it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ..combined_optimizers import optimizer_name
from ..data import Batch
from ..errors import UsageError, require
from ..state import copy_of_batch
from ..training import Ranks
from .attach_options import Loss

RECORDED_OUTPUTS = ("output_router_logits", "output_hidden_states", "output_attentions")


def unwrap(model: Any) -> tuple[nn.Module, DistributedDataParallel | None, bool]:
    """Return the innermost model, its DistributedDataParallel wrapper if any, and whether torch.compile wraps it."""
    replica, compiled = None, False
    while True:
        if isinstance(model, DistributedDataParallel):
            replica, model = model, model.module
        # OptimizedModule has no public name and takes seconds to import, so it is recognised by its module's name.
        elif type(model).__module__ == "torch._dynamo.eval_frame":
            compiled, model = True, model._orig_mod
        else:
            return model, replica, compiled


def unwrap_fabric(item: Any) -> Any:
    """Return the model, perhaps a replica or compiled, or the optimizer in a wrapper of Lightning Fabric."""
    for name in ("lightning.fabric.wrappers", "lightning_fabric.wrappers"):
        # Without an import of Fabric it cannot be one of its wrappers, and importing it takes seconds.
        wrappers = sys.modules.get(name)
        # Private: there are no public names, and only _forward_module is the replica.
        if wrappers is not None and isinstance(item, wrappers._FabricModule):
            return item._forward_module
        if wrappers is not None and isinstance(item, wrappers._FabricOptimizer):
            return item.optimizer
    return item


def install_output_capturing(model: nn.Module) -> None:
    """Install the module hooks with which models of transformers record outputs that their configuration asks for.

    Such a model installs them in its first pass. If that were a pass of a measurement, they would be a change by it.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    for module in model.modules() if hasattr(capturing, "maybe_install_capturing_hooks") else ():
        config = getattr(module, "config", None)
        if hasattr(module, "_can_record_outputs") and any(getattr(config, name, None) for name in RECORDED_OUTPUTS):
            capturing.maybe_install_capturing_hooks(module)  # type: ignore[union-attr]


@contextmanager
def temporary_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an instance attribute for the body, and restore its previous value, or its absence, afterwards."""
    attributes = vars(owner)
    previous = {name: attributes[name]} if name in attributes else {}
    attributes[name] = value
    try:
        yield
    finally:
        del attributes[name]
        attributes.update(previous)


@contextmanager
def unchanged_replica(replica: DistributedDataParallel | None) -> Iterator[None]:
    """Restore the flags of a replica after the body, which may call it without gradients.

    Otherwise the next training step would skip the broadcast of the buffers.
    """
    flags = (False, False) if replica is None else (replica.training, replica.require_forward_param_sync)
    try:
        yield
    finally:
        if replica is not None:
            replica.training, replica.require_forward_param_sync = flags


def loss_for_hooks(loss: Loss, replica: DistributedDataParallel | None) -> Loss:
    """Return the loss function for hooks.

    It gets a copy of the batch, which it may change: ``batch.pop("labels")``. It must not call the replica, whose
    reducer would count the passes of hooks.
    """

    def refuse(*_: object) -> None:
        raise UsageError(
            "The loss function for hooks calls the DistributedDataParallel model, whose reducer would count their "
            "passes as steps; call the model argument: loss=lambda model, batch: criterion(model(batch[0]), batch[1])."
        )

    def computed(model: nn.Module, batch: Batch) -> Tensor:
        with suppress(Exception):  # an object in the batch that cannot be copied
            batch = copy_of_batch(batch)
        with nullcontext() if replica is None else replica.register_forward_pre_hook(refuse):
            return loss(model, batch)

    return computed


def find_ranks(model: nn.Module, replica: DistributedDataParallel | None) -> Ranks:
    """Return the ranks that train a model; raise :class:`UsageError` if several processes exist and it shows none."""
    ranks = Ranks.of(model, replica)
    world = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    require(
        ranks.are_many or world == 1,
        f"This process is one of {world}, and the model does not show which of them train it: it is neither in "
        "DistributedDataParallel nor sharded by fully_shard (FSDP2). If the loop averages gradients itself, give its "
        "process group, ranks=loopscope.training.Ranks(data=[group]); if each process trains alone, ranks=Ranks().",
    )
    return ranks


def check_optimizer(model: nn.Module, optimizer: Any) -> None:
    """Raise :class:`UsageError` if the optimizer trains no parameter of the model.

    The doctor reports parameters that it omits.
    """
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    name, kind = optimizer_name(optimizer), type(model).__name__
    require(
        any(parameter.requires_grad for parameter in model.parameters()),
        f"No parameter of the model ({kind}) requires a gradient, so nothing would be trained; call "
        "requires_grad_(True) on the layers to train before the optimizer is created.",
    )
    require(
        any(id(parameter) in trained for parameter in model.parameters()),
        f"The optimizer ({name}) trains no parameter of the model ({kind}); give the model whose parameters the "
        "optimizer was created with.",
    )
