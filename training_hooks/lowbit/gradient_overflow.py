"""Overflow, underflow and noise of narrow formats, in quantised layers or under hypothetical casts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import UnsuitableError, UsageError, counted, listed, require, unknown
from loopscope.hooks import Alert, GradientTap, MetricInfo, Metrics, QuantizationTap, RunInfo, Tap
from loopscope.lowbit import ROLES, BitLinear, quantized_modules
from loopscope.lowbit.casts import Cast, FormatRegistry, RuleRegistry
from loopscope.tensors import unsharded
from torch import Tensor, nn

from ..measures import FamilyFile, SeriesBudget, notice
from .hypothetical_casts import OUTPUT, HypotheticalCasts, label, linear_layers, trained_tensors, with_computed_weights
from .overflow_ledger import (
    Alarm,
    CountSums,
    StepCounts,
    Values,
    close_counts,
    describe_readings,
    readings_by_role,
    readings_of_all_roles,
    readings_of_layers,
)
from .product_errors import LAYERS, PRODUCTS, gradient_operands

QUANTIZERS = "quantizers"
PENDING_GRADIENTS = 64
"""Number of output gradients that are cast in one batch."""
SUBJECTS = (OUTPUT, "gradients", "weights", "activations")


def quantizing_layers(model: nn.Module) -> list[str]:
    """Return the names of the modules that quantise, without low-bit layers whose recipe casts nothing."""
    modules = {name: model.get_submodule(name) for name in quantized_modules(model)}
    return [name for name, module in modules.items() if not isinstance(module, BitLinear) or module.recipe.casts]


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class GradientOverflow(TrainingHook):
    """Count how many values leave the range of a narrow format, or vanish in it, and how much noise the cast adds.

    In a model with quantised layers (``quantize_model``) the hook reads the counts of their quantisers, by layer and by
    role: input and weight of the forward product, input and weight of the backward products, and gradient of the
    output. These are the actual quantisations: each micro-batch, each use of a layer and each part of a decomposed
    gradient (Metis) counts separately. Output gradients include the scale of a float16 loss scaler.

    In a model without quantised layers the hook makes hypothetical casts, which change nothing: it reports which share
    of the output gradients, or of the gradients, weights or activations, would leave the range of each of the
    ``formats`` under each of the ``rules``. If ``formats`` is given, it does so in a model with quantised layers, too.

    Output gradients are dL/dy of linear layers (``nn.Linear``, ``Conv1D``): the gradients that low-precision training
    casts. Each is cast along the dimension that its product sums over: the outputs for the input's gradient, the tokens
    for the weight's gradient. The roles are ``output_gradients/e2m1/nvfp4/dgrad`` and ``.../wgrad``. Of a gradient with
    more than 16,384 elements the hook casts evenly spread rows with about that many elements, but at least 64 rows,
    with the scales of these rows: the shares are unbiased estimates, which scatter if few rows have most of the energy,
    as in output layers. It also reports the errors of the three products of eight layers if all operands are cast, even
    of products that training does not need, such as the input gradient of a first layer.

    The roles of other subjects look like ``gradients/e2m1/nvfp4``. ``gradients`` are the parameter gradients at
    POST_BACKWARD, of the whole batch, unscaled and before clipping; no product casts them. Activations are the inputs
    of the layers with a matrix. Each is cast as a whole, along its last dimension, over which the forward product sums.

    Counts stay on their device; a measured step transfers them to the host once. They restart at PRE_STEP; cumulative
    counts continue over the run and through checkpoints. The counts of quantised layers and activations are summed over
    ranks with different rows. Each rank casts its own rows, so a per-tensor scale covers one rank's part, as in
    training; gradients and weights are cast whole. The run's end shows a table for the whole run, which the summary
    contains. A warning names layers and roles that start to overflow, or whose gradients become mostly noise, and a
    notice reports their recovery; both cover quantised layers and explicitly given formats only.

    Assumes that the blocks of a parameter or its gradient are along its last dimension as stored, in hypothetical
    casts; in ``Conv1D`` that is not the dimension that a product sums over. Blocks of quantised layers follow the
    recipe. Output gradients within torch's attention and within experts are not measured. A delayed rule of a
    hypothetical cast has the history of the measured steps only; for activations and output gradients each rank has a
    separate history.

    Args:
        interval: steps between two rounds of hypothetical casts.
        count_interval: steps between two counts of the quantisers.
        formats: formats of the hypothetical casts, separated by commas. Default: e2m1 in a model without quantised
            layers, else none.
        rules: scaling rules of the hypothetical casts, separated by commas.
        of: subjects of the hypothetical casts, separated by commas: output_gradients, gradients, weights, activations.
        top_k: number of layers to report by name in each role, those with the worst overflow and noise.
        names: globs, separated by commas, of layers that are always reported by name; ``*`` selects all.
        write_all: write the overflow and noise of all layers to a file in the run's folder.
        overflow_threshold: warn about a layer and role if more than this share of its elements overflows.
        noise_threshold: warn about gradients with a gradient_to_noise_ratio below this; training degrades below √3.
    """

    name = "gradient_overflow"
    has_fixed_schedule = True
    hook_points = frozenset({HookPoint.PRE_STEP, HookPoint.POST_BACKWARD})

    interval: int = 100
    count_interval: int = 1
    formats: str = ""
    rules: str = "tensor,nvfp4,mx_floor"
    of: str = OUTPUT
    top_k: int = 3
    names: str = ""
    write_all: bool = False
    overflow_threshold: float = 0.1
    noise_threshold: float = math.sqrt(3)

    def __post_init__(self) -> None:
        for option, least in {"interval": 1, "count_interval": 1, "top_k": 0, "noise_threshold": 0}.items():
            value = vars(self)[option]
            in_range = least <= value < math.inf
            require(in_range, f"gradient_overflow.{option} is {value}; it must be a number of at least {least}.")
        share = self.overflow_threshold
        require(0 < share <= 1, f"gradient_overflow.overflow_threshold is {share}; it must be a share in (0, 1].")
        self._budget = SeriesBudget(self.name, self.names, top=0, bottom=0)  # the worst layers are those of each role
        self._formats_given = bool(self.formats.strip())
        formats = _parse_names("formats", self.formats.strip() or "e2m1", "format", FormatRegistry.names())
        rules = _parse_names("rules", self.rules, "scaling rule", RuleRegistry.names())
        subjects = _parse_names("of", self.of, "subject", SUBJECTS)
        self._casts = HypotheticalCasts(
            [Cast(number_format, rule) for number_format in formats for rule in rules], subjects
        )
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=self.interval)
        self._plain_schedule: StepSchedule | None = None
        self.reset()

    def reset(self) -> None:
        """Clear all counts and reported warnings."""
        self._file = FamilyFile()
        self._counts = self._makes_casts = False
        self._step = 0
        self._casts.reset()
        self._inputs: dict[str, list[Tensor]] = {}
        self._pending_gradients: list[tuple[str, Mapping[str, Tensor]]] = []
        self._layers: dict[str, tuple[nn.Module, bool]] = {}
        self._ledgers = {subject: CountSums() for subject in (QUANTIZERS, *self._casts.subjects)}
        self._alarms = {subject: Alarm(self.overflow_threshold, self.noise_threshold) for subject in self._ledgers}

    @classmethod
    def file_names(cls, strategy: str) -> Sequence[str]:
        """Return the name of the file of ``write_all``."""
        return [FamilyFile.name(cls.name, strategy)]

    def start(self, run: RunInfo) -> None:
        """Decide between counts and hypothetical casts; raises :class:`UnsuitableError` if neither has a subject."""
        if self._plain_schedule is not None:
            self.step_schedule, self._plain_schedule = self._plain_schedule, None
        count_sums = {QUANTIZERS: CountSums(quantizing_layers(run.model), ROLES, shared=True)}
        count_sums |= {subject: self._casts.sums_of_counts(subject, run.model) for subject in self._casts.subjects}
        self._layers = linear_layers(run.model) if OUTPUT in self._casts.subjects else {}
        self._counts = bool(count_sums[QUANTIZERS].layers)
        self._makes_casts = self._formats_given or not self._counts
        computed = with_computed_weights(run.model) if OUTPUT in self._casts.subjects else []
        reason = "whose weights are computed from other parameters, as by prune or weight_norm"
        if not self._counts and not any(sums_of_counts.layers for sums_of_counts in count_sums.values()):
            others = [subject for subject in self._casts.subjects if subject != OUTPUT]
            wanted = ["output gradients of linear layers"] * (OUTPUT in self._casts.subjects)
            wanted += [f"{' or '.join(others)} of trained parameters"] * bool(others)
            raise UnsuitableError(
                f"Hook 'gradient_overflow' needs layers that quantise, or {' or '.join(wanted)}; the model has neither"
                + (f", but layers {reason}: {listed(computed, 3)}." if computed else ".")
            )
        self._budget.check_names([*dict.fromkeys(name for sums in count_sums.values() for name in sums.layers)])
        if self.write_all:
            self._file.start(self.name, run)
        for subject, sums_of_counts in count_sums.items():
            sums_of_counts.load_state_dict(self._ledgers[subject].state_dict())
        self._ledgers = count_sums
        if self._makes_casts and run.ranks.shares_layers and {OUTPUT, "activations"} & {*self._casts.subjects}:
            raise UnsuitableError(
                "Hook 'gradient_overflow' casts whole activations and output gradients, but under tensor parallelism "
                "a rank has only parts of some of them; set gradient_overflow.of=gradients,weights."
            )
        if self._counts:
            self._fit_schedule()
            layers = counted(len(count_sums[QUANTIZERS].layers), "quantised layer")
            notice(f"gradient_overflow counts the casts of {layers}, {_frequency(self.step_schedule.every_n_steps)}.")
        if self._makes_casts:
            ways = ", ".join(map(label, self._casts.casts))
            subjects = ", ".join(self._casts.subjects).replace("_", " ")
            frequency = _frequency(self.interval if self._counts else self.step_schedule.every_n_steps)
            notice(f"gradient_overflow makes hypothetical casts of {subjects} to {ways}, {frequency}.")
            if computed:
                notice(f"gradient_overflow omits layers {reason}: {listed(computed, 3)}.")

    def _fit_schedule(self) -> None:
        """Run at the steps that count quantisers; some of these steps also make the hypothetical casts."""
        every = self.count_interval
        if self._makes_casts and self.interval % every:
            raise UsageError(
                f"gradient_overflow.interval is {self.interval}; since quantised layers are counted every {every} "
                f"steps (count_interval), it must be a multiple of {every}."
            )
        self._plain_schedule = self.step_schedule
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=every)

    def taps(self, model: nn.Module) -> Iterable[Tap]:
        """Tap the quantisers, and the inputs and output gradients that hypothetical casts need."""
        taps: list[Tap] = [QuantizationTap(layer, counts) for layer, counts in self._ledgers[QUANTIZERS].open.items()]
        if self._makes_casts and "activations" in self._casts.subjects:
            layers = self._ledgers["activations"].layers
            taps += [GradientTap(layer, "input", partial(self._cast_activation, layer)) for layer in layers]
        if self._makes_casts and OUTPUT in self._casts.subjects:
            layers = self._ledgers[OUTPUT].layers
            taps += [GradientTap(layer, "output", partial(self._cast_gradient, layer)) for layer in layers]
            compared = layers[:: math.ceil(len(layers) / LAYERS)]
            taps += [GradientTap(layer, "input", partial(self._keep_input, layer)) for layer in compared]
        return taps

    def _keep_input(self, layer: str, values: Tensor) -> None:
        """Keep an input until the gradient of its output arrives."""
        if values.is_floating_point() and self._casts_at(self._step):
            self._inputs.setdefault(layer, []).append(values)

    def _cast_gradient(self, layer: str, gradient: Tensor) -> None:
        """Queue an output gradient for its casts, and keep the operands of its products.

        A layer whose weight has become computed from other parameters during the run, as by pruning, is omitted.
        """
        module, transposed = self._layers[layer]
        parameter = module._parameters.get("weight")
        if parameter is None or not self._casts_at(self._step):
            return
        with torch.no_grad():
            self._pending_gradients.append((layer, gradient_operands(gradient.detach())))
            if len(self._pending_gradients) >= PENDING_GRADIENTS:
                self._cast_pending_gradients()
            # The backward pass visits several uses of a layer in reverse order, so the last input comes first.
            if inputs := self._inputs.get(layer):
                weight = unsharded(parameter.detach())
                self._casts.keep_products(inputs.pop(), weight.T if transposed else weight, gradient.detach())

    def _cast_pending_gradients(self) -> None:
        """Cast the queued output gradients in one batch, several times faster than one by one."""
        for product in PRODUCTS[1:]:
            gradients = [(layer, views[product]) for layer, views in self._pending_gradients]
            self._casts.count_losses(OUTPUT, gradients, self._ledgers[OUTPUT], f"/{product}")
        self._pending_gradients.clear()

    def _cast_activation(self, layer: str, values: Tensor) -> None:
        """Count the losses of an activation's casts; integer inputs, such as token numbers, are ignored."""
        if values.is_floating_point() and self._casts_at(self._step):
            self._casts.count_losses("activations", [(layer, values)], self._ledgers["activations"])

    def _casts_at(self, step: int) -> bool:
        """Return whether a step on the hook's schedule has hypothetical casts."""
        return self._makes_casts and (not self._counts or (step - 1) % self.interval == 0)

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Clear the step's counts at PRE_STEP; at POST_BACKWARD return their readings."""
        if ctx.hook_point is HookPoint.PRE_STEP:
            self._step = ctx.step
            self._casts.clear()
            self._inputs.clear()
            self._pending_gradients.clear()
            for sums_of_counts in self._ledgers.values():
                sums_of_counts.clear()
            return {}
        due = [QUANTIZERS] if self._counts else []
        if self._casts_at(ctx.step):
            self._finish_casts(ctx.model)
            due += self._casts.subjects
        extra = {subject: self._casts.extra_numbers(subject) for subject in due if subject != QUANTIZERS}
        count_sums = {subject: self._ledgers[subject] for subject in due}
        step_counts = close_counts(count_sums, next(ctx.model.parameters()).device, extra, ctx.ranks)
        metrics: dict[str, Any] = {}
        for subject, step_count in step_counts.items():
            if step_count.active_roles():
                metrics |= self._metrics_of(subject, step_count, ctx.step)
        if self.write_all and metrics:
            self._file.append(ctx.step, readings_of_layers(step_counts.values()))
        return metrics

    def _finish_casts(self, model: nn.Module) -> None:
        """Make the hypothetical casts that no tap has made."""
        for subject in self._casts.subjects:
            if subject == OUTPUT:
                self._cast_pending_gradients()
                self._casts.compare_products()
            elif subject != "activations":  # their taps have counted them already
                tensors = trained_tensors(model, subject).items()
                self._casts.count_losses(subject, tensors, self._ledgers[subject])

    def _metrics_of(self, subject: str, step_count: StepCounts, step: int) -> dict[str, Any]:
        if subject == QUANTIZERS or self._formats_given:  # the default format gives no warnings
            self._alarms[subject].update(step_count, step)
        more = readings_of_all_roles(step_count) if subject == QUANTIZERS else self._casts.values(subject, step_count)
        return more | readings_by_role(step_count, self.top_k, self._budget.patterns)

    def check(self, values: Mapping[str, Any], step: int) -> list[Alert]:
        """Return the alerts of all steps up to ``step``."""
        return [alert for alarm in self._alarms.values() for alert in alarm.alerts.take_due(step)]

    def table(self) -> Mapping[str, Mapping[str, float]]:
        """Return the readings of the whole run: a row per role, and one for all roles of the quantised layers."""
        rows: dict[str, Values] = {}
        for subject, sums_of_counts in self._ledgers.items():
            rows |= sums_of_counts.table(with_total=subject == QUANTIZERS)
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of the run so far, the history of delayed rules, and the reported warnings."""
        return {
            "ledgers": {subject: sums_of_counts.state_dict() for subject, sums_of_counts in self._ledgers.items()},
            "alarms": {subject: alarm.state_dict() for subject, alarm in self._alarms.items()},
            **self._casts.state_dict(),
            "file": self._file.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from :meth:`state_dict`, with the subjects that this hook counts."""
        for subject, sums_of_counts in self._ledgers.items():
            if subject in state["ledgers"]:
                sums_of_counts.load_state_dict(state["ledgers"][subject])
                self._alarms[subject].load_state_dict(state["alarms"][subject])
        self._casts.load_state_dict(state)
        if "file" in state:  # checkpoints of earlier versions have none
            self._file.load_state_dict(state["file"])

    def describe_metrics(self) -> Sequence[MetricInfo]:
        """Describe the readings; ``<parameter>`` stands for a role, or for <layer>/<role>."""
        return describe_readings()


def _parse_names(option: str, text: str, kind: str, choices: Sequence[str]) -> list[str]:
    """Return the distinct names in a text; raises :class:`UsageError` for an unknown name, and for an empty text."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    require(bool(names), f"gradient_overflow.{option} is empty; choose from: {', '.join(choices)}.")
    for name in names:
        if name not in choices:
            raise UsageError(f"gradient_overflow.{option}: {unknown(kind, name, choices)}")
    return names


def _frequency(every: int) -> str:
    return "at every step" if every == 1 else f"at step 1 and every {every:,} steps after it"
