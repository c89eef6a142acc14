"""Measurements that show the common mistakes of training scripts."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.doctor.senses import BackwardPass, BackwardRecorder
from loopscope.errors import require
from loopscope.hooks import EVERY_STEP, BackwardContext, Metrics, RunInfo
from loopscope.tensors import read_at_once, trainable, unsharded
from torch import Tensor, nn

from ..measures import SeriesBudget, WeightCopy, compute_once, joint_gradient_norm
from .batch_facts import (
    IGNORED,
    BatchPart,
    end_facts,
    input_facts,
    inside_facts,
    parts_of,
    target_facts,
    with_own_targets,
)
from .gradient_counts import LayerWeights, count_gradients, exact_norms
from .loss_facts import loss_facts, nonfinite_facts, reduces_targets_alike
from .module_modes import module_modes
from .next_tokens import token_facts
from .seen_rows import SeenRows

EARLY_STEPS = (2, 3, 5, 10, 20)
"""Checked steps in addition to one in ``interval``."""
LAST_URGENT = 3
"""The last step whose checks are delivered at once."""
EVERY_STEP_METRICS = frozenset({"loss", "grad_norm", "lr"})
ROWS_UNTIL = 200
"""The last step at which the rows of every step are remembered; later only those of checked steps."""
MOST_INPUTS = 3
"""Tensors that the first layer gets in a step, such as those of triplets; more are those of an episode."""
Numbers = dict[str, float]


@HookRegistry.register
class TrainingChecks(TrainingHook):
    """Measure what shows common mistakes of training scripts: in the loss, the gradients, the data and the updates.

    The hook only measures. It reports loss, gradient norm and learning rate of every step, and the rest on checked
    steps: 1, 2, 3, 5, 10, 20, and one step in ``interval``. Those of the first three
    steps are delivered at once.

    The facts about the loss are those of its autograd graph, right before the backward pass. They are missing if the
    loop runs backward itself, and incomplete if the loss is computed within a compiled or custom function. The facts
    about the data are those of this process's part of the batch, and only of tensors on the CPU. Inputs x are the first
    floating-point tensor of the batch, or else the first integer tensor with two or more dimensions; targets are the
    tensor named labels, label, targets, target or y, or else the last integer tensor. Of large batches the statistics
    are those of the first rows, with about 260,000 elements.

    Assumes that a parameter without a gradient is a mistake, which is wrong for frozen layers that keep
    ``requires_grad``, experts without tokens and layers that a step skips at random. Rows repeat without a mistake if
    the data has equal rows.

    Args:
        interval: steps between two checks after the first 20 steps.
        names: globs, separated by commas, of parameters to report in every family that contains them.
        top: number of parameters with the largest values to report in each family.
    """

    name = "training_checks"
    hook_points = frozenset({HookPoint.POST_BACKWARD, HookPoint.PRE_UPDATE, HookPoint.POST_STEP})
    in_health = True
    loop_values = MappingProxyType({"loss": "loss"})
    needs_step_series = True
    metrics = """
        loss | L, the loss of the step; reported every step | (−∞, ∞)
            | Compare the first values with uniform_loss. NaN: the run is broken.
        grad_norm | ‖g‖₂ over all parameters before clipping; reported every step | [0, ∞]
            | 0: nothing learns. Rising by orders of magnitude: the run diverges.
        lr | learning rate of the first parameter group; reported every step, if the group has a number | [0, ∞)
            | Compare with the schedule that you planned: a scheduler that is called too often ends it early.
        without_gradient_count | trainable parameters of an optimizer that have no gradient and keep their values
            | 0, 1, 2, …
            | Above 0: parameters that the loss does not depend on, detached outputs, or layers that are not called.
        without_gradient/<parameter> | checked steps in a row without a gradient there and in between | 1, 2, 3, …
            | Growing: the parameter never trains. 1 now and then: a layer that some steps skip.
        zero_gradient_count | parameters whose gradient is exactly 0 in all elements | 0, 1, 2, …
            | Above 0: dead units, a loss that is multiplied by 0, or an underflow of float16.
        zero_gradient/<parameter> | checked steps in a row with a gradient of exactly 0 | 1, 2, 3, …
            | Growing: as without_gradient.
        never_gradient_count | parameters without a non-zero gradient in all checked steps so far, and without any in
            the others | 0, 1, 2, …
            | Above 0 after a few checks: these parameters do not learn from the loss.
        never_gradient/<parameter> | number of checked steps so far | 1, 2, 3, …
            | The parameter had no non-zero gradient in any of them.
        moved_count | parameters of an optimizer that change, though they have no gradient after the backward pass;
            reported if there are any | 1, 2, 3, …
            | The optimizer steps within the backward pass, and clears the gradients there.
        outside_gradient_count | trainable parameters in no optimizer that have a non-zero gradient; reported if there
            are parameters in no optimizer | 0, 1, 2, …
            | Above 0: the loss would train them, but no optimizer does.
        outside_moved_count | those without a gradient whose values have changed since the start; reported likewise
            | 0, 1, 2, … | Above 0: target networks and averages, which code other than an optimizer changes.
        frozen_later_count | parameters that were trained at an earlier check and are frozen since; reported from the
            first one on | 0, 1, 2, …
            | Above 0 to the end: something set requires_grad to False and did not set it back.
        frozen_later/<parameter> | checked steps in a row in which it was frozen | 1, 2, 3, …
            | Growing: the parameter has stopped learning.
        leftover_gradient_count | parameters with a non-zero gradient before the first backward pass of the step
            | 0, 1, 2, … | Above 0: nothing zeroes the gradients of the last step; at step 1, another backward pass of
            the same step came before.
        lost_gradient_fraction | share of the parameters with a gradient that had none, or 0, before the second backward
            pass of the step; reported for steps of several micro-batches without sharded parameters | [0, 1]
            | 1: something zeroes the gradients between the micro-batches.
        dead_units/<parameter> | rows of the weight's gradient that are exactly 0 / all rows; of linear layers and
            convolutions with a non-zero gradient | [0, 1]
            | Output units without any gradient in the step. High and lasting: dead units, often after a too high
            learning rate.
        dead_units_max | max over these weights of dead_units | [0, 1] | Above about 0.5: look at the family.
        gradient_zero_fraction | zero elements / all elements, over the gradients of linear, convolutional and recurrent
            weights | [0, 1] | Near 1 in float16: gradients underflow, use a loss scaler. High with ReLU is normal.
        float16_used | 1 if a parameter or a tensor between model and loss is float16, else 0 | {0, 1}
            | 1 without loss_scale: small gradients underflow.
        loss_scale | factor of the loss in the backward pass; reported in runs with a loss scaler | (0, ∞)
            | Falling to below 1: gradients overflow all the time.
        loss_is_summed | 1 if the loss is a sum over elements that no number of elements divides, else 0 | {0, 1}
            | 1: gradients grow with the size of the batch.
        loss_divisor | number by which the first micro-batch's reduced loss is divided | (−∞, ∞)
            | Should be the number of micro-batches for a mean loss. Tensors, such as numbers of tokens, are left out.
        doubly_normalised | 1 if a log-softmax gets the output of a softmax, or a BCE with logits that of a sigmoid
            | {0, 1} | 1: the loss expects logits, remove the normalisation of the model.
        lacks_log_softmax | 1 if nll_loss, ctc_loss or kl_div gets logits or probabilities, else 0 | {0, 1}
            | 1: the loss expects the output of log_softmax.
        micro_batches | number of backward passes of the step | 1, 2, 3, … | Should be the intended accumulation.
        averages_micro_batches | 1 if the weights of the step's micro-batches add up to 1 ± 0.1, if each loss is divided
            by their number apart from a constant weight, or if a tensor divides it, else 0; the weight of a mean is
            1/divisor, that of a sum its targets/divisor; not reported for a single micro-batch, and where the graph
            does not show the reduction or the division | {0, 1}
            | 0: their gradients add up, as with a larger learning rate.
        normalises_inputs | 1 if a normalisation gets the inputs of the model, or the output of a layer of them, else 0
            | {0, 1} | 1: the scale of the inputs hardly matters.
        loss_compares_outputs | 1 if the logits of a cross-entropy are products of outputs with each other, else 0
            | {0, 1} | 1: a contrastive loss, whose target is the position of the pair and no class.
        cosine_scale | factor of the logits of a cross-entropy if they are cosines, products of vectors of length 1,
            times a constant; on the CPU | (0, ∞)
            | About 1: no logit is above 1, so that the loss has a high lower bound. Divide by a temperature.
        loss_is_broadcast | 1 if the loss compares N outputs with N targets in N · N pairs, else 0 | {0, 1}
            | 1: outputs of shape (N, 1) meet targets of shape (N,), so that each output is compared with all targets.
        look_ahead_fraction | attention operations in which positions see later ones / all attention operations over as
            many queries as keys; reported for models whose graph shows attention | [0, 1]
            | 1 with target_shift 1: the model sees the tokens that it should predict.
        target_shift | positions by which the first targets of the cross-entropy are shifted against the first row of
            inputs, or of a decoder's inputs; reported with look_ahead_fraction, for tokens, if one of these shifts fits
            | {0, 1, 2}
            | 1: next tokens. 0 with a causal mask: the model learns to copy its input. 2: shifted twice.
        logits_rectified | 1 if a ReLU is applied to the logits of the loss, else 0 | {0, 1}
            | 1: no logit can be negative, and those that are 0 get no gradient.
        normalised_over_rows | 1 if the log-softmax of a cross-entropy, or a softmax of the model, runs over the rows of
            the batch, else 0 | {0, 1} | 1: the argument dim of the softmax is wrong.
        class_count | C, the number of classes of a cross-entropy, else 0 | 0, 1, 2, … | Should be that of the data.
        uniform_loss | ln C; reported for a cross-entropy without further terms or scaled logits | [0, ∞)
            | The loss of equal probabilities, which the first losses should be near. Much larger first losses: the
            initialisation of the output layer. A loss that stays there: nothing is learned.
        target_min | the least target of a regression; reported for mse_loss, smooth_l1_loss and huber_loss on the CPU,
            and for a binary cross-entropy with targets outside of 0 to 1 | (−∞, ∞)
            | Far below target_low: extreme rows, or a code for missing values, such as −999.
        target_low | the 10 % quantile of the same targets; of several micro-batches the mean | (−∞, ∞)
            | Far from 0, compared with target_high − target_low: targets are not centred.
        target_high | their 90 % quantile, likewise | (−∞, ∞) | See target_low.
        target_max | the largest of them | (−∞, ∞) | Far above target_high: see target_min.
        constant_loss | loss of the best constant prediction, on the batch's targets on the CPU: for mse_loss the mean
            over outputs of their variance; for a binary cross-entropy that of the entropy of their frequencies; for a
            cross-entropy without class weights their entropy, plus (K − 1)/2N for K classes in N targets, if N is at
            least 10·K; for kl_div the mean divergence of the targets from their mean | [0, ∞)
            | A term_loss that stays there: nothing is learned from the inputs.
        term_loss | the mean of the same loss function for the outputs of the model, without the factors and further
            terms of the loss; reported with constant_loss | [0, ∞) | Above constant_loss: worse than a constant.
        loss_has_terms | 1 if the loss function is one of several terms of the loss, else 0 | {0, 1}
            | 1: the loss is no measure of the outputs; term_loss is that of its first term.
        output_variation | how much the outputs that the loss gets differ between the rows: I / H(t) with the
            information I = H(mean p) − mean H(p) of rows in the predicted probabilities p and the entropy H(t) of the
            targets, for kl_div their information; for numbers, variance of outputs / variance of targets | [0, ∞)
            | Near 0 at the end: the model gives the same output for all rows and any inputs.
        reads_targets | 1 if an embedding of the model looks up the very targets of the cross-entropy, else 0 | {0, 1}
            | 1 although the inputs are others: the model sees what it should predict.
        nonfinite_target_fraction | share of NaN or infinite targets of a regression or binary cross-entropy, on the
            CPU; reported for the first loss that is not finite, too | [0, 1]
            | Above 0: repair the targets, not the model.
        invalid_target_fraction | share of the targets of a binary cross-entropy outside of 0 to 1 | [0, 1]
            | Above 0: the loss is no likelihood, and may fall below 0.
        unreachable_target_fraction | share of a regression's targets outside of the range of the model's last
            activation by more than 5 % of their standard deviation; reported for ReLU, softplus, sigmoid, softmax and
            tanh | [0, 1]
            | Above 0: no weights give these targets. Remove the activation, or scale the targets.
        soft_target_sum | mean over rows of the sum of the targets, for a cross-entropy of targets that are numbers, and
            for kl_div | (−∞, ∞) | Should be 1. Above 1: rows have several labels, which need a loss for each class.
        input_mean | mean of the elements of x; reported for floating-point inputs | (−∞, ∞)
            | Far from 0 relative to input_std: inputs are not normalised.
        input_std | population standard deviation of the elements of x | [0, ∞) | Far from 1: inputs are not normalised.
        input_max_abs | max |x| | [0, ∞) | Near 255: images were not scaled.
        target_class_count | number of different targets that the loss does not ignore | 0, 1, 2, …
            | 1 in every batch: see single_class_batch_fraction.
        target_top_fraction | share of the most frequent target among those that are not −100 | [0, 1]
            | Near 1: the classes are unbalanced, or padding counts as a target.
        target_top | the most frequent target among those that are not −100, the smallest of several | an integer
            | Changing between batches in which target_top_fraction is near 1: the data is sorted by class.
        ignored_target_fraction | share of targets that the loss ignores, by default those equal to −100 | [0, 1]
            | 1: the loss has no target.
        ignored_inside_fraction | share of the ignored targets between others of their row, of targets with two
            dimensions, if one of the classes is ignored | [0, 1]
            | High: the ignored index is no padding, but a class, which is never learned.
        ignored_end_fraction | share of the rows whose last token of the attention mask is ignored as a target, though
            the one before is not; of batches with labels and an attention mask | [0, 1]
            | Near 1: the token at the end is never learned, as with pad_token = eos_token.
        padding_fraction | share of targets in runs of at least three equal ids at the end of a row, of the id with
            which most rows end, if it hardly occurs elsewhere; of targets with two dimensions, and of tokens without
            separate targets, if the cross-entropy counts all targets alike | [0, 1]
            | Above 0: padding counts as a target. Replace it by −100.
        repeated_row_fraction | share of the batch's rows that an earlier step of the epoch had, in a loop of steps one
            of the first pass over the data | [0, 1]
            | Above 0: the loader draws with replacement, or the epoch has the data twice. Missing rows: only those of
            the first 200 steps and of checked steps are known.
        duplicate_row_fraction | share of the batch's rows that repeat another row of it | [0, 1]
            | High: the data set or the collation repeats rows.
        same_batch_count | batches in a row, of those that are known, with the same rows in the same order as the one
            before, in other tensors | 0, 1, 2, …
            | Growing: every step gets the same batch. Loops that give the same tensors on purpose do not count. The
            last three metrics are not reported for losses of more than three passes, as of the actions of an episode:
            only the batch of the first is known.
        single_class_batch_fraction | share of the checked batches so far with one class only | [0, 1]
            | Near 1: the data is sorted by class and not shuffled.
        model_in_eval | 1 if the model is in eval mode, else 0 | {0, 1} | 1: call model.train() before the training.
        eval_mode_count | modules in eval mode in a model in train mode | 0, 1, 2, …
            | Above 0: frozen parts, or parts that an evaluation has left in eval mode.
        batchnorm_eval_count | batch normalisations in eval mode | 0, 1, 2, …
            | Above 0: their running statistics do not change.
        dropout_count | dropout layers with p > 0 | 0, 1, 2, … | Compare runs: fewer regularise less.
        update_ratio | ‖Δθ‖₂ / ‖θ₋‖₂ over all trainable parameters, Δθ the change of the step, θ₋ the weights before
            | [0, ∞] | Proportional to the learning rate. At its highest value about 1e-3 is usual for Adam and SGD,
            1e-2 for AdamW at the start, and more for steps of a fixed size, such as Muon's; it falls with a decay
            schedule. Above 0.1: the learning rate is too high. 0: nothing changes.
        update_ratio_median | median over the parameters with at least two dimensions of ‖Δθ_p‖₂ / ‖θ₋_p‖₂; without
            those with ‖θ₋_p‖₂ = 0 | [0, ∞] | As update_ratio, without the influence of the largest parameter. That of
            weight_updates is over vectors as well, and by default over sampled elements.
        unchanged_count | parameters with a non-zero gradient whose values the step has not changed in any bit
            | 0, 1, 2, … | Above 0: not in the optimizer, a learning rate of 0, or updates that rounding removes.
        unchanged/<parameter> | checked steps in a row without a change, but with a gradient | 1, 2, 3, …
            | Growing: the parameter never trains.
        clip_factor | ‖g‖₂ right before the update / ‖g‖₂ after the backward pass | [0, ∞]
            | Below 1: the gradient was clipped. Near 0 at every step: clipping sets the learning rate.
    """

    _without = Remembered(dict[str, int])
    _zero = Remembered(dict[str, int])
    _unchanged = Remembered(dict[str, int])
    _trained = Remembered(list[str])
    """Parameters that have had a non-zero gradient."""
    _frozen = Remembered(dict[str, int])
    """Checked steps in a row in which such parameters were frozen."""
    _thawed = Remembered(list[str])
    """Parameters that were frozen only for a while, as in trainings of two networks in turn."""
    _moved = Remembered(list[str])
    """Parameters without a gradient that have changed between two checks."""
    _sizes = Remembered(dict[str, float], saved=False)
    """Exact norms of the parameters at the start, and of those without a gradient at their last check."""
    _checks = Remembered(int)
    _batches = Remembered(int)  # checked batches with targets
    _single_class_batches = Remembered(int)
    _rows = Remembered(SeenRows)
    _passes = Remembered(BackwardRecorder, saved=False)
    # Values between the points of one step, and that step
    _step = Remembered(0, saved=False)
    _with_gradient = Remembered(list[str], saved=False)
    _norm = Remembered[Tensor | None](None, saved=False)
    _copy = Remembered[WeightCopy | None](None, saved=False)
    _layers = LayerWeights(frozenset(), frozenset())

    def __init__(self, *, interval: int = 50, names: str = "", top: int = 8) -> None:
        require(interval >= 1, f"training_checks.interval is {interval}; it must be at least 1 step.")
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=interval, also=EARLY_STEPS)
        self.point_schedules = {HookPoint.POST_BACKWARD: EVERY_STEP}
        self._budget = SeriesBudget(self.name, names, top, bottom=0)

    def start(self, run: RunInfo) -> None:
        """Find the weights of layers.

        Raises:
            UsageError: a pattern of names matches no parameter.
        """
        self._has_epochs = run.loop == "epoch"
        self._layers = LayerWeights.of(run.model)
        self._sizes = exact_norms({name: item for name, item in trainable(run.model).items() if not item.is_meta})
        self._budget.check_names(trainable(run.model))

    def before_backward(self, ctx: BackwardContext) -> None:
        """Describe the loss of a micro-batch, for the metrics at POST_BACKWARD."""
        self._passes.record(ctx)

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Measure at POST_BACKWARD; keep the weights at PRE_UPDATE, and measure the update at POST_STEP."""
        if ctx.hook_point is HookPoint.PRE_UPDATE:
            return self._before_update(ctx)
        if ctx.hook_point is HookPoint.POST_STEP:
            return self._after_update(ctx)
        metrics: dict[str, Any] = {}
        if ctx.loss is not None:
            metrics["loss"] = read_at_once(unsharded(torch.as_tensor(ctx.loss)))
        if ctx.grad_norm is not None:
            metrics["grad_norm"] = read_at_once(ctx.grad_norm)
        if ctx.lr is not None and not (isinstance(ctx.lr, float) and math.isnan(ctx.lr)):
            metrics["lr"] = ctx.lr
        if self.step_schedule.is_due(ctx.step):
            metrics |= self._check(ctx)
            return metrics
        self._note_between(ctx)
        return metrics | nonfinite_facts(self._passes.of(ctx.step))  # of the first loss that is not finite

    def _epoch_of(self, ctx: RunDataContext) -> int | None:
        return ctx.epoch if self._has_epochs else None

    def _note_between(self, ctx: RunDataContext) -> None:
        """Note what a step between two checks shows."""
        if self._without:
            self._note_late_gradients(ctx.model)
        if self._frozen:
            self._note_thawed(ctx.model)
        if ctx.step <= ROWS_UNTIL:
            self._rows.add(parts_of(ctx.batch_data), self._epoch_of(ctx))

    def _note_late_gradients(self, model: nn.Module) -> None:
        """Note which parameters without a gradient at the last check have one now, as heads of rare tasks do."""
        parameters = dict(model.named_parameters())
        found = {name for name in self._without if name in parameters and parameters[name].grad is not None}
        if found:
            self._without = {name: count for name, count in self._without.items() if name not in found}
        if found - {*self._trained}:
            self._trained = [name for name in parameters if name in found or name in self._trained]

    def _note_thawed(self, model: nn.Module) -> None:
        """Forget the frozen parameters that are trainable again."""
        again = self._frozen.keys() & trainable(model).keys()
        if again:
            self._thawed = [*self._thawed, *sorted(again)]
            self._frozen = {name: count for name, count in self._frozen.items() if name not in again}

    def _check(self, ctx: RunDataContext) -> dict[str, Any]:
        """Return the metrics of a checked step at POST_BACKWARD."""
        self._checks += 1
        self._step, self._copy = ctx.step, None
        parameters = {name: value for name, value in trainable(ctx.model).items() if not value.is_meta}
        parts, passes = parts_of(ctx.batch_data), self._passes.of(ctx.step)
        self._norm = compute_once(ctx, joint_gradient_norm) if ctx.grad_norm is None else ctx.grad_norm
        metrics = self._frozen_metrics(ctx.model)
        held = {name for group in ctx.optimizer_groups for name in group.names}
        metrics |= self._gradient_metrics(parameters, held) | self._precision_metrics(ctx, parameters, passes)
        rows = len(parts[0].inputs) if parts else 0
        facts = loss_facts(passes, rows)
        if passes:
            facts["leftover_gradient_count"] = len(passes[0].leftover_gradients)
        if len(passes) > 1 and self._with_gradient and not ctx.ranks.shards:
            lost = {*self._with_gradient} - {*passes[1].accumulated_gradients}
            facts["lost_gradient_fraction"] = len(lost) / len(self._with_gradient)
        if "look_ahead_fraction" in facts:
            facts |= token_facts(parts, passes)
        metrics |= facts | self._data_metrics(parts, passes, self._epoch_of(ctx)) | module_modes(ctx.model)
        return metrics

    def _frozen_metrics(self, model: nn.Module) -> Numbers:
        """Return the metrics of parameters that had a gradient earlier and are frozen now."""
        self._note_thawed(model)
        live, out = dict(model.named_parameters()), {*self._thawed}
        frozen = [name for name in self._trained if name in live and not live[name].requires_grad and name not in out]
        self._frozen = _continued(self._frozen, frozen)
        return self._family("frozen_later", self._frozen) if self._frozen or self._thawed else {}

    def _gradient_metrics(self, parameters: Mapping[str, nn.Parameter], held: set[str]) -> Numbers:
        """Return the metrics of missing and zero gradients, and of dead units; ``held`` are names of the optimizers."""
        counts, dead_shares = count_gradients(parameters, self._layers.by_units)
        outside = {name for name in parameters if held and name not in held}
        self._note_moved(parameters, counts)
        elsewhere = outside | {*self._moved}
        self._without = _continued(self._without, [n for n in parameters if n not in counts and n not in elsewhere])
        self._zero = _continued(self._zero, [name for name, count in counts.items() if not count])
        self._with_gradient = [name for name, count in counts.items() if count]
        self._trained = [*dict.fromkeys([*self._trained, *self._with_gradient])]
        trained = {*self._trained} | elsewhere
        never = {name: self._checks for name in parameters if name not in trained}
        metrics: Numbers = {}
        if elsewhere - outside:
            metrics["moved_count"] = len(elsewhere - outside)
        if outside:
            metrics["outside_moved_count"] = len(outside & {*self._moved})
            metrics["outside_gradient_count"] = sum(counts.get(name, 0) > 0 for name in outside)
        metrics |= self._family("without_gradient", self._without) | self._family("zero_gradient", self._zero)
        metrics |= self._family("never_gradient", never)
        sizes = {name: parameters[name].numel() for name in counts}
        weights = [name for name in counts if name in self._layers.weights and not _is_sparse(parameters[name])]
        elements = sum(sizes[name] for name in weights)
        if elements:
            metrics["gradient_zero_fraction"] = 1 - sum(counts[name] for name in weights) / elements
        shares = {name: share for name, share in dead_shares.items() if counts[name]}
        if shares:
            dead = {name: share for name, share in shares.items() if share}
            metrics |= {f"dead_units/{name}": dead[name] for name in self._budget.choose(dead)}
            metrics["dead_units_max"] = max(shares.values())
        return metrics

    def _note_moved(self, parameters: Mapping[str, nn.Parameter], counts: Mapping[str, int]) -> None:
        """Note parameters without a gradient that have changed: target networks, optimizers that step in backward."""
        known = counts.keys() | {*self._moved, *self._trained}
        idle = {name: item for name, item in parameters.items() if name not in known}
        sizes = exact_norms(idle)
        self._moved = [*self._moved, *(name for name in sizes if self._sizes.get(name, sizes[name]) != sizes[name])]
        self._sizes |= sizes

    def _precision_metrics(
        self, ctx: RunDataContext, parameters: Mapping[str, nn.Parameter], passes: Sequence[BackwardPass]
    ) -> Numbers:
        has_parameter = any(parameter.dtype is torch.float16 for parameter in parameters.values())
        is_used = has_parameter or any(one.is_float16 for one in passes)
        scale = {} if ctx.loss_scale is None else {"loss_scale": ctx.loss_scale}
        return {"float16_used": int(is_used), **scale}

    def _data_metrics(self, parts: list[BatchPart], passes: Sequence[BackwardPass], epoch: int | None) -> Numbers:
        """Return the metrics of inputs and targets; padding only if the loss counts all of its targets alike."""
        ignored = passes[0].ignore_index if passes else IGNORED
        targets = target_facts(parts, ignored)
        if not passes or not all(map(reduces_targets_alike, passes)):
            targets.pop("padding_fraction", None)
        elif passes[0].class_count and "padding_fraction" not in targets and _predicts_its_inputs(parts, passes):
            of_inputs = target_facts(with_own_targets(parts), ignored)
            targets |= {name: value for name, value in of_inputs.items() if name == "padding_fraction"}
        shares = [one.ignored_fraction for one in passes if one.ignored_fraction is not None]
        if shares and len(shares) == len(passes):  # the targets that the loss really got
            targets["ignored_target_fraction"] = sum(shares) / len(shares)
            targets["target_class_count"] = max(one.target_classes or 0 for one in passes)
        if passes and passes[0].class_count > ignored >= 0:
            targets |= inside_facts(parts, ignored)
        repeats = self._rows.add(parts, epoch)
        if epoch is None and self._step > ROWS_UNTIL:  # a pass over the data may have ended between the checks
            repeats.pop("repeated_row_fraction", None)
        if any(one.input_count > MOST_INPUTS for one in passes):
            repeats = {}
        metrics = input_facts(parts) | targets | end_facts(parts) | repeats
        if "target_class_count" in targets:
            self._batches += 1
            self._single_class_batches += targets["target_class_count"] == 1
            metrics["single_class_batch_fraction"] = self._single_class_batches / self._batches
        return metrics

    def _before_update(self, ctx: RunDataContext) -> Metrics:
        """Keep the weights, and return the effect of clipping."""
        parameters = trainable(ctx.model)
        if self._step != ctx.step or any(parameter.is_meta for parameter in parameters.values()):
            return {}
        self._copy = WeightCopy.of(ctx.model)
        before, self._norm = self._norm, None
        if before is None or not self._with_gradient:
            return {}
        return {"clip_factor": compute_once(ctx, joint_gradient_norm).to(before) / before}

    def _after_update(self, ctx: RunDataContext) -> Metrics:
        """Return the metrics of the update, after one transfer to the host."""
        copy, self._copy = self._copy, None
        if self._step != ctx.step or copy is None:
            return {}
        parameters = {name: value for name, value in trainable(ctx.model).items() if name in copy}
        if not parameters:
            return {}
        table = torch.stack([copy.change_norms(parameters), copy.norms(parameters)]).tolist()
        changes, weights = (dict(zip(parameters, row, strict=True)) for row in table)
        names = [name for name in self._with_gradient if changes.get(name) == 0]
        self._unchanged = _continued(self._unchanged, names)
        metrics = self._family("unchanged", self._unchanged)
        matrices = [name for name, value in parameters.items() if value.ndim >= 2 and weights[name]]
        if matrices:
            metrics["update_ratio_median"] = median(changes[name] / weights[name] for name in matrices)
        change, weight = math.hypot(*changes.values()), math.hypot(*weights.values())
        if weight:
            metrics["update_ratio"] = change / weight
        return metrics

    def _family(self, family: str, values: Mapping[str, int]) -> Numbers:
        """Return the number of parameters in a family, and the values of those within the budget."""
        chosen = {f"{family}/{name}": values[name] for name in self._budget.choose(values)}
        return {f"{family}_count": len(values), **chosen}

    def is_urgent(self, metrics: Metrics) -> bool:
        """Return whether these are the metrics of one of the first checks, which show most mistakes."""
        return self._step <= LAST_URGENT and not metrics.keys() <= EVERY_STEP_METRICS


def _predicts_its_inputs(parts: Sequence[BatchPart], passes: Sequence[BackwardPass]) -> bool:
    """Return whether the targets of the loss, if they are known, are tokens of the inputs, as in language models."""
    return not passes[0].first_targets or bool(token_facts(parts, passes))


def _continued(counts: Mapping[str, int], names: list[str]) -> dict[str, int]:
    """Return the counts of ``names``, increased by 1; the counts of other names end."""
    return {name: counts.get(name, 0) + 1 for name in names}


def _is_sparse(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and parameter.grad.is_sparse
