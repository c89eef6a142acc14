"""Counts of quantisations by layer and role, for the current step and the run so far, and their readings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from loopscope.hooks import MetricInfo, Remembered, Remembering, metric_table
from loopscope.lowbit.casts import MAXIMA, SUMS, Counts
from loopscope.training import Ranks
from torch import Tensor

from ..measures import Alerts

Numbers = npt.NDArray[np.float64]
Values = dict[str, float | int]
WHOLE = ("total_elements", "total_overflow_elements", "total_quantizations", "overflow_count", "non_finite_count")
"""Readings that are integers."""
CUMULATIVE = (
    *("element_overflow_rate", "batch_overflow_rate", "underflow_rate"),
    *("total_elements", "total_overflow_elements", "total_quantizations", "overflow_count"),
)
"""Readings that are also taken over the whole run."""
CUMULATIVE_BY_ROLE = ("element_overflow_rate", "batch_overflow_rate")


def readings(sums: Numbers, maxima: Numbers) -> dict[str, Numbers]:
    """Return all readings of counts with any leading shape; the last dimensions are ``SUMS`` and ``MAXIMA``.

    A reading without a denominator is NaN, such as a rate of no elements or an excess without overflow.
    """
    of = dict(zip(SUMS + MAXIMA, np.moveaxis(np.concatenate([sums, maxima], -1), -1, 0), strict=True))
    elements, overflowing = of["total_elements"], of["total_overflow_elements"]
    # Tables are combined by sums and maxima only, so the smallest scale is stored as the largest 1/s.
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "element_overflow_rate": overflowing / elements,
            "batch_overflow_rate": of["overflow_count"] / of["quantizations"],
            "total_elements": elements,
            "total_overflow_elements": overflowing,
            "total_quantizations": of["quantizations"],
            "overflow_count": of["overflow_count"],
            "excess_mean": of["excess_sum"] / overflowing,
            "excess_max": np.where(overflowing > 0, of["excess_max"], np.nan),
            "underflow_rate": of["underflow_elements"] / elements,
            "non_finite_count": of["non_finite_elements"],
            "quantization_error": of["squared_error"] / (elements - of["non_finite_elements"]),
            "gradient_to_noise_ratio": np.sqrt(of["squared_norm"] / of["squared_error"]),
            "scale_min": np.where(of["inverse_scale_max"] > 0, 1 / of["inverse_scale_max"], np.nan),
            "scale_max": np.where(of["scale_max"] > 0, of["scale_max"], np.nan),
            # at least 1, which rounding may miss by one unit
            "scale_spread": np.where(
                of["scale_max"] > 0, np.maximum(of["scale_max"] * of["inverse_scale_max"], 1), np.nan
            ),
            "upper_half_fraction": of["upper_half_elements"] / elements,
        }


def as_number(name: str, value: Any) -> float | int:
    """Return a reading as a Python number, an integer for counts."""
    return int(value) if name in WHOLE else float(value)


_TABLE = metric_table("""
    element_overflow_rate | elements with |x| > s·M / all elements, s the scale, M the largest number of the format
        | [0, 1], NaN | The share that saturates. By construction 2.3 % of a Gaussian under mx_floor and 3.5 % under
        nvfp4 (by at most 1/16), 0 under tensor, current, row, block, mx_ceil, mx_rceil and the two Metis rules. Above
        that: outliers under a delayed scale, or a q_scalar below 1.
    batch_overflow_rate | quantisations (of a whole tensor each) in which any element overflows / all quantisations
        | [0, 1], NaN | Near 1 with a small element_overflow_rate: every tensor has a few outliers.
    total_elements | elements that were quantised | 0, 1, 2, … | The denominator of the rates.
    total_overflow_elements | elements with |x| > s·M | 0, 1, 2, … | The numerator of element_overflow_rate.
    total_quantizations | tensors that were quantised, each use and each micro-batch separately | 0, 1, 2, …
        | The denominator of batch_overflow_rate.
    overflow_count | quantisations in which any element overflows | 0, 1, 2, … | The numerator of batch_overflow_rate.
    excess_mean | mean over the overflowing elements of |x| / (s·M) | (1, ∞), NaN
        | The factor by which saturation cuts values. Just above 1 is harmless. NaN: nothing overflows.
    excess_max | max over the overflowing elements of |x| / (s·M) | (1, ∞), NaN | The worst cut of any element.
    underflow_rate | elements with x ≠ 0 that become 0 / all elements | [0, 1], NaN
        | The loss at the small end: few bits lose a share of any Gaussian (7 % in e2m1 with a scale for 16). Rising:
        one outlier sets the scale of many elements; use smaller blocks or a format with more exponent bits.
    non_finite_count | elements that are inf or NaN before the cast; they count as elements, but not as overflowing
        | 0, 1, 2, … | Above 0: the run has diverged, or a float16 loss scaler overflowed in this step.
    quantization_error | mean over the finite elements of (q(x) − x)², q(x) after scaling back | [0, ∞), NaN
        | In the squared unit of the tensor: compare between formats, not between tensors.
    gradient_to_noise_ratio | ‖x‖₂ / ‖q(x) − x‖₂ over the finite elements of all tensors together | [0, ∞], NaN
        | For gradients: training degrades below √3 ≈ 1.73 (arXiv 2505.19115); more exponent bits, smaller blocks or
        stochastic rounding help. For weights and inputs the ratio has no such threshold.
    scale_min | the smallest scale s above 0 | (0, ∞), NaN | The scale of the block or tensor of smallest magnitude.
    scale_max | the largest scale s | (0, ∞), NaN | The scale of the block or tensor of largest magnitude.
    scale_spread | scale_max / scale_min, over all blocks and tensors | [1, ∞), NaN
        | The range that a single scale would have to cover. Far above the format's own range: one scale is not enough.
    upper_half_fraction | elements with |x| > s·M/2 / all elements | [0, 1], NaN
        | Not overflow, although published code calls it so: if the largest magnitude sets the scale, a third of a
        Gaussian block is in the upper half. High: the range is used well.
