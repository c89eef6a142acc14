"""A custom loop for several processes, under DDP, FSDP2 or with manual averaging, with and without a scope."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import loopscope
import torch
import torch.distributed as distributed
from loopscope.hooks import HookPoint
from loopscope.integrations import Scope
from loopscope.state.digest import digest
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support import ActingHook, SpyHook, at

RANKS, BATCH, STEPS = 3, 12, 4
KINDS: dict[str, dict[str, Any]] = {
    "DDP": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "small buckets": {"bucket_cap_mb": 1e-4},
}
MEASURING = (HookPoint.PRE_STEP, HookPoint.POST_BACKWARD, HookPoint.POST_STEP)


class Loop:
    """The objects of a script on this rank; with ``alone`` one process has the rows of all ranks."""

    def __init__(self, kind: str, accumulate: int = 1, *, drawing: bool = True) -> None:
        torch.manual_seed(0)
        drawn = [nn.Dropout(0.2), nn.BatchNorm1d(16)] if drawing else []
        layers = [nn.Linear(5, 16), *drawn, nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3)]
        self.kind, self.accumulate = kind, accumulate
        self.model: Any = nn.Sequential(*layers).double()
        self.trained = self.model
        inputs, labels = torch.randn(STEPS, BATCH, 5, dtype=torch.float64), torch.randint(3, (STEPS, BATCH))
        rank, count = (0, 1) if kind == "alone" else (distributed.get_rank(), distributed.get_world_size())
        self.batches = [(x[rank::count], y[rank::count]) for x, y in zip(inputs, labels, strict=True)]
        torch.manual_seed(100 + rank)
        if kind in KINDS:
            self.trained = DistributedDataParallel(self.model, **KINDS[kind])
        elif kind == "FSDP2":
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model[0]), fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.trained.parameters(), lr=0.01)
        self.trace: list[list[int]] = []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) / self.accumulate

    def attach(self, hooks: Sequence[Any], out: Path, **options: Any) -> Scope:
        given = {"loss": self.loss, "accumulate": self.accumulate, "display": "none", "audit": True, "seed": 7}
        return loopscope.attach(self.trained, self.optimizer, hooks=list(hooks), out=out, **{**given, **options})

    def run(self, scope: Scope | None = None) -> "Loop":
        """Train an epoch; with a scope, also evaluate every second step."""
        for index, batch in enumerate(self.batches if scope is None else scope.batches(self.batches), start=1):
            last = index % self.accumulate == 0
            with self._syncing(last):
                loss = self.loss(self.trained, batch)
                loss.backward() if scope is None else scope.backward(loss)
            if not last:
                continue
            self.update()
            if scope is not None and len(self.trace) % 2 == 0:
                scope.evaluate(self.evaluation)
        return self

    def evaluation(self) -> dict[str, float]:
        return {"val_loss": float(self.loss(self.trained, self.batches[0]) + torch.rand(()))}

    def _syncing(self, last: bool) -> AbstractContextManager[Any]:
        if self.kind == "FSDP2":
            self.trained.set_requires_gradient_sync(last)
        return self.trained.no_sync() if self.kind in KINDS and not last else nullcontext()

    def update(self) -> None:
        if self.kind == "by hand":
            for parameter in self.model.parameters():
                distributed.all_reduce(parameter.grad)
                parameter.grad /= distributed.get_world_size()
        self.optimizer.step()
        self.optimizer.zero_grad()
        held = [value for entry in self.optimizer.state.values() for value in entry.values()]
        rest = [*self.model.parameters(), *self.model.buffers(), *held, torch.get_rng_state()]
        self.trace.append([digest(part_of(tensor.detach())) for tensor in rest])


def part_of(tensor: Any) -> Tensor:
    return tensor.to_local() if "DTensor" in type(tensor).__name__ else tensor


def neutral(kind: str, accumulate: int, hooks: Sequence[Any], out: Path, **options: Any) -> bool:
    """Return whether a loop with hooks has, after every step, the bytes of the bare loop on this rank."""
    attached = Loop(kind, accumulate)
    with attached.attach(hooks, out, **options) as scope:
        attached.run(scope)
    bare = Loop(kind, accumulate).run()
    return attached.trace == bare.trace and len(bare.trace) == STEPS // accumulate


def draw(ctx: Any) -> dict[str, Any]:
    return {"drawn": torch.rand(())}


def measure(ctx: Any) -> None:
    ctx.compute_batch_gradients(ctx.batch_data)


def spoil(run_ctx: Any, model_ctx: Any) -> None:
    torch.rand(3)
    if run_ctx.batch_data is not None:
        model_ctx.compute_batch_gradients()
        model_ctx.take_step()
    with torch.no_grad():
        for parameter in model_ctx.model.parameters():
            parameter.zero_()


def everything(*names: str) -> list[Any]:
    """Return hooks that draw random numbers, measure and damage the state, and some hooks by name."""
    points = set(HookPoint) - {HookPoint.PRE_UPDATE}
    own = [at(SpyHook, *HookPoint, name="drawing")(draw), at(SpyHook, *MEASURING, name="measuring")(measure)]
    return [*own, at(ActingHook, *points, name="misbehaving_hook")(spoil), "norms", "training_metrics", *names]
