"""How many values leave the range of a narrow format: counted in quantised layers, or asked what if."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import UnsuitableError, UsageError, counted, listed, require, unknown
from loopscope.hooks import GradientTap, MetricInfo, Metrics, RunInfo, Tap
from loopscope.lowbit import ROLES, BitLinear, QuantizationTap, quantized_modules
from loopscope.lowbit.casts import Cast, FormatRegistry, RuleRegistry
from loopscope.state import unsharded
from torch import Tensor, nn

from ..measures import notice
from .hypothetical_casts import OUTPUT, HypotheticalCasts, label, linear_layers, tensors_of, with_computed_weights
from .overflow_ledger import Alarm, Ledger, Page, Values, infos, turn, values_by_role, values_together
from .product_errors import LAYERS, PRODUCTS, oriented

QUANTIZERS = "quantizers"
TOGETHER = 64
"""Output gradients that are kept until they are asked about."""
SUBJECTS = (OUTPUT, "gradients", "weights", "activations")


def quantizing(model: nn.Module) -> list[str]:
    """Return the modules that quantise; low-bit layers whose recipe leaves everything in full precision do not."""
    found = {name: model.get_submodule(name) for name in quantized_modules(model)}
    return [name for name, each in found.items() if not isinstance(each, BitLinear) or each.recipe.casts]


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class GradientOverflow(TrainingHook):
    """Count how many values leave the range of a narrow format, or vanish in it, and how much noise the cast adds.

    In a model with quantised layers (``quantize_model``) it reads what their quantisers counted, by layer and by role:
    input and weight of the forward product, input and weight of the backward products, and the output's gradient. It
    counts what was really done: each micro-batch and each use of a layer is a quantisation of its own, the parts of a
    decomposed gradient (Metis) are too, and the output's gradients are as they arrive, which under a float16 loss
    scaler is multiplied by its scale. In a model without, it asks what if: which share of the output gradients, or of
    the gradients, weights or activations, would leave each of the ``formats`` under each of the ``rules``, without
    changing a bit. Name ``formats``, and it asks that of a model with quantised layers, too.

    Output gradients, dL/dy, are what training casts: those of linear layers (``nn.Linear``, ``Conv1D``), as they
    arrive. Each is cast along the dimension that its product sums over: for the input's gradient along the outputs,
    for the weight's along the tokens; roles are called ``output_gradients/e2m1/nvfp4/dgrad`` and ``.../wgrad``. Of more
    than 16,384 elements rows at even distances are looked at, and the one with the largest magnitude, which makes the
    scales. Beside them stands how far the three products of eight layers would be off, all operands cast so, also where
    training does not need one of them, as a first layer's input gradient.

    Roles of the rest are called ``gradients/e2m1/nvfp4``: these are parameter gradients of POST_BACKWARD, of the whole
    batch, unscaled, before clipping, which no product casts.
    Activations are the inputs of the layers with a matrix. Each is cast whole, along its last dimension: that over
    which the forward product sums.

    Counts stay on their device and come to the host in one transfer at each step that is looked at. They begin anew at
    PRE_STEP; the cumulative ones go on over the run and through checkpoints. What quantised layers and activations give
    is added up over ranks that see different rows, each of which casts its own, so that a scale for all of a tensor is
    one for a rank's part of it, as in training; gradients and weights are taken whole. A table for the whole run is
    shown at its end and kept in the summary. A warning names layers and roles when they begin to overflow, or to drown
    in noise, and a note says when it is over: of quantised layers, and of formats that were named.

    Assumes that the blocks of a parameter or its gradient, asked what if, lie along its last dimension as it is stored,
    which in ``Conv1D`` is not the one that a product sums over; those of quantised layers lie where the recipe says.
    Activations and output gradients of a compiled model can be asked about only in a pass of its own. Output gradients
    within attention of torch and experts are not seen. A delayed rule, asked what if, remembers the steps at which it
    was asked, not all steps; of activations and output gradients each rank remembers its own.

    Args:
        interval: steps from one round of hypothetical casts to the next.
        count_interval: steps from one step whose quantisers are counted to the next.
        formats: formats of the hypothetical casts, separated by commas; empty: e2m1 in a model without quantised
            layers, else none.
        rules: scaling rules of the hypothetical casts, separated by commas.
        of: what is asked about, separated by commas: output_gradients, gradients, weights, activations.
        top_k: layers to report by name in each role, those with the worst overflow and noise.
        overflow_threshold: warn of a layer and role if more than this share of its elements overflows.
        noise_threshold: warn of gradients whose gradient_to_noise_ratio is below this; √3 is where training degrades.
    """

    name = "gradient_overflow"
    hook_points = frozenset({HookPoint.PRE_STEP, HookPoint.POST_BACKWARD})

    interval: int = 100
    count_interval: int = 1
    formats: str = ""
    rules: str = "tensor,nvfp4,mx_floor"
    of: str = OUTPUT
    top_k: int = 3
    overflow_threshold: float = 0.1
    noise_threshold: float = math.sqrt(3)

    def __post_init__(self) -> None:
        for option, least in {"interval": 1, "count_interval": 1, "top_k": 0, "noise_threshold": 0}.items():
            value = vars(self)[option]
            in_range = least <= value < math.inf
            require(in_range, f"gradient_overflow.{option} is {value}; it must be a number of at least {least}.")
        share = self.overflow_threshold
        require(0 < share <= 1, f"gradient_overflow.overflow_threshold is {share}; it is a share above 0 and up to 1.")
        self._asks_always = bool(self.formats.strip())
        formats = _several("formats", self.formats.strip() or "e2m1", "format", FormatRegistry.names())
        rules = _several("rules", self.rules, "scaling rule", RuleRegistry.names())
        subjects = _several("of", self.of, "subject", SUBJECTS)
        self._casts = HypotheticalCasts([Cast(each, rule) for each in formats for rule in rules], subjects)
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=self.interval)
        self._plain_schedule: StepSchedule | None = None
        self.reset()

    def reset(self) -> None:
        """Forget what was counted and warned of."""
        self._counts = self._asks = False
        self._step = 0
        self._casts.reset()
        self._inputs: dict[str, list[Tensor]] = {}
        self._seen: list[tuple[str, Mapping[str, Tensor]]] = []
        self._layers: dict[str, tuple[nn.Module, bool]] = {}
        self._ledgers = {subject: Ledger() for subject in (QUANTIZERS, *self._casts.subjects)}
        self._alarms = {subject: Alarm(self.overflow_threshold, self.noise_threshold) for subject in self._ledgers}

    def start(self, run: RunInfo) -> None:
        """Decide between counting and asking; raises :class:`UnsuitableError` if there is nothing for either."""
        if self._plain_schedule is not None:
            self.step_schedule, self._plain_schedule = self._plain_schedule, None
        ledgers = {QUANTIZERS: Ledger(quantizing(run.model), ROLES, shared=True)}
        ledgers |= {subject: self._casts.ledger(subject, run.model) for subject in self._casts.subjects}
        self._layers = linear_layers(run.model) if OUTPUT in self._casts.subjects else {}
        self._counts = bool(ledgers[QUANTIZERS].layers)
        self._asks = self._asks_always or not self._counts
        computed = with_computed_weights(run.model) if OUTPUT in self._casts.subjects else []
        why = "whose weights are computed from other parameters, as by prune or weight_norm"
        if not self._counts and not any(ledger.layers for ledger in ledgers.values()):
            rest = [subject for subject in self._casts.subjects if subject != OUTPUT]
            wanted = ["output gradients of linear layers"] * (OUTPUT in self._casts.subjects)
            wanted += [f"{' or '.join(rest)} of parameters that are trained"] * bool(rest)
            raise UnsuitableError(
                f"Hook 'gradient_overflow' needs layers that quantise, or {' or '.join(wanted)}; the model has neither"
                + (f", but layers {why}: {listed(computed, 3)}." if computed else ".")
            )
        for subject, ledger in ledgers.items():
            ledger.load_state_dict(self._ledgers[subject].state_dict())
        self._ledgers = ledgers
        if self._asks and run.ranks.shares_layers and {OUTPUT, "activations"} & {*self._casts.subjects}:
            raise UnsuitableError(
                "Hook 'gradient_overflow' asks about whole activations and output gradients, and under tensor "
                "parallelism a rank has parts of some of them; set gradient_overflow.of=gradients,weights."
            )
        if self._counts:
            self._fit_schedule()
            layers = counted(len(ledgers[QUANTIZERS].layers), "quantised layer")
            notice(f"gradient_overflow counts the casts of {layers}, {_often(self.step_schedule.every_n_steps)}.")
        if self._asks:
            ways = ", ".join(map(label, self._casts.casts))
            subjects = ", ".join(self._casts.subjects).replace("_", " ")
            often = _often(self.interval if self._counts else self.step_schedule.every_n_steps)
            notice(f"gradient_overflow asks what {subjects} would lose in {ways}, {often}.")
            if computed:
                notice(f"gradient_overflow leaves out layers {why}: {listed(computed, 3)}.")

    def _fit_schedule(self) -> None:
        """Fire where quantisers are counted; what if is asked at some of these steps."""
        every = self.count_interval
        if self._asks and self.interval % every:
            raise UsageError(
                f"gradient_overflow.interval is {self.interval}; where quantised layers are counted every {every} "
                f"steps (count_interval), it must be a multiple of {every}."
            )
        self._plain_schedule = self.step_schedule
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=every)

    def taps(self, model: nn.Module) -> Iterable[Tap]:
        """Tap the quantisers, and the inputs of the layers whose activations are asked about."""
        found: list[Tap] = [QuantizationTap(layer, counts) for layer, counts in self._ledgers[QUANTIZERS].open.items()]
        if self._asks and "activations" in self._casts.subjects:
            layers = self._ledgers["activations"].layers
            found += [GradientTap(layer, "input", partial(self._see, layer)) for layer in layers]
        if self._asks and OUTPUT in self._casts.subjects:
            layers = self._ledgers[OUTPUT].layers
            found += [GradientTap(layer, "output", partial(self._see_gradient, layer)) for layer in layers]
            compared = layers[:: math.ceil(len(layers) / LAYERS)]
            found += [GradientTap(layer, "input", partial(self._keep, layer)) for layer in compared]
        return found

    def _keep(self, layer: str, values: Tensor) -> None:
        """Keep an input until the gradient of its output comes."""
        if values.is_floating_point() and self._asks_at(self._step):
            self._inputs.setdefault(layer, []).append(values)

    def _see_gradient(self, layer: str, gradient: Tensor) -> None:
        """Ask about an output gradient, and about the products that it is part of."""
        if not self._asks_at(self._step):
            return
        with torch.no_grad():
            self._seen.append((layer, oriented(gradient.detach())))
            if len(self._seen) >= TOGETHER:
                self._ask_about_seen()
            if inputs := self._inputs.get(layer):  # of several uses in a step the last comes back first
                module, transposed = self._layers[layer]
                weight = unsharded(module.get_parameter("weight").detach())
                self._casts.keep_products(inputs.pop(), weight.T if transposed else weight, gradient.detach())

    def _ask_about_seen(self) -> None:
        """Ask about the output gradients that have come, together: several times faster than one by one."""
        for product in PRODUCTS[1:]:
            seen = [(layer, views[product]) for layer, views in self._seen]
            self._casts.ask(OUTPUT, seen, self._ledgers[OUTPUT], f"/{product}")
        self._seen.clear()

    def _see(self, layer: str, values: Tensor) -> None:
        """Ask about an activation; numbers of tokens are none."""
        if values.is_floating_point() and self._asks_at(self._step):
            self._casts.ask("activations", [(layer, values)], self._ledgers["activations"])

    def _asks_at(self, step: int) -> bool:
        """Return whether the hypothetical casts are made at a step at which the hook fires."""
        return self._asks and (not self._counts or (step - 1) % self.interval == 0)

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Begin the step's counts at PRE_STEP; at POST_BACKWARD return what they say."""
        if ctx.hook_point is HookPoint.PRE_STEP:
            self._step = ctx.step
            self._casts.clear()
            self._inputs.clear()
            self._seen.clear()
            for ledger in self._ledgers.values():
                ledger.clear()
            return {}
        due = [QUANTIZERS] if self._counts else []
        if self._asks_at(ctx.step):
            for subject in self._casts.subjects:
                if subject == OUTPUT:
                    self._ask_about_seen()
                    self._casts.compare_products()
                elif subject != "activations":  # those were asked about while they passed
                    self._casts.ask(subject, tensors_of(ctx.model, subject).items(), self._ledgers[subject])
            due += self._casts.subjects
        beside = {subject: self._casts.beside(subject) for subject in due if subject != QUANTIZERS}
        ledgers = {subject: self._ledgers[subject] for subject in due}
        pages = turn(ledgers, next(ctx.model.parameters()).device, beside, ctx.ranks)
        metrics: dict[str, Any] = {}
        for subject, page in pages.items():
            if page.heard():
                metrics |= self._told(subject, page, ctx.step)
        return metrics

    def _told(self, subject: str, page: Page, step: int) -> dict[str, Any]:
        if subject == QUANTIZERS or self._asks_always:  # nobody is warned of what nobody asked
            self._alarms[subject].see(page, step)
        more = values_together(page) if subject == QUANTIZERS else self._casts.values(subject, page)
        return more | values_by_role(page, self.top_k)

    def check(self, values: Mapping[str, Any], step: int) -> None:
        """Give the warnings that have come up by ``step``."""
        for alarm in self._alarms.values():
            alarm.alerts.tell(step)

    def table(self) -> Mapping[str, Mapping[str, float]]:
        """Return the counts of the whole run, a row for each role, and for all roles of the quantised layers."""
        rows: dict[str, Values] = {}
        for subject, ledger in self._ledgers.items():
            rows |= ledger.table(together=subject == QUANTIZERS)
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of the run so far, the past of delayed rules, and what was warned of."""
        return {
            "ledgers": {subject: ledger.state_dict() for subject, ledger in self._ledgers.items()},
            "alarms": {subject: alarm.state_dict() for subject, alarm in self._alarms.items()},
            **self._casts.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned of the subjects that this hook counts."""
        for subject, ledger in self._ledgers.items():
            if subject in state["ledgers"]:
                ledger.load_state_dict(state["ledgers"][subject])
                self._alarms[subject].load_state_dict(state["alarms"][subject])
        self._casts.load_state_dict(state)

    def describe_metrics(self) -> Sequence[MetricInfo]:
        """Describe the readings; ``<parameter>`` stands for a role, or for <layer>/<role>."""
        return infos()


def _several(option: str, text: str, kind: str, known: Sequence[str]) -> list[str]:
    """Return the names in a text, each once; raises :class:`UsageError` for an unknown one, and for none."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    require(bool(names), f"gradient_overflow.{option} names nothing; known: {', '.join(known)}.")
    for name in names:
        if name not in known:
            raise UsageError(f"gradient_overflow.{option}: {unknown(kind, name, known)}")
    return names


def _often(every: int) -> str:
    return "at every step" if every == 1 else f"at step 1 and every {every:,} steps after it"
