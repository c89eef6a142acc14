"""One model trained by the processes that torchrun started: replicated, fully sharded, or parallel in its tensors."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import distributed, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..errors import listed, require
from ..state import BY_GROUP, SPLIT_FROM

Parallel = Literal["ddp", "fsdp", "tp", "fsdp+tp"]
TENSOR_RANKS = 2
"""Ranks that hold the parts of a layer under fsdp+tp; the others see rows of their own."""


def torchrun_world_size() -> int:
    """Return how many processes torchrun started, 0 where it did not."""
    return int(os.environ.get("WORLD_SIZE", 0))


def is_restarted() -> bool:
    """Return whether torchrun started this process in the place of one that failed (``--max-restarts``)."""
    return _attempt() > 0


def _attempt() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def is_main_process() -> bool:
    """Return whether this process is the one, of those that torchrun started, that speaks for all."""
    return torchrun_world_size() == 0 or os.environ.get("RANK", "0") == "0"


@contextmanager
def joined_process_group(kind: Parallel | None) -> Iterator[None]:
    """Let the body train together with the other processes that torchrun started; alone where ``kind`` is ``None``.

    A process group that is there is used. Raises :class:`UsageError` where kind and processes do not fit together.
    """
    there, count = distributed.is_available() and distributed.is_initialized(), torchrun_world_size()
    if kind is None:
        require(
            there or count < 2,
            f"torchrun started {count} processes, but nothing says how they train one model: add --parallel "
            f"{listed([*get_args(Parallel)])}, or start one process.",
        )
    if kind is None or there:
        yield
        return
    require(
        count > 0,
        f"--parallel {kind} trains in several processes, which torchrun starts: torchrun --nproc-per-node 2 -m "
        f"loopscope run EXPERIMENT --parallel {kind}.",
    )
    if kind == "fsdp+tp":
        fits = count >= TENSOR_RANKS and count % TENSOR_RANKS == 0
        require(fits, f"--parallel fsdp+tp needs a multiple of {TENSOR_RANKS} processes, and torchrun started {count}.")
    # torchrun gives the processes that it starts anew the store of the ones before, with addresses that are gone.
    store, rank, count = next(rendezvous("env://"))
    attempt = distributed.PrefixStore(f"attempt {_attempt()}", store)  # type: ignore[attr-defined]
    distributed.init_process_group(store=attempt, rank=rank, world_size=count)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def parallelise(model: nn.Module, kind: Parallel, plan: Mapping[str, Any]) -> nn.Module:
    """Return a model as all processes train it: within a replica, or itself with its parameters in parts.

    ``plan`` names the modules whose layers are cut up under tp and fsdp+tp, each with its ``ParallelStyle``. Raises
    :class:`UsageError` where it is empty.
    """
    if kind == "ddp":
        return with_rebuilt_buckets(DistributedDataParallel(model))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    device, count = next(model.parameters()).device.type, distributed.get_world_size()
    parts = {"tp": count, "fsdp+tp": TENSOR_RANKS}.get(kind, 1)
    mesh = init_device_mesh(device, (count // parts, parts), mesh_dim_names=("data", "tensor"))
    if kind != "fsdp":
        require(
            bool(plan),
            f"--parallel {kind} cuts layers up, and for this model the experiment does not say which; return a plan "
            "from its method tensor_parallel_plan(model), or choose ddp or fsdp.",
        )
        parallelize_module(model, mesh["tensor"], dict(plan))
    if kind != "tp":
        for stack in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
            for block in stack:
                fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    return model


def with_rebuilt_buckets(replica: DistributedDataParallel) -> DistributedDataParallel:
    """Let a replica order its gradients now, by a backward pass of zeros.

    torch does so after the first step, by the order in which gradients came, and with it the order of sums over three
    ranks or more: a run that goes on would part from the one that did not stop.
    """
    trained = [parameter for parameter in replica.parameters() if parameter.requires_grad]
    reducer = replica.reducer  # private: only a whole forward pass does this otherwise
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])
    nothing: Any = [parameter.flatten()[:0].sum().double() for parameter in trained]
    torch.autograd.backward(nothing)
    reducer._rebuild_buckets()
    for parameter in trained:
        parameter.grad = None
    return replica


def split_groups(optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
    """Give parameters of different meshes groups of their own: one fused kernel updates no two kinds of tensors.

    Each says from which group it comes, so that checkpoints know it as one. What a scheduler has for each group it has
    for the parts from now on.
    """
    found: list[dict[str, Any]] = []
    count = len(optimizer.param_groups)
    for index, group in enumerate(optimizer.param_groups):
        kinds: dict[Any, list[Any]] = {}
        for parameter in group["params"]:
            kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        found += [{**group, "params": parameters, SPLIT_FROM: index} for parameters in kinds.values()]
    optimizer.param_groups[:] = found
    schedulers = [] if scheduler is None else [scheduler, *getattr(scheduler, "_schedulers", ())]
    for each in schedulers:
        for name in BY_GROUP & vars(each).keys():
            if isinstance(items := getattr(each, name), list) and len(items) == count:
                setattr(each, name, [items[group[SPLIT_FROM]] for group in found])
