"""Custom training loops, plain and with Accelerate, with and without a scope, and digests of their states."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import loopscope
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from loopscope.integrations import Scope
from loopscope.state import RandomStreams, TrainingState, seed_everything, without_on_demand
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader, TensorDataset

from tests.support import MODELS, OPTIMIZERS, ActingHook, data_for, drawing_evaluation, mean_loss
from tests.support.misbehaving_hooks import spoil_accumulation

QUIET = {"display": "none", "overwrite": True}
Digests = dict[str, int]


@dataclass(frozen=True)
class Loop:
    """Settings of a custom loop with three batches per epoch, so that steps of two leave a shorter last step.

    ``scale`` is that of the losses at first (0: there is no scaler), ``unscales`` whether gradients are unscaled before
    they are clipped, ``divides`` whether losses are shared among the micro-batches as Accelerate does, ``compiled``
    whether torch.compile is called ``in place``, or ``wrapped`` around the model.
    """

    accelerate: bool = False
    accumulate: int = 1
    clips: float = 0.0
    amp: str = "none"
    scheduler: str = "step"
    optimizer: str = "adamw_foreach"
    model: str = "batchnorm_mlp"
    scale: float = 0.0
    unscales: bool = True
    divides: bool = False
    compiled: str = ""
    epochs: int = 2


class Parts:
    """The objects of a loop, with the same bytes at every call, and the digests after its updates."""

    def __init__(self, loop: Loop) -> None:
        seed_everything(3)
        self.loop = loop
        self.digests: list[Digests] = []
        self.skipped: list[int] = []
        self.passes = 0
        self.model = MODELS[loop.model]()
        self.optimizer: Any = OPTIMIZERS[loop.optimizer](self.model.parameters())
        self.scheduler: Any = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.generator = torch.Generator().manual_seed(8)
        data = data_for(loop.model)
        self.evaluate = drawing_evaluation(data)
        self.loader: Any = DataLoader(TensorDataset(*data), 7, shuffle=True, generator=self.generator)
        self.scaler = GradScaler("cpu", init_scale=loop.scale) if loop.scale else None
        streams, held = RandomStreams(0, [self.generator]), {"scheduler": self.scheduler, "scaler": self.scaler}
        self.state = TrainingState(self.model, self.optimizer, streams, **held)
        self.accelerator = self.accelerated() if loop.accelerate else None
        self.trained, self.raw = self.model, self.optimizer
        if loop.compiled == "wrapped":
            self.trained = torch.compile(self.model, backend="eager")
        elif loop.compiled:
            self.model.compile(backend="eager")
        if self.accelerator is not None:
            of_theirs = (self.trained, self.optimizer, self.loader, self.scheduler)
            self.trained, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(*of_theirs)

    def accelerated(self) -> Accelerator:
        AcceleratorState._reset_state(reset_partial_state=True)
        precision = {"none": "no"}.get(self.loop.amp, self.loop.amp)
        return Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=self.loop.accumulate)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.loop.amp, torch.bfloat16)
        with torch.autocast("cpu", dtype, enabled=self.loop.amp != "none" and not self.loop.accelerate):
            return mean_loss(model, batch) / (self.loop.accumulate if self.loop.divides else 1)

    def attach(self, out: Path, hooks: Sequence[Any], **options: Any) -> Scope:
        if self.accelerator is not None:
            options["accelerator"] = self.accelerator
        else:
            options |= {"accumulate": self.loop.accumulate, "scaler": self.scaler}
        given = {"scheduler": self.scheduler, "loss": self.loss} | QUIET | options
        return loopscope.attach(self.trained, self.optimizer, hooks=list(hooks), out=out, **given)

    def digest(self) -> Digests:
        """Digest everything that the rest of a run depends on, including the random generators."""
        found = without_on_demand(self.state.digest())
        return {name: value for name, value in found.items() if "_optimizer_step_p" not in name}  # ours are there


def train(parts: Parts, scope: Scope | None = None, *, evaluates: bool = False) -> Parts:
    """Train, and digest the state after every update; without a scope this is the unchanged custom loop."""
    for _ in range(parts.loop.epochs):
        for index, batch in enumerate(parts.loader if scope is None else scope.batches(parts.loader), start=1):
            last = index == len(parts.loader)
            with micro_step(parts) as complete:
                run_backward(parts, parts.loss(parts.trained, batch), scope, last)
                if not (complete() or last):
                    continue
                update(parts)
            parts.digests.append(parts.digest())
            parts.optimizer.zero_grad()
            if evaluates and scope is not None and len(parts.digests) % 2 == 0:
                scope.evaluate(parts.evaluate, parts.model)
        if parts.loop.scheduler == "epoch":
            parts.scheduler.step()
        if scope is not None:
            scope.epoch_end()
    return parts


@contextmanager
def micro_step(parts: Parts) -> Iterator[Callable[[], bool]]:
    """Enter Accelerate's accumulation context; yield a function that returns whether the step is complete."""
    parts.passes += 1
    if parts.accelerator is None:
        yield lambda: parts.passes == parts.loop.accumulate
    else:
        with parts.accelerator.accumulate(parts.trained):
            yield lambda: parts.accelerator.sync_gradients


