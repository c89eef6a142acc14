"""One step taken in other ways from the same state, each rolled back: what the loss would have been."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from loopscope import DebugInterventionHook, HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule
from loopscope.data import Batch, part_of, rows
from loopscope.errors import UnsuitableError, require, unknown
from loopscope.hooks import Metrics, ModelDataContext, RunInfo
from loopscope.state import overwrite, trainable
from loopscope.training import eagerly
from torch import Tensor

from ..curvature import coming_batches
from .rows import copies, outliers, repeated, without_rows_of
from .step_history import outputs_seen
from .widened import Widened, layer_widened

AHEAD = 8
"""Batches that come next, on whose loss the effect of a step is measured."""
MOST_ROWS = 512
"""Rows of fresh batches that are measured one by one, at most."""
ALONE = 8.0
"""How many times the second largest change the largest one is, where a single element has changed by itself."""


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class WhatIf(DebugInterventionHook):
    """Take one step of the run again and again from the state before it, each time with one thing changed.

    Every branch takes the step, on the batch that it had or on another one, then as many as ``follow`` of the steps
    that come next, and is rolled back. Three numbers are told of each: the loss of the step, its effect, which is the
    mean rise of the loss on the next 8 batches, at once, and the mean rise over the steps that follow.

    * ``as_it_was``: the same step, several times with other dropout masks
    * ``fresh``: on each of the batches that come after the next 8, without rows of this one; their spread is chance
    * ``without_rows``: without the rows that stand out, or with repeated ones once
    * ``clipped``: gradients clipped at ``usual_norm``
    * ``half_rate``, ``usual_rate``: every learning rate times ½, times ``usual_rate``
    * ``fresh_state``: an optimizer that remembers nothing
    * ``float32``, ``float64``, ``layer_in_float32``: all operations of the passes in that precision, or those of
      ``layer``; float64 is left out where something in the step takes float32 alone
    * ``element_restored``: after the run's own step, the weight that changed by itself put back

    Assumes a run of one process, and that batches that come next are like the present one, since they stand for chance:
    in a sorted order they are not. Schedulers of epochs stand still, and hooks that commit (clipping) take no part in
    the branches.

    Args:
        follow: steps that are trained after the one in question.
        fresh: how many fresh batches.
        layer: the layer for ``layer_in_float32``; none without a name.
        step: the step in question, counted from 1.
        usual_norm: the norm at which to clip; 0 leaves the branch out.
        usual_rate: the factor that brings the learning rate to its usual value; 1 leaves the branch out.
        watch: one more thing to measure of each batch before the step, as ``step_history`` does: ``output/<layer>``
            (``output/logits``: of the model), ``gradient/<parameter>``, ``update/<parameter>`` or ``copies``.
    """

    name = "what_if"
    hook_points = frozenset({HookPoint.PRE_STEP})
    needs_loss = True
    needs_loader = True
    needs_next_batch = True
    metrics = """
        loss | the loss of the step in each branch, before its update; a list where there are several
            | (−∞, ∞) | Far above those of fresh batches: the batch, unless they are high, too.
        effect | mean over the next 8 batches of their loss after the step − before it | (−∞, ∞)
            | What the step did; `run`: the run's own step.
        later | mean over the steps that follow of their loss − the loss of their batch before the step
            | (−∞, ∞) | Whether the harm lasts.
        size | what `watch` names, on the batch of each branch | [0, ∞), NaN
            | The batch's own doing, where that of fresh ones is small.
        low_precision | tensors and casts of float16 or bfloat16 in the step and the losses after it | 0, 1, 2, …
            | 0: precision is no explanation.
        rows | of each row of the batch alone, in its order: `loss`, `gradient_norm`, `size` where an output is watched,
            and `index` in the data set where that is known | (−∞, ∞) | The rows behind a spike.
        standing_out | places in the batch of rows with any of these above those of all fresh rows and more than 6
            spreads above their middle, and of the copies of a row that fresh batches do not have
            | a list | What without_rows leaves out.
        element | of the parameter with an element that changed 8 times as much as any other: the number of that
            element, its value before and after the step | (−∞, ∞) | A flipped bit looks like that.
    """
    _before = Remembered(dict[str, Tensor])

    follow: int = 4
    fresh: int = 39
    layer: str = ""
    step: int = 1
    usual_norm: float = 0.0
    usual_rate: float = 1.0
    watch: str = ""

    def __post_init__(self) -> None:
        require(self.step >= 1, f"what_if.step is {self.step}; steps are counted from 1.")
        require(self.follow >= 1, f"what_if.follow is {self.follow}; it must be at least 1.")
        require(self.fresh >= 2, f"what_if.fresh is {self.fresh}; a spread needs at least 2.")
        require(self.usual_norm >= 0, f"what_if.usual_norm is {self.usual_norm}; it must be at least 0.")
        require(self.usual_rate > 0, f"what_if.usual_rate is {self.usual_rate}; it must be positive.")
        self.step_schedule = StepSchedule(mode="burst", every_n_steps=2**62, burst_length=2, warmup=self.step - 1)

    def start(self, run: RunInfo) -> None:
        """Refuse several processes, and a layer that is not there."""
        if run.ranks.are_many:
            raise UnsuitableError("Hook 'what_if' measures row by row, so it needs a run of one process.")
        layers = dict(run.model.named_modules())
        kind, _, name = self.watch.partition("/")
        known = {"output": {"logits", *layers}, "gradient": {*trainable(run.model)}, "copies": {""}}
        known["update"] = known["gradient"]
        if self.watch and name not in known.get(kind, ()):
            choices = [f"{each}/{one}" for each, names in known.items() for one in names]
            raise unknown("thing to watch", self.watch, choices)
        if self.layer and self.layer not in layers:
            raise unknown("layer", self.layer, layers)

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Run the branches before the step; look at what it did before the next one."""
        with eagerly():
            if run_ctx.step > self.step:
                return self._afterwards(model_ctx)
            batches = [*islice(coming_batches(model_ctx.loader, self.step), AHEAD + self.fresh)]
            fresh = without_rows_of(run_ctx.batch_data, batches[AHEAD:])
            if len(fresh) < 2:  # so few data that each batch has rows of the others
                fresh = batches[AHEAD:]
            self._before = {name: leaf.detach().clone() for name, leaf in trainable(model_ctx.model).items()}
            return self._branches(run_ctx, Branches(model_ctx, batches[:AHEAD], self.follow), fresh)

    def _branches(self, run_ctx: RunDataContext, branches: "Branches", fresh: Sequence[Batch]) -> Metrics:
        model_ctx, batch = branches.model_ctx, run_ctx.batch_data
        rates = [float(group.lr) for group in run_ctx.optimizer_groups]
        mode, wide = Widened(), Widened(torch.float64)
        found_rows, out = self._rows(run_ctx, model_ctx, fresh)
        rest = [place for place in range(rows(batch)) if place not in out]
        told = {
            "as_it_was": [branches.run(batch, draws=draws) for draws in range(5)],
            "fresh": [branches.run(other) for other in fresh],
            "half_rate": [branches.run(batch, learning_rates=[rate / 2 for rate in rates])],
            "fresh_state": [branches.run(batch, prepared=_forget)],
            "float32": [branches.run(batch, within=lambda: mode)],
        }
        with suppress(RuntimeError):  # a GradScaler, say, takes float32 alone
            told["float64"] = [branches.run(batch, within=lambda: wide)]
        if out and rest:
            told["without_rows"] = [branches.run(part_of(batch, rest))]
        if self.usual_norm:
            told["clipped"] = [branches.run(batch, max_norm=self.usual_norm)]
        if self.usual_rate != 1:
            told["usual_rate"] = [branches.run(batch, learning_rates=[rate * self.usual_rate for rate in rates])]
        if self.layer:
            module = model_ctx.model.get_submodule(self.layer)
            told["layer_in_float32"] = [branches.run(batch, within=lambda: layer_widened(module, Widened()))]
        numbers = {
            name: {branch: [each[place] for each in found] for branch, found in told.items()}
            for place, name in enumerate(("loss", "effect", "later"))
        }
        if self.watch and not self.watch.startswith("update"):
            own = {"as_it_was": [batch], "fresh": fresh}
            own |= {"without_rows": [part_of(batch, rest)]} if out and rest else {}
            numbers["size"] = {name: [self._size(model_ctx, each) for each in given] for name, given in own.items()}
            with mode:
                numbers["size"]["float32"] = [self._size(model_ctx, batch)]
        return {**numbers, "low_precision": mode.met, "rows": found_rows, "standing_out": out}

    def _size(self, model_ctx: ModelDataContext, batch: Batch) -> float:
        kind, _, name = self.watch.partition("/")
        if kind == "copies":
            return float(copies(batch))
        if kind == "gradient":
            gradient = model_ctx.compute_batch_gradients(batch).get(name)
            return 0.0 if gradient is None else float(torch.linalg.vector_norm(gradient))
        with outputs_seen(model_ctx.model) as outputs:
            model_ctx.compute_batch_loss(batch)
        return float(outputs.get(name, math.nan))

    def _rows(
        self, run_ctx: RunDataContext, model_ctx: ModelDataContext, fresh: Sequence[Batch]
    ) -> tuple[dict[str, list[float]], list[int]]:
        """Return what is measured of each row of the batch, and the places of those that stand out."""
        own, several, count = self._measured(model_ctx, run_ctx.batch_data), [], 0
        for other in fresh:
            if count < MOST_ROWS:
                several.append(self._measured(model_ctx, other))
                count += rows(other)
        found = dict(zip(("loss", "gradient_norm", "size"), own.tolist(), strict=False))
        if run_ctx.row_indices is not None:
            found["index"] = run_ctx.row_indices.tolist()
        return found, sorted({*outliers(own, torch.cat(several, 1)), *repeated(run_ctx.batch_data, fresh)})

    def _measured(self, model_ctx: ModelDataContext, batch: Batch) -> Tensor:
        """Return loss and gradient norm, and an output that is watched, of each row; shape (2 or 3, rows)."""
        measured = [each.cpu() for each in model_ctx.measure_rows(batch)]
        if self.watch.startswith("output/"):
            sizes = [self._size(model_ctx, part_of(batch, [place])) for place in range(rows(batch))]
            measured.append(torch.tensor(sizes, dtype=torch.float64))
        return torch.stack(measured)

    def _afterwards(self, model_ctx: ModelDataContext) -> Metrics:
        """Return the effect of the run's own step, and of putting back an element that changed by itself."""
        if not self._before:  # the step itself was not seen
            return {}
        branches = Branches(model_ctx, [*islice(coming_batches(model_ctx.loader, self.step), AHEAD)], self.follow)
        parameters = trainable(model_ctx.model)
        after = branches.losses()
        with model_ctx.branch():
            overwrite(parameters, self._before)
            before = branches.losses()
        found: dict[str, Any] = {"effect": {"run": float((after - before).mean())}}
        known = {name: leaf for name, leaf in parameters.items() if name in self._before}
        alone = [(name, *_lonely(self._before[name], leaf)) for name, leaf in known.items()]
        name, place, size = max(alone, key=lambda each: each[2], default=("", 0, 0.0))
        if size >= ALONE:
            was, now = (float(leaf.detach().flatten()[place]) for leaf in (self._before[name], parameters[name]))
            with model_ctx.branch(), torch.no_grad():
                parameters[name][torch.unravel_index(torch.tensor(place), parameters[name].shape)] = was
                found["effect"]["element_restored"] = float((branches.losses() - before).mean())
            found["element"] = {name: [place, was, now]}
            if self.watch == f"update/{name}":
                change = (parameters[name].detach() - self._before[name]).abs()
                found["size"] = {"run": float(change.max()), "element_restored": float(change.flatten().topk(2)[0][1])}
        self._before = {}
        return found


