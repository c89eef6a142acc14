"""Variants of one training step from the same state, each rolled back, and their losses."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
from loopscope import HookRegistry, Remembered, RunDataContext
from loopscope.data import Batch, part_of, rows
from loopscope.errors import require, unknown
from loopscope.hooks import Metrics, ModelDataContext, RunInfo
from loopscope.laboratory import CHANGES, UNCHANGED, TrialChange
from loopscope.tensors import copied, norm, overwrite, trainable
from loopscope.training import eagerly
from torch import Tensor

from ..curvature import coming_batches, parts_in
from .changed_steps import BranchesHook, ChangedSteps, possible_changes
from .rows import copies, exclude_shared_rows, measure_rows, outlier_rows, without_rows
from .step_history import record_outputs

FOLLOWING_BATCHES = 8
"""Number of following batches on which the effect of a step is measured."""
MOST_FRESH_ROWS = 512
"""Number of rows of fresh batches that are measured row by row, rounded up to whole batches."""
SINGLE_CHANGE_RATIO = 8.0
"""A single element has changed if its change is this many times the second largest change."""
FEWEST_ELEMENTS = 8
"""Number of elements that a parameter needs before a single change can be distinguished from the others."""
REFUSED_BY = {
    "zero_rate": (ArithmeticError,),  # an optimizer may divide by its learning rate
    "float64": (RuntimeError,),  # a GradScaler, for example, accepts only float32
}
"""Errors of steps that accept no such change, whose branch is omitted."""


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class WhatIf(BranchesHook):
    """Repeat one step of the run from the state before it, each time with one change.

    Each branch runs the step, on its own batch or on another one, then ``follow`` of the following steps, and is rolled
    back. It reports three numbers: the loss of the step; its effect, the mean immediate rise of the loss on the next 8
    batches; and the mean rise of the loss over the following steps.

    * ``as_it_was``: the same step, several times with other dropout masks
    * ``fresh``: on each of the batches after the next 8, without rows of this one; their spread measures chance
    * ``without_rows``: without the rows that stand out, and with repeated rows only once
    * ``clipped``: gradients clipped at ``usual_norm``
    * ``half_rate``, ``usual_rate``: all learning rates times ½, times ``usual_rate``
    * ``zero_rate``: all learning rates 0; a harm that remains is not of the optimizer's rule
    * ``fresh_state``: with a reset optimizer
    * ``float32``, ``float64``, ``layer_in_float32``: all operations of the passes in that precision, or those of
      ``layer``; float64 is omitted if part of the step accepts only float32
    * ``element_restored``: after the run's own step, with the single changed weight restored

    Assumes a run of one process, and following batches that resemble the current one, since they measure chance; in a
    sorted order they do not. Per-epoch schedulers do not advance, and committing hooks (clipping) are disabled in the
    branches.

    Args:
        follow: number of steps to train after the step in question.
        fresh: number of fresh batches.
        layer: the layer for ``layer_in_float32``; without a name the branch is omitted.
        step: the step in question, counted from 1.
        usual_norm: the norm at which to clip; 0 omits the branch.
        usual_rate: the factor that restores the usual learning rate; 1 omits the branch.
        watch: a further quantity to measure on each batch before the step, as in ``step_history``: ``output/<layer>``
            (``output/logits`` for the model), ``gradient/<parameter>``, ``update/<parameter>`` or ``copies``.
    """

    name = "what_if"
    measured_steps = 2
    metrics = """
        loss | the loss of the step in each branch, before its update; a list if the branch has several
            | (−∞, ∞) | Far above those of fresh batches: the batch is the cause.
        effect | mean over the next 8 batches of their loss after the step − before it | (−∞, ∞)
            | The effect of the step; `run`: the run's own step.
        later | mean over the following steps of their loss − the loss of their batch before the step
            | (−∞, ∞) | High: the harm lasts.
        size | the quantity that `watch` names, on the batch of each branch | [0, ∞), NaN
            | High here and small on fresh batches: the batch is the cause.
        low_precision | tensors and casts of float16 or bfloat16 in the step and the losses after it | 0, 1, 2, …
            | 0: precision cannot be the cause.
        rows | for each row of the batch separately, in order: `loss`, `gradient_norm`, `size` if an output is watched,
            and `index` in the data set if known | (−∞, ∞) | The rows behind a spike.
        standing_out | positions in the batch of rows with any of these above those of all fresh rows and more than 6
            spreads above their median, and of the copies of a row that fresh batches do not have
            | a list | The rows that without_rows omits.
        element | for the parameter with an element that changed 8 times as much as any other: the index of that
            element, its value before and after the step | (−∞, ∞) | A flipped bit has this effect.
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
        super().__post_init__()
        require(self.follow >= 1, f"what_if.follow is {self.follow}; it must be at least 1.")
        require(self.fresh >= 2, f"what_if.fresh is {self.fresh}; a spread needs at least 2.")
        require(self.usual_rate > 0, f"what_if.usual_rate is {self.usual_rate}; it must be positive.")

    def start(self, run: RunInfo) -> None:
        """Reject several processes, and names that are not in the model."""
        super().start(run)
        layers = dict(run.model.named_modules())
        kind, _, name = self.watch.partition("/")
        names_by_kind = {"output": {"logits", *layers}, "gradient": {*trainable(run.model)}, "copies": {""}}
        names_by_kind["update"] = names_by_kind["gradient"]
        if self.watch and name not in names_by_kind.get(kind, ()):
            choices = [f"{choice}/{item}" for choice, names in names_by_kind.items() for item in names]
            raise unknown("watched quantity", self.watch, choices)
        if self.layer and self.layer not in layers:
            raise unknown("layer", self.layer, layers)

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Run the branches before the step; measure its effect before the next one."""
        with eagerly():
            coming = coming_batches(model_ctx.loader, self.step, parts_in(run_ctx.batch_data))
            ahead = [*islice(coming, FOLLOWING_BATCHES)]
            if run_ctx.step > self.step:
                return self._after_step(model_ctx, ahead)
            fresh = exclude_shared_rows(run_ctx.batch_data, [*islice(coming, self.fresh)], fewest=2)
            self._before = copied(trainable(model_ctx.model))
            return self._branches(run_ctx, model_ctx, ahead, fresh)

    def _branches(
        self, run_ctx: RunDataContext, model_ctx: ModelDataContext, ahead: Sequence[Batch], fresh: Sequence[Batch]
    ) -> Metrics:
        batch = run_ctx.batch_data
        row_values, outlier_places = self._rows(run_ctx, model_ctx, fresh)
        part = [without_rows(batch, outlier_places)] if 0 < len(outlier_places) < rows(batch) else []
        same, wide = ChangedSteps(model_ctx, UNCHANGED), ChangedSteps(model_ctx, CHANGES["float32"])
        run = partial(self._run, ahead=ahead, before=same.losses(ahead))
        results = {
            "as_it_was": [run(same, batch, draws=draws) for draws in range(5)],
            "fresh": [run(same, other) for other in fresh],
        }
        for change in self._changes(run_ctx, has_part=bool(part)):
            layer = model_ctx.model.get_submodule(self.layer) if change.name == "layer_in_float32" else None
            steps = ChangedSteps(model_ctx, change, usual_norm=self.usual_norm, layer=layer)
            steps = wide if change.name == "float32" else steps
            with suppress(*REFUSED_BY.get(change.name, ())):
                results[change.name] = [run(steps, part[0] if change.replaces_rows else batch)]
        numbers = {
            name: {branch: [values[place] for values in trials] for branch, trials in results.items()}
            for place, name in enumerate(("loss", "effect", "later"))
        }
        if self.watch and not self.watch.startswith("update"):
            batches = {"as_it_was": [batch], "fresh": fresh} | ({"without_rows": part} if part else {})
            numbers["size"] = {name: [self._size(model_ctx, item) for item in items] for name, items in batches.items()}
            with wide.passes():
                numbers["size"]["float32"] = [self._size(model_ctx, batch)]
        return {**numbers, "low_precision": wide.converted_count, "rows": row_values, "standing_out": outlier_places}

    def _run(
        self, steps: ChangedSteps, batch: Batch, *, ahead: Sequence[Batch], before: Tensor, draws: int = 0
    ) -> tuple[float, float, float]:
        """Take a step and return its loss, its immediate effect, and the rise of the loss over the following steps.

        Args:
            steps: the step with its change.
            batch: the batch of the step.
            ahead: the following batches.
            before: their losses before the step, without a change.
            draws: count of random numbers to draw before the step, which changes the dropout masks.
        """
        with steps.branch(draws):
            before = before if steps.change.precision is None else steps.losses(ahead)
            loss = steps.take(batch)
            after = steps.losses(ahead)
            later = torch.stack([steps.take(following, changed=False) for following in ahead[: self.follow]])
        return float(loss), float((after - before).mean()), float((later - before[: len(later)]).mean())

    def _changes(self, run_ctx: RunDataContext, *, has_part: bool) -> list[TrialChange]:
        """Return the possible changes of the step; ``has_part``: if rows can be left out."""
        changes = {name: change for name, change in CHANGES.items() if change.title}
        changes["usual_rate"] = replace(changes["usual_rate"], rate_factor=self.usual_rate)
        is_given = {"without_rows": has_part, "clipped": self.usual_norm > 0, "usual_rate": self.usual_rate != 1}
        is_given["layer_in_float32"] = bool(self.layer)
        return possible_changes((change for name, change in changes.items() if is_given.get(name, True)), run_ctx)

    def _size(self, model_ctx: ModelDataContext, batch: Batch) -> float:
        kind, _, name = self.watch.partition("/")
        if kind == "copies":
            return float(copies(batch))
        if kind == "gradient":
            gradients = model_ctx.compute_batch_gradients(batch)
            return float(norm({name: gradients[name]})) if name in gradients else 0.0
        with record_outputs(model_ctx.model) as outputs:
            model_ctx.compute_batch_loss(batch)
        return float(outputs.get(name, math.nan))

    def _rows(
        self, run_ctx: RunDataContext, model_ctx: ModelDataContext, fresh: Sequence[Batch]
    ) -> tuple[dict[str, list[float]], list[int]]:
        """Return the measurements of each row of the batch, and the positions of the rows that stand out."""
        batch = run_ctx.batch_data
        measured = self._measure_rows(model_ctx, batch)
        others = fresh[: math.ceil(MOST_FRESH_ROWS / rows(batch))]
        usual = torch.cat([self._measure_rows(model_ctx, other) for other in others], 1)
        values = dict(zip(("loss", "gradient_norm", "size"), measured.tolist(), strict=False))
        if run_ctx.row_indices is not None:
            values["index"] = run_ctx.row_indices.tolist()
        return values, outlier_rows(batch, measured, fresh, usual)

    def _measure_rows(self, model_ctx: ModelDataContext, batch: Batch) -> Tensor:
        """Return loss, gradient norm and, if an output is watched, its size for each row; shape (2 or 3, rows)."""
        measured = measure_rows(model_ctx, batch)
        if self.watch.startswith("output/"):
            sizes = [self._size(model_ctx, part_of(batch, [place])) for place in range(rows(batch))]
            measured = torch.cat([measured, torch.tensor([sizes], dtype=torch.float64)])
        return measured

    def _after_step(self, model_ctx: ModelDataContext, ahead: Sequence[Batch]) -> Metrics:
        """Return the effect of the run's own step, and of restoring a single element that changed."""
        if not self._before:  # the hook did not run at the step itself
            return {}
        parameters, same = trainable(model_ctx.model), ChangedSteps(model_ctx, UNCHANGED)
        after = same.losses(ahead)
        with model_ctx.branch():
            overwrite(parameters, self._before)
            before = same.losses(ahead)
        metrics: dict[str, Any] = {"effect": {"run": float((after - before).mean())}}
        common = {name: leaf for name, leaf in parameters.items() if name in self._before}
        changes = [(name, *_most_changed(self._before[name], leaf)) for name, leaf in common.items()]
        name, place, ratio, sizes = max(changes, key=itemgetter(2), default=("", 0, 0.0, ()))
        if ratio >= SINGLE_CHANGE_RATIO:
            old, new = (float(leaf.detach().flatten()[place]) for leaf in (self._before[name], parameters[name]))
            with model_ctx.branch(), torch.no_grad():
                parameters[name][torch.unravel_index(torch.tensor(place), parameters[name].shape)] = old
                metrics["effect"]["element_restored"] = float((same.losses(ahead) - before).mean())
            metrics["element"] = {name: [place, old, new]}
            if self.watch == f"update/{name}":
                metrics["size"] = dict(zip(("run", "element_restored"), sizes, strict=True))
        self._before = {}
        return metrics


def _most_changed(before: Tensor, after: Tensor) -> tuple[int, float, Sequence[float]]:
    """Return the index of the largest change, its ratio to the second largest, and both; ratio 0 for few elements."""
    changes = (after.detach() - before).abs().double().flatten().nan_to_num(math.inf, math.inf)
    if len(changes) < FEWEST_ELEMENTS:
        return 0, 0.0, ()
    sizes, places = changes.topk(2)
    largest, second = sizes.tolist()
    ratio = largest / second if second else (math.inf if largest else 0.0)
    return int(places[0]), 0.0 if math.isnan(ratio) else ratio, (largest, second)