""")
_HYPOTHETICAL = metric_table("""
    scale_exponents_of/<parameter> | by hypothetical role: scales s > 0 (of blocks, or tensors) by floor(log2 s)
        | exponent → 0, 1, 2, … | The spread of the scales: E4M3 scales span 17 exponents below the largest, E8M0
        scales 254. Two humps: some layers need separate rules.
    product_error_of/<parameter> | by product/format/rule: mean of ‖P̂ − P‖ / ‖P‖, P̂ from operands that are cast along
        the summed dimension; at most 8 layers, and 64 rows and columns of each P | [0, ∞), NaN
        | The effect of a cast on the results that training uses: y (forward), dx (dgrad), dW (wgrad). Above 0.5:
        little of the product is left.
    product_cosine_of/<parameter> | by product/format/rule: mean of ⟨P̂, P⟩ / (‖P̂‖ ‖P‖), P̂ and P the same | [-1, 1], NaN
        | 1: only the length differs, which Adam corrects. Far below: the direction is lost.
""")
READINGS: Mapping[str, MetricInfo] = {info.name: info for info in _TABLE}
"""The description of each reading, without the layers, roles and steps that it covers."""


def describe_readings() -> list[MetricInfo]:
    """Describe the readings of all roles, by role, over the whole run, and of the worst layers."""
    since = "over all counted steps so far"
    worst = metric_table(f"""
        topk_element_overflow_rate/<parameter> | of the top_k layers of each role where it is largest and above 0, and
            of the layers in names: {READINGS["element_overflow_rate"].formula} | [0, 1]
            | The layers that overflow most. The names, <layer>/<role>, may change from step to step.
        topk_gradient_to_noise_ratio/<parameter> | of the top_k layers of each role of gradients where it is smallest,
            and of the layers in names: {READINGS["gradient_to_noise_ratio"].formula} | [0, ∞)
            | The layers whose gradients have the most quantisation noise.
    """)
    return [
        *_family(READINGS, "{}", "over all roles"),
        *_family(READINGS, "{}_of/<parameter>", "by role"),
        *_family(CUMULATIVE, "cumulative_{}", f"{since}, all roles"),
        *_family(CUMULATIVE_BY_ROLE, "cumulative_{}_of/<parameter>", f"{since}, by role"),
        *worst,
        *_HYPOTHETICAL,
    ]


def _family(names: Iterable[str], template: str, scope: str) -> list[MetricInfo]:
    """Describe readings of a scope; ``template`` is their new name with ``{}`` for the old one."""
    readings_infos = [READINGS[name] for name in names]
    return [
        replace(info, name=template.format(info.name), formula=f"{scope}: {info.formula}") for info in readings_infos
    ]


OVERFLOW, NOISE = "element_overflow_rate", "gradient_to_noise_ratio"
QUANTIZATIONS = SUMS.index("quantizations")


@dataclass(frozen=True)
class StepCounts:
    """The counts of a step and of the run so far, on the host, each of shape (layers, roles, numbers)."""

    layers: Sequence[str]
    roles: Sequence[str]
    sums: Numbers
    maxima: Numbers
    run_sums: Numbers
    extra: Numbers
    """Further numbers of the step that accompany the counts."""

    def active_roles(self) -> list[int]:
        """Return the indices of the roles with any quantisation in this step."""
        return np.flatnonzero(self.sums[..., QUANTIZATIONS].any(0)).tolist()

    def over(self, axes: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the readings over some axes, of the step and of the run so far; the latter without maxima."""
        maxima = self.maxima.max(axes)
        return readings(self.sums.sum(axes), maxima), readings(self.run_sums.sum(axes), np.zeros_like(maxima))

    def worst(self, reading: str, role: int, *, largest: bool) -> list[tuple[str, float]]:
        """Return the layers with a reading in a role, worst first, ties in the order of the model."""
        values = readings(self.sums[:, role], self.maxima[:, role])[reading]
        order = np.argsort(-values if largest else values, kind="stable")
        return [(self.layers[index], float(values[index])) for index in order if not np.isnan(values[index])]


