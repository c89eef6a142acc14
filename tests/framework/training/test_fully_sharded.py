"""Hooks under FSDP2: every rank trains what it trains without hooks, whatever is sharded how."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed
from loopscope import training_hooks
from loopscope.data import TensorLoader, fixed_order
from loopscope.firing import HookManager
from loopscope.loops import epoch_loop, step_loop
from loopscope.state import RandomStreams, TrainingState
from loopscope.state.digest import digest
from loopscope.training import TrainingTask
from torch import nn

from tests.support import mean_loss, run_info

assert training_hooks.__all__
ROWS, BATCH = 24, 12
MEASURING: dict[str, dict[str, Any]] = {
    "hessian": {"method": "finite_difference"},
    "sharpness": {"method": "finite_difference"},
    **{name: {} for name in ("lr_probe", "adam_dynamics", "norms", "path_length", "weight_average")},
    **{name: {} for name in ("gradient_noise_scale",)},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.drop, self.norm = nn.Dropout(0.2), nn.BatchNorm1d(8)

    def forward(self, x):
        return x + self.norm(self.drop(self.down(torch.tanh(self.up(x)))))


def build(kind: str, accumulate: int = 1, **options: Any) -> tuple[TrainingTask, TrainingState]:
    """Build a run in which every data-parallel rank has its rows of each batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), Block(), Block(), nn.Linear(8, 3)).double()
    data = (torch.randn(ROWS, 5, dtype=torch.float64), torch.randint(3, (ROWS,)))
    world = torch.distributed.get_world_size()
    if kind == "fsdp":
        mesh = shards = init_device_mesh("cpu", (world,))
        index, count = torch.distributed.get_rank(), world
    else:
        names = ("replicate", "shard") if kind == "hsdp" else ("shard", "tensor")
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names)
        shards = mesh if kind == "hsdp" else mesh["shard"]
        index, count = (torch.distributed.get_rank(), world) if kind == "hsdp" else (shards.get_local_rank(), 2)
        if kind == "tensor":
            for block in (model[1], model[2]):
                parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for module in (model[1], model[2], model):
        fully_shard(module, mesh=shards, **options)
    mine = torch.arange(ROWS).view(-1, BATCH // count)[index::count].flatten()
    data = (data[0][mine], data[1][mine])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = TensorLoader(data, BATCH // count, fixed_order(torch.arange(len(data[0]))))
    task = TrainingTask(model, optimizer, loader, mean_loss, length=2, snapshot_every=1, accumulation_steps=accumulate)
    return task, TrainingState(model, optimizer, RandomStreams(7))


def trained(make: Callable[[], Any], hooks: Sequence[Any], loop: str = "epoch", **kinds: Any) -> dict[str, int]:
    task, state = make()
    manager = HookManager(hooks, task, state, loop=loop, **kinds)
    manager.start(run_info(task, manager, loop))
    {"epoch": epoch_loop, "step": step_loop}[loop](task, manager)
    manager.end("completed")
    return {name: digest(value) for name, value in task.model.state_dict().items()} | {"next": int(torch.rand(1) * 1e9)}
