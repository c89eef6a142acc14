"""A small run whose model is sharded over two ranks, in one of two ways, or not."""

from typing import Any

import torch
from loopscope.data import TensorLoader, fixed_order
from loopscope.state import RandomStreams, TrainingState
from loopscope.training import TrainingTask
from torch import Tensor, nn
from torch.nn import functional

KINDS = ("fully sharded", "tensor parallel")
ROWS = 10


def loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def sharded(kind: str | None) -> tuple[TrainingTask, TrainingState]:
    """Build the run; the same weights and data for every kind, ``None`` being a model that is not sharded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    data = (torch.randn(ROWS, 5), torch.randint(3, (ROWS,)))
    if kind == "fully sharded":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0])
        fully_shard(model)
    elif kind == "tensor parallel":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    task = TrainingTask(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        TensorLoader(data, ROWS // 2, fixed_order(torch.arange(ROWS))),
        loss,
        evaluate=lambda model: {"val_loss": float(loss(model, data))},
        length=4,
        snapshot_every=4,
    )
    return task, TrainingState(model, task.optimizer, RandomStreams(7))