class CountSums:
    """Sums of counts on their device; :func:`close_counts` returns those of a step on the host.

    Args:
        layers: the names of the layers or tensors.
        roles: the names of their quantised parts.
        shared: whether ranks have different values, so that counts are summed over ranks.
    """

    def __init__(self, layers: Sequence[str] = (), roles: Sequence[str] = (), *, shared: bool = False) -> None:
        self.layers, self.roles = list(layers), list(roles)
        self.steps = 0
        """Number of closed steps."""
        self.open: dict[str, dict[str, Counts]] = {layer: {} for layer in self.layers}
        """The counts of the current step by layer and role, without empty ones."""
        self._shared = shared
        self._run: Counts | None = None

    def clear(self) -> None:
        """Clear the counts of the current step."""
        for counts in self.open.values():
            counts.clear()

    def add(self, layer: str, role: str, counts: Counts) -> None:
        """Add the counts of one quantisation; the layer may be new, such as a factor of a split."""
        if layer not in self.open:
            self._add_layer(layer)
        total = self.open[layer].get(role)
        self.open[layer][role] = counts if total is None else add_counts(total, counts)

    def _add_layer(self, layer: str) -> None:
        self.layers.append(layer)
        self.open[layer] = {}
        if self._run is not None:
            tables = self._run.sums, self._run.maxima
            self._run = Counts(*(torch.cat([table, torch.zeros_like(table[:1])]) for table in tables))

    def close(self, device: torch.device, extra: Tensor | None = None, ranks: Ranks | None = None) -> list[Tensor]:
        """Close the step and return its tables, on ``device``.

        ``extra`` are further float64 numbers of the step, which accompany the counts. Several ranks need two
        reductions: one of the sums and extra numbers, one of the maxima.
        """
        step = self._stack_counts(device)
        extra = step.sums.new_zeros(0) if extra is None else extra.to(device)
        if self._shared and ranks is not None and ranks.data:
            ranks.join()
            sums, extra = ranks.sums([step.sums, extra])
            step = Counts(sums, ranks.sums([step.maxima], largest=True)[0])
        self.clear()
        self.steps += 1
        total = self._run and Counts(self._run.sums.to(device), self._run.maxima.to(device))
        self._run = step if total is None else add_counts(total, step)
        return [step.sums, step.maxima, self._run.sums, extra]

    def _stack_counts(self, device: torch.device) -> Counts:
        """Return the step's counts, of shape (layers, roles)."""
        zeros = Counts.zeros(device=device)
        grid = [self.open[layer].get(role, zeros) for layer in self.layers for role in self.roles]
        tables = [counts.sums.to(device) for counts in grid], [counts.maxima.to(device) for counts in grid]
        return Counts(*(torch.stack(table).view(len(self.layers), len(self.roles), -1) for table in tables))

    def table(self, *, with_total: bool) -> dict[str, Values]:
        """Return a row for each role with any quantisation so far; ``with_total`` adds a row for all roles."""
        if self._run is None:
            return {}
        both = torch.cat([self._run.sums, self._run.maxima], -1).cpu().numpy()
        sums, maxima = np.split(both, [len(SUMS)], -1)
        rows = dict(zip(self.roles, zip(sums.sum(0), maxima.max(0), strict=True), strict=True))
        rows = {role: row for role, row in rows.items() if row[0][QUANTIZATIONS]}
        if with_total:
            rows["all roles"] = sums.sum((0, 1)), maxima.max((0, 1))
        by_role = {role: readings(*row) for role, row in rows.items()}
        return {role: {name: as_number(name, values[name]) for name in TABLE} for role, values in by_role.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of the run so far with their layers and roles, without those of the current step."""
        run = {} if self._run is None else {"sums": self._run.sums, "maxima": self._run.maxima}
        return {"layers": self.layers, "roles": self.roles, "steps": self.steps, "run": run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from :meth:`state_dict`, layer by layer; ignore counts of another model or other roles."""
        names: list[str] = state["layers"]
        if self.layers and (self.roles != state["roles"] or not {*self.layers} & {*names}):
            return
        new, opened = [layer for layer in self.layers if layer not in names], self.open
        # Keep the order of the state, since the last bits of a sum over the layers depend on it.
        self.layers, self.roles, self.steps = list(names), list(state["roles"]), state["steps"]
        self.open = {layer: opened.get(layer, {}) for layer in names}
        run: Mapping[str, Tensor] = state["run"]
        self._run = Counts(run["sums"], run["maxima"]) if run else None
        for layer in new:
            self._add_layer(layer)


def close_counts(
    count_sums: Mapping[str, CountSums],
    device: torch.device,
    extra: Mapping[str, Tensor] = MappingProxyType({}),
    ranks: Ranks | None = None,
) -> dict[str, StepCounts]:
    """Close the step and return the counts of each subject with layers, in one transfer to the host."""
    tables = {
        name: sums_of_counts.close(device, extra.get(name), ranks)
        for name, sums_of_counts in count_sums.items()
        if sums_of_counts.layers
    }
    if not tables:
        return {}
    parts = [part for table in tables.values() for part in table]
    flat = torch.cat([part.flatten() for part in parts]).cpu().numpy()
    split = iter(np.split(flat, np.cumsum([part.numel() for part in parts])[:-1]))
    return {
        name: StepCounts(
            count_sums[name].layers, count_sums[name].roles, *(next(split).reshape(part.shape) for part in table)
        )
        for name, table in tables.items()
    }


def add_counts(a: Counts, b: Counts) -> Counts:
    """Return the sum of two counts, as new tensors."""
    return Counts(a.sums + b.sums, torch.maximum(a.maxima, b.maxima))


TABLE = (
    *("total_quantizations", "overflow_count", "batch_overflow_rate"),
    *("total_elements", "total_overflow_elements", "element_overflow_rate"),
    *("underflow_rate", "gradient_to_noise_ratio"),
)
"""The readings in the table at the end of a run."""
HYSTERESIS = 2.0
"""A reported condition ends when the value is back within its threshold by this factor."""


def is_gradient_role(role: str) -> bool:
    """Return whether a role quantises gradients."""
    return role == "output_grad" or role.startswith(("gradients/", "output_gradients/"))


def readings_of_all_roles(step_count: StepCounts) -> Values:
    """Return the readings over all roles, for the step and the run so far."""
    step, run = step_count.over((0, 1))
    return {name: as_number(name, value) for name, value in step.items()} | {
        f"cumulative_{name}": as_number(name, run[name]) for name in CUMULATIVE
    }


def readings_by_role(step_count: StepCounts, top_k: int, patterns: Sequence[str] = ()) -> Values:
    """Return the readings of the active roles, and of their worst layers and those that match a pattern."""
    step, run = step_count.over((0,))
    metrics: Values = {}
    for index in step_count.active_roles():
        role = step_count.roles[index]
        metrics |= {f"{name}_of/{role}": as_number(name, values[index]) for name, values in step.items()}
        metrics |= {f"cumulative_{name}_of/{role}": as_number(name, run[name][index]) for name in CUMULATIVE_BY_ROLE}
        overflowing = step_count.worst(OVERFLOW, index, largest=True)
        chosen = [pair for pair in overflowing[:top_k] if pair[1] > 0] + _named(overflowing, patterns)
        metrics |= {f"topk_{OVERFLOW}/{layer}/{role}": value for layer, value in chosen}
        if is_gradient_role(role):
            noisy = step_count.worst(NOISE, index, largest=False)
            metrics |= {
                f"topk_{NOISE}/{layer}/{role}": value for layer, value in noisy[:top_k] + _named(noisy, patterns)
            }
    return metrics


def _named(pairs: Sequence[tuple[str, float]], patterns: Sequence[str]) -> list[tuple[str, float]]:
    return [pair for pair in pairs if any(fnmatchcase(pair[0], pattern) for pattern in patterns)]


def readings_of_layers(step_counts: Iterable[StepCounts]) -> dict[str, dict[str, float]]:
    """Return the readings that have worst layers, of all layers in the active roles, as ``layer/role``."""
    families: dict[str, dict[str, float]] = {OVERFLOW: {}, NOISE: {}}
    for step_count in step_counts:
        for index in step_count.active_roles():
            role = step_count.roles[index]
            for name in (OVERFLOW, NOISE) if is_gradient_role(role) else (OVERFLOW,):
                pairs = step_count.worst(name, index, largest=True)
                families[name] |= {f"{layer}/{role}": value for layer, value in pairs}
    return families


class Alarm(Remembering):
    """Warnings about layers that start to overflow or whose gradients become mostly noise, and about their recovery.

    Args:
        most_overflow: a layer overflows in a role if more than this share of its elements does.
        least_ratio: a gradient is mostly noise below this gradient-to-noise ratio.
    """

    alerts = Remembered(lambda alarm: Alerts(alarm.phrases, noun="cast"), by_options=True, merged=True)

    def __init__(self, most_overflow: float, least_ratio: float) -> None:
        self._most_overflow, self._least_ratio = most_overflow, least_ratio
        above, below = f"in more than {most_overflow:.3g} of", f"a gradient-to-noise ratio below {least_ratio:.3g}"
        self.phrases = {
            OVERFLOW: (f"overflows {above} its elements", f"overflow {above} their elements"),
            NOISE: (f"has {below}", f"have {below}"),
        }

    def update(self, step_count: StepCounts, step: int) -> None:
        """Queue warnings for the layers that overflow in a step, or whose gradients are mostly noise."""
        values = readings(step_count.sums, step_count.maxima)
        overflow, noise = values[OVERFLOW], values[NOISE].copy()
        noise[:, [not is_gradient_role(role) for role in step_count.roles]] = np.nan
        self._update(OVERFLOW, step_count, -overflow, -self._most_overflow, -self._most_overflow / HYSTERESIS, step)
        self._update(NOISE, step_count, noise, self._least_ratio, self._least_ratio * HYSTERESIS, step)

    def _update(self, condition: str, step_count: StepCounts, values: Any, start: float, end: float, step: int) -> None:
        """Update a condition: casts below ``start`` are in it, reported casts below ``end`` linger."""
        below_end = [(float(values[index]), index) for index in map(tuple, np.argwhere(values < end).tolist())]
        by_name = {
            f"{step_count.layers[row]} {step_count.roles[role]}": value for value, (row, role) in sorted(below_end)
        }
        affected = {name: f"{abs(value):.3g}" for name, value in by_name.items() if value < start}
        recovering = self.alerts.reported(condition) - affected.keys()
        lingering = {name: f"{abs(value):.3g}" for name, value in by_name.items() if name in recovering}
        checked = int((~np.isnan(values)).sum())
        worst, limit = abs(min(by_name.values(), default=0.0)), abs(start)
        self.alerts.update(
            condition, affected, step=step, checked=checked, lingering=lingering, worst=worst, limit=limit
        )