def run_backward(parts: Parts, loss: Tensor, scope: Scope | None, last: bool) -> None:
    if scope is not None:
        scope.backward(loss, last=last)
    elif parts.accelerator is not None:
        parts.accelerator.backward(loss)
    else:
        (loss if parts.scaler is None else parts.scaler.scale(loss)).backward()


def update(parts: Parts) -> None:
    """Clip the gradients, step the optimizer and step the scheduler."""
    loop, scaler, weights = parts.loop, parts.scaler, list(parts.model.parameters())
    if loop.accelerate and loop.clips:
        parts.accelerator.clip_grad_norm_(weights, loop.clips)
    elif loop.clips:
        if scaler is not None and loop.unscales:
            scaler.unscale_(parts.optimizer)
        nn.utils.clip_grad_norm_(weights, loop.clips)
    if scaler is None:
        parts.optimizer.step()
    else:
        scale = scaler.get_scale()
        scaler.step(parts.optimizer)
        scaler.update()
        parts.skipped += [len(parts.digests) + 1] if scaler.get_scale() < scale else []
    parts.passes = 0
    if loop.scheduler == "step" and len(parts.digests) + 1 not in parts.skipped:
        parts.scheduler.step()


@cache
def alone(loop: Loop) -> Parts:
    """Return the parts of the loop after training without loopscope."""
    return train(Parts(loop))


def attached(loop: Loop, out: Path, hooks: Sequence[Any], /, *, evaluates: bool = False, **options: Any) -> Parts:
    """Return the parts of the loop after training with hooks."""
    parts = Parts(loop)
    for hook in hooks:
        if isinstance(hook, MisbehavingHook):
            hook.parts = parts
    with parts.attach(out, hooks, **options) as scope:
        return train(parts, scope, evaluates=evaluates)


def assert_equal(bare: Parts, found: Parts) -> None:
    """Fail with the names of the differing entries after the first update with a difference."""
    assert bare.digests
    assert len(bare.digests) == len(found.digests)
    for step, (one, other) in enumerate(zip(bare.digests, found.digests, strict=True), start=1):
        differing = [name for name in one if one[name] != other[name]]
        assert not differing, f"{differing} after step {step}"


class MisbehavingHook(ActingHook):
    """Trains on, draws and zeroes weights, wherever it is let."""

    name = "misbehaving_hook"
    parts: Parts

    def __init__(self) -> None:
        super().__init__(self.spoil)

    def spoil(self, run_ctx: Any, model_ctx: Any) -> None:
        torch.rand(5), random.random(), np.random.rand(2)
        with torch.enable_grad():
            self.parts.loss(self.parts.trained, data_for(self.parts.loop.model)).backward()
        self.parts.raw.step()
        for weight in self.parts.model.parameters():
            spoil_accumulation(weight)
            weight.data.zero_()
