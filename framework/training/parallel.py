"""Parallel training of one model by the processes of torchrun: replicated, fully sharded, or tensor-parallel."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import distributed, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from ..errors import listed, require
from ..option_words import is_command_line, option_text
from .processes import Parallel, restart_count, torchrun_world_size

TENSOR_RANKS = 2
"""Tensor-parallel ranks per layer under fsdp+tp; the other dimension of the mesh is data-parallel."""


@contextmanager
def joined_process_group(kind: Parallel | None) -> Iterator[None]:
    """Join the process group of torchrun for the body; without effect if ``kind`` is ``None``.

    An existing process group is used.

    Raises:
        UsageError: ``kind`` does not match the number of processes.
    """
    has_group, count = distributed.is_available() and distributed.is_initialized(), torchrun_world_size()
    if kind is None:
        require(
            has_group or count < 2,
            f"torchrun started {count} processes, but {option_text('parallel')} is missing, which says how they share "
            f"the model; choose {listed([*get_args(Parallel)])}, or start one process.",
        )
    if kind is None or has_group:
        yield
        return
    chosen = option_text("parallel", kind)
    program = f"-m loopscope run EXPERIMENT {chosen}" if is_command_line() else "SCRIPT"
    require(count > 0, f"{chosen} trains in several processes; start them with torchrun --nproc-per-node 2 {program}.")
    if kind == "fsdp+tp":
        is_multiple = count >= TENSOR_RANKS and count % TENSOR_RANKS == 0
        sentence = f"{chosen} needs a multiple of {TENSOR_RANKS} processes, but torchrun started {count}."
        require(is_multiple, sentence)
    # After a restart, torchrun reuses the store, which contains addresses of the failed processes; hence a prefix.
    store, rank, count = next(rendezvous("env://"))
    attempt = distributed.PrefixStore(f"attempt {restart_count()}", store)  # type: ignore[attr-defined]
    distributed.init_process_group(store=attempt, rank=rank, world_size=count)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def parallelise(model: nn.Module, kind: Parallel, plan: Mapping[str, Any]) -> nn.Module:
    """Return the model for parallel training: in a replica, or with sharded parameters.

    ``plan`` maps the modules whose layers are split under tp and fsdp+tp to a ``ParallelStyle``.

    Raises:
        UsageError: ``kind`` needs a plan, and ``plan`` is empty.
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
            f"{option_text('parallel', kind)} splits layers, but the experiment defines no plan for this model; return "
            "a plan from its method tensor_parallel_plan(model), or choose ddp or fsdp.",
        )
        parallelize_module(model, mesh["tensor"], dict(plan))
    if kind != "tp":
        for stack in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
            for block in stack:
                fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    return model


def with_rebuilt_buckets(replica: DistributedDataParallel) -> DistributedDataParallel:
    """Rebuild the gradient buckets of a replica now, with an empty backward pass.

    torch rebuilds them after the first step, in the order in which gradients arrive, which changes the order of sums
    over three or more ranks: a resumed run would diverge from an uninterrupted one.
    """
    trained = [parameter for parameter in replica.parameters() if parameter.requires_grad]
    reducer = replica.reducer  # private: publicly, only a complete training step rebuilds the buckets
    reducer.prepare_for_forward()
    # As DistributedDataParallel calls it if it does not search for unused parameters.
    reducer.prepare_for_backward([])
    # Sums of no elements are 0, but give each parameter a gradient of zeros, so that all buckets are reduced.
    empty_sums: Any = [parameter.flatten()[:0].sum().double() for parameter in trained]
    torch.autograd.backward(empty_sums)
    reducer._rebuild_buckets()
    for parameter in trained:
        parameter.grad = None
    return replica
