"""The routing of mixture-of-experts layers: the load of each expert, balance, dropped tokens, router logits."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import UsageError, listed, require
from loopscope.hooks import ForwardCall, ForwardTap, Metrics, RunInfo, Tap
from loopscope.option_words import hook_option_text
from torch import Tensor, nn

from ..measures import FamilyFile, SeriesBudget, notice
from .routers import Router, find_routers
from .routing import LayerCounts, count_routing, read_routing

SMALLEST_IS_WORST = frozenset({"load_entropy"})
"""Measures of a layer that are worse if they are smaller."""
OVER_LAYERS: dict[str, Callable[[list[float]], float]] = {
    "max_violation": max,
    "load_variation": max,
    "load_entropy": min,
    "dead_experts": math.fsum,
    "router_z": max,
    "balance_loss": max,
}
"""By measure of a layer, how the layers are summarised."""


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class MoeRouter(TrainingHook):
    """Measure how the routers of a mixture of experts distribute the tokens of a step.

    The hook reads the outputs of the routers in the forward passes of the training: their logits, and the experts that
    they chose. If a router returns its logits only, the experts with the ``top_k`` largest logits count as chosen. A
    recomputation by activation checkpointing is not counted again.

    T_e is the number of assignments to expert e of E, each token having k of them, and f_e = T_e / Σ T its share. p is
    the softmax of a token's router logits, or, in routers with sigmoid scores (DeepSeek-V3), the sigmoid divided by its
    sum; P_e is the mean of p_e over the tokens. Counts and sums are added up over the micro-batches and ranks of a step
    before f·P is computed; the mean of the balance losses of micro-batches is another number, usually a larger one.

    A model of transformers declares its routers (Mixtral, Qwen3-MoE, OLMoE, DeepSeek, gpt-oss and others). In other
    models the hook takes modules called gate or router next to experts, or the modules that ``routers`` names.

    Sources: max violation arXiv 2408.15664; balance loss arXiv 2101.03961, where transformers multiplies it by k;
    router z-loss arXiv 2202.08906.

    Assumes that every token that passes a router counts: padding tokens too, which the auxiliary loss of transformers
    omits if the model gets an attention mask. In one step with few tokens, experts differ by chance: if k·N assignments
    fall on E experts at random, the coefficient of variation is about √((E − 1)/(k·N)), and E·(1 − 1/E)^(k·N) experts
    are dead. The hook does not see tokens that a layer drops after its router; ``capacity_factor`` computes them. Every
    rank has the outputs of the routers for its rows: expert parallelism that renumbers the experts in these outputs is
    not supported.

    Args:
        interval: steps between two measurements.
        routers: glob patterns, separated by commas, of modules that return router logits; empty: found automatically.
        top_k: experts per token; 0: as the routers, their layers or the model's configuration define it.
        scores: function from logits to scores: softmax, sigmoid, or auto.
        capacity_factor: count the assignments of an expert beyond this multiple of k·N/E in a pass as dropped; 0: count
            only those that the router's output marks as dropped.
        names: glob patterns, separated by commas, of layers or experts that are always reported; ``*`` selects all.
        top: number of layers with the largest values, and of experts with the largest loads, to report in each family.
        bottom: number of layers with the smallest values, and of experts with the smallest loads.
        write_all: write the measures of all layers and experts to a file in the run's folder.
    """

    name = "moe_router"
    hook_points = frozenset({HookPoint.PRE_STEP, HookPoint.POST_BACKWARD})
    metrics = """
        max_violation | largest of max_violation/<layer> | [0, E − 1], NaN
            | 0: perfectly balanced. Above 1: one expert of a layer gets more than twice its share, and sets the time of
            the layer under expert parallelism.
        load_variation | largest of load_variation/<layer> | [0, √(E − 1)], NaN
            | 0: balanced. Rising: the balance loss, or the bias of the experts, is too weak.
        load_entropy | smallest of load_entropy/<layer> | [0, 1], NaN
            | 1: balanced. Falling towards 0: the router of a layer collapses onto few experts.
        dead_experts | sum of dead_experts/<layer> | 0, 1, 2, … | 0 in a healthy run with many tokens per expert.
        dropped_share | dropped assignments / all assignments, over all layers | [0, 1], NaN
            | 0 in layers without a capacity. Above a few percent: raise the capacity, or balance the load.
        router_z | largest of router_z/<layer> | [0, ∞), NaN
            | Steady. Growing: router logits drift to values that bfloat16 rounds coarsely; add a z-loss.
        balance_loss | largest of balance_loss/<layer> | [0, E], NaN
            | 1: balanced. E: one expert gets all tokens, with certainty.
        max_violation/<parameter> | max_e T_e / mean T − 1 in one layer | [0, E − 1], NaN
            | NaN: no token reached an expert.
        load_variation/<parameter> | coefficient of variation of T_e: population standard deviation / mean, in one layer
            | [0, √(E − 1)], NaN | Compare layers; the value by chance is √((E − 1)/(k·N)).
        load_entropy/<parameter> | −Σ f_e ln f_e / ln E in one layer | [0, 1], NaN
            | ln E · load_entropy is the logarithm of the effective number of experts.
        dead_experts/<parameter> | number of experts with T_e = 0 in one layer | 0..E
            | An expert that stays dead gets no gradient, and its parameters are wasted.
        dropped_share/<parameter> | dropped assignments / all assignments in one layer | [0, 1], NaN
            | Dropped tokens pass the layer through the residual stream only.
        router_z/<parameter> | mean over tokens of (ln Σ_e exp logit_e)² in one layer | [0, ∞), NaN
            | NaN: the router returns probabilities.
        balance_loss/<parameter> | E · Σ_e f_e·P_e in one layer | [0, E], NaN
            | Below 1: the experts with many tokens are those with low scores, as with a bias on the choice only.
        load/<parameter> | T_e / mean T of one expert, by layer/e | [0, E], NaN
            | 1: its fair share. 0: dead in this step.
    """

    interval: int = 50
    routers: str = ""
    top_k: int = 0
    scores: str = "auto"
    capacity_factor: float = 0.0
    names: str = ""
    top: int = 5
    bottom: int = 3
    write_all: bool = False

    _file = Remembered(FamilyFile)

    def __post_init__(self) -> None:
        require(self.interval >= 1, f"moe_router.interval is {self.interval}; it must be at least 1.")
        require(self.top_k >= 0, f"moe_router.top_k is {self.top_k}; it must be at least 0.")
        in_range = 0 <= self.capacity_factor < math.inf
        require(in_range, f"moe_router.capacity_factor is {self.capacity_factor}; it must be a number of at least 0.")
        if self.scores not in ("auto", "softmax", "sigmoid"):
            raise UsageError(f"moe_router.scores is {self.scores!r}; it must be auto, softmax or sigmoid.")
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=self.interval)
        self._budget = SeriesBudget(self.name, self.names, self.top, self.bottom)
        self._run: RunInfo | None = None
        self._found: list[Router] = []
        self._sums: dict[str, Tensor] = {}
        self._unreadable: dict[str, str] = {}
        self._has_warned = False

    @classmethod
    def file_names(cls, strategy: str) -> Sequence[str]:
        """Return the name of the file with all layers and experts."""
        return [FamilyFile.name(cls.name, strategy)]

    def start(self, run: RunInfo) -> None:
        """Find the routers.

        Raises:
            UnsuitableError: the model has none.
        """
        self._found = self._routers_of(run.model)
        self._sums, self._unreadable, self._has_warned = {}, {}, False
        self._run = run

    def _routers_of(self, model: nn.Module) -> list[Router]:
        patterns = [pattern for pattern in map(str.strip, self.routers.split(",")) if pattern]
        return find_routers(model, patterns, self.top_k, self.scores)

    def taps(self, model: nn.Module) -> Iterable[Tap]:
        """Tap the outputs of the routers."""
        return [ForwardTap(router.name, partial(self._count, router)) for router in self._found]

    def _count(self, router: Router, call: ForwardCall) -> None:
        """Add the counts of one pass of a router."""
        routing = read_routing(call.output, router.top_k, router.logits_index)
        if routing is None:
            self._unreadable[router.name] = type(call.output).__name__
            return
        sums = count_routing(routing, router.scores, self.capacity_factor)
        earlier = self._sums.get(router.name)
        self._sums[router.name] = sums if earlier is None else earlier + sums

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Clear the sums at PRE_STEP; at POST_BACKWARD return the measures of the step."""
        if ctx.hook_point is HookPoint.PRE_STEP:
            self._sums.clear()
            return {}
        ctx.ranks.join()
        self._report_unreadable()
        sizes = {router.name: len(self._sums[router.name]) for router in self._found if router.name in self._sums}
        if ctx.ranks.agree(len(sizes) < len(self._found)):  # a layer may have no pass on one rank
            sizes = {name: size for of_rank in ctx.ranks.gather(sizes) for name, size in of_rank.items()}
            sizes = {router.name: sizes[router.name] for router in self._found if router.name in sizes}
        if not sizes:
            return {}
        device = next(ctx.model.parameters()).device
        zeros = {name: torch.zeros(size, dtype=torch.float64, device=device) for name, size in sizes.items()}
        sums = ctx.ranks.sums([self._sums.get(name, zero).to(device) for name, zero in zeros.items()])
        self._sums.clear()
        # One transfer for all layers: the choice of the reported series needs the values.
        parts = torch.split(torch.cat(sums).cpu(), [*sizes.values()])
        layers = {name: LayerCounts.of(part.tolist()) for name, part in zip(sizes, parts, strict=True)}
        return self._measure(layers, ctx.step)

    def _measure(self, layers: Mapping[str, LayerCounts], step: int) -> dict[str, Any]:
        by_layer = {name: counts.measures() for name, counts in layers.items()}
        families: dict[str, dict[str, float]] = {
            measure: {name: values[measure] for name, values in by_layer.items()}
            for measure in next(iter(by_layer.values()))
        }
        metrics: dict[str, Any] = {name: _summary(name, families[name].values()) for name in OVER_LAYERS}
        assignments = math.fsum(counts.assignments for counts in layers.values())
        dropped = math.fsum(counts.dropped for counts in layers.values())
        metrics["dropped_share"] = dropped / assignments if assignments else math.nan
        families["load"] = {
            f"{name}/{expert}": load
            for name, counts in layers.items()
            for expert, load in enumerate(counts.relative_load())
        }
        if self.write_all and self._run is not None:
            self._file.start(self.name, self._run)  # the memory of a hook may have been restored since the last step
            self._file.append(step, families)
        for family, values in families.items():
            metrics |= {f"{family}/{name}": values[name] for name in self._budget.choose(values)}
        return metrics

    def _report_unreadable(self) -> None:
        if self._unreadable and not self._has_warned:
            self._has_warned = True
            kinds = [f"{name} ({kind})" for name, kind in self._unreadable.items()]
            notice(
                f"Hook 'moe_router' cannot read the outputs of {listed(kinds, 3)}: they have no router logits, or "
                f"logits without the chosen experts; set {hook_option_text(self.name, routers='GLOB', top_k='K')}."
            )


def _summary(measure: str, values: Iterable[float]) -> float:
    """Return the summary of a measure over the layers where it is a number; NaN without any."""
    numbers = [value for value in values if not math.isnan(value)]
    return float(OVER_LAYERS[measure](numbers)) if numbers else math.nan