class Branches:
    """Steps from the present state, each rolled back: what they do to the batches ahead, and ``follow`` steps later."""

    def __init__(self, model_ctx: ModelDataContext, ahead: Sequence[Batch], follow: int) -> None:
        self.model_ctx, self._ahead, self._follow = model_ctx, ahead, ahead[:follow]
        self._before = self.losses()

    def losses(self, within: Callable[[], AbstractContextManager[object]] = nullcontext) -> Tensor:
        """Return the losses of the batches that come next; shape (batches,), float64."""
        with within():
            return torch.stack([self.model_ctx.compute_batch_loss(batch) for batch in self._ahead]).double()

    def run(
        self,
        batch: Batch,
        *,
        draws: int = 0,
        prepared: Callable[[ModelDataContext], None] = lambda _: None,
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
        **changed: Any,
    ) -> tuple[float, float, float]:
        """Take a step and return its loss, its effect at once, and the rise of the loss over the steps that follow.

        Args:
            batch: of the step.
            draws: numbers that are drawn before it, after which dropout masks are others.
            prepared: what is done to the state before the step.
            within: makes what forward and backward passes run in.
            changed: options of ``take_step``.
        """
        with self.model_ctx.branch():
            before = self._before if within is nullcontext else self.losses(within)
            for device in {torch.device("cpu"), self.model_ctx.device}:
                torch.rand(draws, device=device)
            prepared(self.model_ctx)
            loss = self.model_ctx.take_step(batch, passes=within(), **changed)
            after = self.losses(within)
            later = [self.model_ctx.take_step(each, passes=within()).double() for each in self._follow]
        effects = ((after - before).mean(), (torch.stack(later) - before[: len(later)]).mean())
        return (float(loss), *map(float, effects))  # type: ignore[return-value]


def _forget(model_ctx: ModelDataContext) -> None:
    """Let the optimizer start anew: sums, moments and counts of steps are zero at its beginning."""
    for entries in model_ctx.optimizer_state.values():
        for value in entries.values():
            if isinstance(value, Tensor):
                value.zero_()


def _lonely(before: Tensor, after: Tensor) -> tuple[int, float]:
    """Return the element that changed most, and how many times as much as the one after it; 0 for few elements."""
    changes = (after.detach() - before).abs().double().flatten().nan_to_num(math.inf, math.inf)
    if len(changes) < AHEAD:
        return 0, 0.0
    sizes, places = changes.topk(2)
    ratio = float(sizes[0] / sizes[1]) if float(sizes[1]) else (math.inf if float(sizes[0]) else 0.0)
    return int(places[0]), 0.0 if math.isnan(ratio) else ratio
