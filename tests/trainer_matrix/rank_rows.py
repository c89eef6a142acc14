"""Trainings on three ranks, since two hide an order of sums."""

from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.trainer_matrix.hugging_face_rows import settings, token_data
from tests.trainer_matrix.row import Attach, rows
from tests.trainer_matrix.tiny import gpt2, points

RANKS = 3
RANK_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation 2": {"accumulate": 2},
    "clipping": {"clip": 0.05},
}


def network() -> nn.Module:
    """Create a network without buffers, which ranks would not share."""
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Dropout(0.1), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 3))


@rows("DistributedDataParallel", variants=RANK_VARIANTS, ranks=RANKS)
def replicas(attach: Attach, **variant: Any) -> None:
    distributed.init_process_group("gloo")
    inner = network()
    train(attach, DistributedDataParallel(inner), **variant)


@rows("FSDP2 (fully_shard)", variants=RANK_VARIANTS, ranks=RANKS)
def shards(attach: Attach, **variant: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo")
    model = network()
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(attach, model, **variant)


def train(attach: Attach, model: Any, accumulate: int = 1, clip: float = 0.0) -> None:
    """Train two epochs of one shard of the data for each rank."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = points(36)
    sampler: Any = DistributedSampler(data, seed=1)

    def loss_of(model: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) / accumulate

    with attach(model, optimizer, loss=loss_of, accumulate=accumulate) as scope:
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for index, batch in enumerate(scope.batches(DataLoader(data, 3, sampler=sampler)), start=1):
                scope.backward(loss_of(model, batch))
                if index % accumulate == 0:
                    if clip:
                        nn.utils.clip_grad_norm_(model.parameters(), clip)
                    optimizer.step()
                    optimizer.zero_grad()
    distributed.destroy_process_group()


@rows("Hugging Face Trainer under DDP", "transformers", "accelerate", variants=RANK_VARIANTS, ranks=RANKS)
def trainer_on_ranks(attach: Attach, **variant: Any) -> None:
    from transformers import Trainer, TrainingArguments

    changed = {"ddp_backend": "gloo", "per_device_train_batch_size": 1, "output_dir": "out"}
    trainer = Trainer(gpt2(), TrainingArguments(**settings(attach, **variant | changed)), train_dataset=token_data(24))
    attach(trainer)
    trainer.train()
    distributed.destroy_process_group()


@rows("Accelerate under DDP", "accelerate", variants=RANK_VARIANTS, ranks=RANKS)
def accelerate_on_ranks(attach: Attach, accumulate: int = 1, clip: float = 0.0) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    inner = network()
    optimizer = torch.optim.AdamW(inner.parameters(), 1e-2)
    model, optimizer, data = accelerator.prepare(inner, optimizer, DataLoader(points(36), 3, shuffle=True))
    with attach(model, optimizer, accelerator=accelerator) as scope:
        for batch in scope.batches(data):
            with accelerator.accumulate(model):
                scope.backward(nn.functional.cross_entropy(model(batch[0]), batch[1]))
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    distributed.destroy_process_group()
