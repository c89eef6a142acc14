"""Sizes, outliers and dead units of the activations, in the training's own forward pass."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import UnsuitableError, listed, require
from loopscope.hooks import ForwardCall, ForwardTap, Metrics, RunInfo
from torch import Tensor

from ..measures import FamilyFile, SeriesBudget, notice
from .tapped_modules import activation_modules, block_chains, matching_modules
from .unit_sums import (
    UnitSums,
    dead_fraction,
    dormant_fraction,
    largest_magnitude,
    massive_count,
    nonfinite_fraction,
    outlier_kurtosis,
    root_mean_square,
    tokens_by_units,
)

FAMILIES: Mapping[str, Callable[[UnitSums], Tensor]] = {
    "rms": root_mean_square,
    "max_abs": largest_magnitude,
    "nonfinite_fraction": nonfinite_fraction,
    "massive_count": massive_count,
    "outlier_kurtosis": outlier_kurtosis,
    "dead_fraction": dead_fraction,
}
"""The statistics that depend on no option, by family; ``dormant_fraction`` and ``growth`` are computed in the hook."""


@HookRegistry.register
class Activations(TrainingHook):
    """Measure the size, the outliers and the dead units of activations, in the forward pass of the training step.

    x is the output of a module over all tokens of the step, a matrix of shape (tokens, units): the rows of all
    micro-batches and ranks. Measured are the outputs of blocks, which in a transformer are the residual stream, and of
    activation functions that are modules, such as ``nn.ReLU``. Blocks are found as in ``gradient_flow``. Dead and
    dormant units are reported for activation functions, or for the modules that ``modules`` names.

    Outliers: a few units of a transformer's residual stream grow far beyond the others, which breaks low-precision
    formats. The kurtosis of the units' sizes measures it (He et al., arXiv 2405.19279), and massive activations are
    single elements above 100 and above 1,000 times the median magnitude (Sun et al., arXiv 2402.17762).

    Dormant units (Sokar et al., arXiv 2302.12902) have a mean magnitude of at most 0.025 times the mean of their layer.
    Dead units have the same value for every token of the step, such as the 0 of a ReLU or the 1 of a saturated
    sigmoid.

    A module that is used several times in a step is measured over all its uses; uses with different numbers of units
    are left out after the first. A recomputation by activation checkpointing is not a use.

    Assumes that units are the last dimension of a tensor with up to three dimensions, and dimension 1 (channels) of
    images and volumes. So the "units" of an ``nn.Conv1d``, and of modules after it, are positions. The median is that
    of at most 16,384 elements of a micro-batch, spread evenly over it. Under tensor parallelism activation functions
    may see a part of their units only, so only blocks are measured.

    Args:
        interval: steps between two measurements.
        modules: globs on module names, separated by commas, to measure instead of blocks and activation functions.
        names: globs, separated by commas, of measured modules that are always reported.
        top: number of modules with the largest values that each family reports in addition.
        bottom: number of modules with the smallest values that each family reports in addition.
        write_all: write the values of all measured modules to a file in the run's folder.
        dormant_threshold: share of the layer's mean magnitude up to which a unit is dormant.
    """

    name = "activations"
    hook_points = frozenset({HookPoint.PRE_STEP, HookPoint.POST_BACKWARD})
    in_health = True
    _sums = Remembered(dict[str, UnitSums], saved=False)
    _file = Remembered(FamilyFile, merged=True)
    metrics = """
        rms/<parameter> | √(mean x²), x the output of the module over all tokens of the step | [0, ∞)
            | Compare blocks with each other: a steady growth with depth is normal in pre-norm transformers. Rises over
            the training without end: the logits will, too. NaN here and below: an element is not finite.
        max_abs/<parameter> | max |x| | [0, ∞] | Above 65,504 float16 overflows. Hundreds of times rms: outliers.
        nonfinite_fraction/<parameter> | infinite and NaN elements / all elements | [0, 1]
            | Above 0: see first_nonfinite for the producer.
        massive_count/<parameter> | number of elements with |x| > 100 and |x| > 1000·median |x| | 0, 1, 2, …
            | Above 0 in a few blocks is normal for large language models, where they act as biases of attention.
            They need formats with a wide range.
        outlier_kurtosis/<parameter> | mean_j s_j⁴ / (mean_j s_j²)², s_j the root mean square of unit j | [1, units],
            NaN | 1: all units have equal size. Rising over the training: outlier units, which make quantisation hard.
        growth/<parameter> | rms of a block / rms of the block before it in its stack | [0, ∞], NaN
            | Above 1 in every block: the residual stream grows geometrically with depth. Far from 1 in one block:
            look at its initialisation and normalisation.
        dormant_fraction/<parameter> | units with mean |x_j| ≤ dormant_threshold × mean over units of mean |x_j| / all
            units | [0, 1] | Rising: the layer loses capacity. Typical after too high a learning rate, or in
            reinforcement learning.
        dead_fraction/<parameter> | units j whose max x_j − min x_j over the tokens is at most 1e-6·max |x| / all units
            | [0, 1] | Above about 0.1 for long: units that get no gradient from any token. Lower the learning rate,
            check the bias, or use an activation function without a flat side. NaN: the step has one token.
        largest_max_abs | max over all measured modules of max_abs | [0, ∞] | Where float16 overflows first.
        largest_outlier_kurtosis | max of outlier_kurtosis over all measured modules with an element other than 0
            | [1, ∞), NaN | The module that is hardest to quantise.
        largest_dead_fraction | max of dead_fraction over the activation functions with more than one token
            | [0, 1], NaN | Rising: look at the family for the layer.
        total_massive_count | sum over all measured modules of massive_count | 0, 1, 2, …
            | Changes from 0: the first massive activations appear.
    """

    def __init__(
        self,
        *,
        interval: int = 50,
        modules: str = "",
        names: str = "",
        top: int = 10,
        bottom: int = 5,
        write_all: bool = False,
        dormant_threshold: float = 0.025,
    ) -> None:
        require(interval >= 1, f"activations.interval is {interval}; it must be at least 1 step.")
        is_share = 0 <= dormant_threshold < 1
        require(is_share, f"activations.dormant_threshold is {dormant_threshold}; it must be in [0, 1).")
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=interval)
        self._budget = SeriesBudget(self.name, names, top, bottom)
        self._patterns, self._write_all, self._dormant_threshold = modules, write_all, dormant_threshold
        self._modules: list[str] = []
        self._with_units: set[str] = set()
        self._chains: Mapping[str, Sequence[str]] = {}

    @classmethod
    def file_names(cls, strategy: str) -> Sequence[str]:
        """Return the name of the file of ``write_all``."""
        return [FamilyFile.name(cls.name, strategy)]

    def start(self, run: RunInfo) -> None:
        """Find the modules to measure.

        Raises:
            UnsuitableError: the model has neither blocks nor activation functions.
            UsageError: a pattern matches no module.
        """
        self._chains = block_chains(run.model)
        self._device = next(run.model.parameters()).device
        blocks = [block for chain in self._chains.values() for block in chain]
        functions = activation_modules(run.model)
        if self._patterns.strip():
            self._modules = matching_modules(run.model, self._patterns, "activations.modules")
            self._with_units = {*self._modules}
        else:
            if run.ranks.shares_layers and functions:
                notice(
                    "activations leaves out activation functions, which may see a part of their units under tensor "
                    f"parallelism: {listed(functions, 3)}."
                )
                functions = []
            self._modules, self._with_units = [*dict.fromkeys([*blocks, *functions])], {*functions}
        if not self._modules:
            raise UnsuitableError(
                "Hook 'activations' measures blocks, or activation functions that are modules, and the model has "
                "neither; name modules with activations.modules."
            )
        self._budget.check_names(self._modules)
        if self._write_all:
            self._file.start(self.name, run)

    def taps(self, model: object) -> Iterable[ForwardTap]:
        """Tap the outputs of the measured modules."""
        return [ForwardTap(name, partial(self._add, name)) for name in self._modules]

    def _add(self, name: str, call: ForwardCall) -> None:
        values = tokens_by_units(call.output)
        if values is None:
            return
        previous = self._sums.get(name)
        if previous is None:
            self._sums[name] = UnitSums.of(values)
        elif len(previous.squares) == values.shape[1]:
            self._sums[name] = previous.add(UnitSums.of(values))

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Clear the sums at PRE_STEP; at POST_BACKWARD return the statistics of the step."""
        if ctx.hook_point is HookPoint.PRE_STEP:
            self._sums = {}
            return {}
        sums, self._sums = self._combined(ctx), {}
        if not sums:
            return {}
        families = self._families(sums)
        chosen: dict[str, float] = {}
        for family, values in families.items():
            chosen |= {f"{family}/{name}": values[name] for name in self._budget.choose(values)}
        if self._write_all:
            self._file.append(ctx.step, families)
        nonfinite, dead = families["nonfinite_fraction"], families["dead_fraction"]
        return {
            **chosen,
            "largest_max_abs": max(families["max_abs"].values(), key=_order),
            "largest_outlier_kurtosis": _largest(families["outlier_kurtosis"], nonfinite),
            **({"largest_dead_fraction": _largest(dead, nonfinite)} if dead else {}),
            "total_massive_count": sum(families["massive_count"].values()),
        }

    def _combined(self, ctx: RunDataContext) -> dict[str, UnitSums]:
        """Return the sums over the tokens of all ranks, in the order of the measured modules."""
        ranks = ctx.ranks
        names = [name for name in self._modules if name in self._sums]
        if not ranks.data:
            return {name: self._sums[name] for name in names}
        ranks.join()
        # A rank may skip a module, such as an expert, or use it with another number of units.
        units: dict[str, int] = {}
        for counts in ranks.gather({name: len(self._sums[name].squares) for name in names}):
            units = counts | units
        names = [name for name in self._modules if name in units]
        sums = [self._sums_of(name, units[name]) for name in names]
        totals = iter(ranks.sums([part for item in sums for part in item.totals]))
        extremes = iter(ranks.sums([part for item in sums for part in item.extremes], largest=True))
        return {
            name: UnitSums.joined([next(totals) for _ in range(3)], [next(extremes) for _ in range(2)])
            for name in names
        }

    def _sums_of(self, name: str, units: int) -> UnitSums:
        """Return the sums of a module on this rank, those over no tokens if the rank does not use it."""
        sums = self._sums.get(name)
        return sums if sums is not None and len(sums.squares) == units else UnitSums.empty(units, self._device)

    def _families(self, sums: Mapping[str, UnitSums]) -> dict[str, dict[str, float]]:
        """Return the values of every family by module, after one transfer to the host."""
        keys: list[tuple[str, str]] = []
        values: list[Tensor] = []
        functions: dict[str, Callable[[UnitSums], Tensor]] = dict(FAMILIES)
        functions["dormant_fraction"] = partial(dormant_fraction, threshold=self._dormant_threshold)
        for family, function in functions.items():
            of_units = family in ("dormant_fraction", "dead_fraction")
            for name in sums:
                if not of_units or name in self._with_units:
                    keys.append((family, name))
                    values.append(function(sums[name]))
        families: dict[str, dict[str, float]] = {family: {} for family in functions}
        for (family, name), value in zip(keys, torch.stack(values).tolist(), strict=True):
            families[family][name] = value
        sizes = families["rms"]
        families["growth"] = {
            block: sizes[block] / sizes[previous] if sizes[previous] else float("nan")
            for chain in self._chains.values()
            for previous, block in pairwise(name for name in chain if name in sizes)
        }
        return families


def _order(value: float) -> float:
    """Return the key that orders NaN, which comes of elements that are NaN, above all numbers."""
    return math.inf if math.isnan(value) else value


def _largest(values: Mapping[str, float], nonfinite: Mapping[str, float]) -> float:
    """Return the largest value; NaN if an element of a module is not finite.

    A module with finite elements only, whose value is NaN, is left out: it has one token, or all of its elements are 0.
    """
    defined = [value for name, value in values.items() if nonfinite[name] or not math.isnan(value)]
    return max(defined, key=_order, default=math.nan)
