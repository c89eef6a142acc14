"""Counts of quantisations by layer and role, of the step in progress and of the run so far, and what they say."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
"""Readings that are whole numbers."""
CUMULATIVE = (
    *("element_overflow_rate", "batch_overflow_rate", "underflow_rate"),
    *("total_elements", "total_overflow_elements", "total_quantizations", "overflow_count"),
)
"""Readings that are also taken over the whole run."""
CUMULATIVE_BY_ROLE = ("element_overflow_rate", "batch_overflow_rate")


def readings(sums: Numbers, maxima: Numbers) -> dict[str, Numbers]:
    """Return every reading of counts of any leading shape, whose last dimensions are ``SUMS`` and ``MAXIMA``.

    NaN stands where there is nothing to divide by: rates of no elements, excess without overflow.
    """
    of = dict(zip(SUMS + MAXIMA, np.moveaxis(np.concatenate([sums, maxima], -1), -1, 0), strict=True))
    elements, overflowing = of["total_elements"], of["total_overflow_elements"]
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
            "scale_spread": np.where(of["scale_max"] > 0, of["scale_max"] * of["inverse_scale_max"], np.nan),
            "upper_half_fraction": of["upper_half_elements"] / elements,
        }


def plain(name: str, value: Any) -> float | int:
    """Return a reading as a number of Python, a whole one as an integer."""
    return int(value) if name in WHOLE else float(value)


_TABLE = metric_table("""
    element_overflow_rate | elements with |x| > s·M / all elements, s the scale, M the largest number of the format
        | [0, 1], NaN | What saturates. By construction 2.3 % of a Gaussian under mx_floor and 3.5 % under nvfp4 (by at
        most 1/16), 0 under tensor, current, row, block, mx_ceil, mx_rceil and Metis' two. Above that: outliers under a
        delayed scale, or a q_scalar below 1.
    batch_overflow_rate | quantisations (of a whole tensor each) in which any element overflows / all quantisations
        | [0, 1], NaN | Near 1 with a small element_overflow_rate: every tensor has a few outliers.
    total_elements | elements that were quantised | 0, 1, 2, … | What the rates are shares of.
    total_overflow_elements | elements with |x| > s·M | 0, 1, 2, … | The numerator of element_overflow_rate.
    total_quantizations | tensors that were quantised, each use and each micro-batch by itself | 0, 1, 2, …
        | What batch_overflow_rate is a share of.
    overflow_count | quantisations in which any element overflows | 0, 1, 2, … | Its numerator.
    excess_mean | mean over the overflowing elements of |x| / (s·M) | (1, ∞), NaN
        | By how much what saturates is cut. Just above 1 is harmless. NaN: nothing overflows.
    excess_max | max over the overflowing elements of |x| / (s·M) | (1, ∞), NaN | The worst cut of all.
    underflow_rate | elements with x ≠ 0 that become 0 / all elements | [0, 1], NaN
        | What is lost at the other end: a share of any Gaussian in few bits (7 % in e2m1 with a scale for 16). Rising:
        one outlier sets the scale of many; take smaller blocks or a format with more exponent bits.
    non_finite_count | elements that are inf or NaN before the cast; they count as elements, but not as overflowing
        | 0, 1, 2, … | Above 0: the run is broken, or a float16 loss scaler has gone too far for a step.
    quantization_error | mean over the finite elements of (q(x) − x)², q(x) after scaling back | [0, ∞), NaN
        | In the square of the tensor's own unit: compare between formats, not between tensors.
    gradient_to_noise_ratio | ‖x‖₂ / ‖q(x) − x‖₂ over the finite elements of all tensors together | [0, ∞], NaN
        | Of gradients: training degrades below √3 ≈ 1.73 (arXiv 2505.19115), and more exponent bits, smaller blocks or
        stochastic rounding help. Of weights and inputs it is the same ratio without that threshold.
    scale_min | the smallest scale s above 0 | (0, ∞), NaN | Of the quietest block, or tensor.
    scale_max | the largest scale s | (0, ∞), NaN | Of the loudest.
    scale_spread | scale_max / scale_min, over all blocks and tensors | [1, ∞), NaN
        | What a single scale would have to span. Far above the format's own range: one scale for all would not do.
    upper_half_fraction | elements with |x| > s·M/2 / all elements | [0, 1], NaN
        | No overflow, although published code calls it that: with a scale from the largest magnitude a third of a
        Gaussian block lies there. High: the range is used well.
""")
_OF_WHAT_IF = metric_table("""
    scale_exponents_of/<parameter> | by hypothetical role: scales s > 0 (of blocks, or tensors) by floor(log2 s)
        | exponent → 0, 1, 2, … | How wide the scales lie: those in E4M3 span 17 exponents below the largest, those in
        E8M0 254. Two humps: layers that need rules of their own.
    product_error_of/<parameter> | by product/format/rule: mean of ‖P̂ − P‖ / ‖P‖, P̂ from operands that are cast along
        the dimension that it sums over; of at most 8 layers, and 64 rows and columns of each P | [0, ∞), NaN
        | What a cast does to what training uses: y (forward), dx (dgrad), dW (wgrad). Above 0.5 little is left.
    product_cosine_of/<parameter> | by product/format/rule: mean of ⟨P̂, P⟩ / (‖P̂‖ ‖P‖), P̂ and P the same | [-1, 1], NaN
        | 1: only the length differs, which Adam undoes. Far below: the direction is lost.
""")
READINGS: Mapping[str, MetricInfo] = {info.name: info for info in _TABLE}
"""What each reading means, whatever it is taken over."""


def infos() -> list[MetricInfo]:
    """Describe the readings of all roles together, by role, over the whole run, and of the worst layers."""
    since = "over all steps so far at which it was counted"
    worst = metric_table(f"""
        topk_element_overflow_rate/<parameter> | of the top_k layers of each role where it is largest and above 0:
            {READINGS["element_overflow_rate"].formula} | (0, 1]
            | Which layers overflow. At each step the names, <layer>/<role>, are those of then.
        topk_gradient_to_noise_ratio/<parameter> | of the top_k layers of each role of gradients where it is smallest:
            {READINGS["gradient_to_noise_ratio"].formula} | [0, ∞)
            | Which layers drown in the noise of their quantisation.
    """)
    return [
        *_family(READINGS, "{}", "over all roles"),
        *_family(READINGS, "{}_of/<parameter>", "by role"),
        *_family(CUMULATIVE, "cumulative_{}", f"{since}, all roles"),
        *_family(CUMULATIVE_BY_ROLE, "cumulative_{}_of/<parameter>", f"{since}, by role"),
        *worst,
        *_OF_WHAT_IF,
    ]


def _family(names: Iterable[str], name: str, over: str) -> list[MetricInfo]:
    """Describe readings taken over something; ``name`` is their new name with ``{}`` for the old."""
    old = [READINGS[each] for each in names]
    return [replace(info, name=name.format(info.name), formula=f"{over}: {info.formula}") for info in old]


OVERFLOW, NOISE = "element_overflow_rate", "gradient_to_noise_ratio"
QUANTIZATIONS = SUMS.index("quantizations")


@dataclass(frozen=True)
class Page:
    """The counts of a step and of the run so far on the host, each of shape (layers, roles, numbers)."""

    layers: Sequence[str]
    roles: Sequence[str]
    sums: Numbers
    maxima: Numbers
    run_sums: Numbers
    beside: Numbers
    """What was handed over beside the counts."""

    def heard(self) -> list[int]:
        """Return the roles, by position, in which anything was quantised in this step."""
        return np.flatnonzero(self.sums[..., QUANTIZATIONS].any(0)).tolist()

    def over(self, axes: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the readings over some axes of the step and of the run so far, which has none that need maxima."""
        maxima = self.maxima.max(axes)
        return readings(self.sums.sum(axes), maxima), readings(self.run_sums.sum(axes), np.zeros_like(maxima))

    def worst(self, reading: str, role: int, *, largest: bool) -> list[tuple[str, float]]:
        """Return the layers that have a reading in a role, the worst first, ties in the order of the model."""
        values = readings(self.sums[:, role], self.maxima[:, role])[reading]
        order = np.argsort(-values if largest else values, kind="stable")
        return [(self.layers[index], float(values[index])) for index in order if not np.isnan(values[index])]


class Ledger:
    """Adds up counts on their device, of which :func:`turn` makes pages.

    Args:
        layers: the names of the layers or tensors.
        roles: what is quantised of them.
        shared: ranks see different values, so that theirs are added up where there are several.
    """

    def __init__(self, layers: Sequence[str] = (), roles: Sequence[str] = (), *, shared: bool = False) -> None:
        self.layers, self.roles = list(layers), list(roles)
        self.steps = 0
        """Pages so far."""
        self.open: dict[str, dict[str, Counts]] = {layer: {} for layer in self.layers}
        """The counts of the step in progress by layer and role, where there are any."""
        self._shared = shared
        self._run: Counts | None = None

    def clear(self) -> None:
        """Forget the step in progress."""
        for counts in self.open.values():
            counts.clear()

    def add(self, layer: str, role: str, counts: Counts) -> None:
        """Add what one quantisation lost; a layer that appears during the run, as factors of a split do, joins."""
        if layer not in self.open:
            self._join(layer)
        known = self.open[layer].get(role)
        self.open[layer][role] = counts if known is None else joined(known, counts)

    def _join(self, layer: str) -> None:
        self.layers.append(layer)
        self.open[layer] = {}
        if self._run is not None:
            tables = self._run.sums, self._run.maxima
            self._run = Counts(*(torch.cat([table, torch.zeros_like(table[:1])]) for table in tables))

    def close(self, device: torch.device, beside: Tensor | None = None, ranks: Ranks | None = None) -> list[Tensor]:
        """Close the step and return the tables of its page, made on ``device``.

        Numbers of the step ``beside`` the counts, float64, go along. Among ranks it is one reduction of the sums and
        these, and one of the maxima.
        """
        step = self._gathered(device)
        extra = step.sums.new_zeros(0) if beside is None else beside.to(device)
        if self._shared and ranks is not None and ranks.data:
            ranks.join()
            added, extra = ranks.sums([step.sums, extra])
            step = Counts(added, ranks.sums([step.maxima], largest=True)[0])
        self.clear()
        self.steps += 1
        before = self._run and Counts(self._run.sums.to(device), self._run.maxima.to(device))
        self._run = step if before is None else joined(before, step)
        return [step.sums, step.maxima, self._run.sums, extra]

    def _gathered(self, device: torch.device) -> Counts:
        """Return the step's counts, of shape (layers, roles)."""
        nothing = Counts.zeros(device=device)
        grid = [self.open[layer].get(role, nothing) for layer in self.layers for role in self.roles]
        tables = [each.sums.to(device) for each in grid], [each.maxima.to(device) for each in grid]
        return Counts(*(torch.stack(table).view(len(self.layers), len(self.roles), -1) for table in tables))

    def table(self, *, together: bool) -> dict[str, Values]:
        """Return a row for each role in which anything was quantised so far, and one for all of them ``together``."""
        if self._run is None:
            return {}
        both = torch.cat([self._run.sums, self._run.maxima], -1).cpu().numpy()
        sums, maxima = np.split(both, [len(SUMS)], -1)
        rows = dict(zip(self.roles, zip(sums.sum(0), maxima.max(0), strict=True), strict=True))
        rows = {role: row for role, row in rows.items() if row[0][QUANTIZATIONS]}
        if together:
            rows["all roles"] = sums.sum((0, 1)), maxima.max((0, 1))
        found = {role: readings(*row) for role, row in rows.items()}
        return {role: {name: plain(name, values[name]) for name in TABLE} for role, values in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of the run so far, and what they are of; the step in progress begins anew."""
        run = {} if self._run is None else {"sums": self._run.sums, "maxima": self._run.maxima}
        return {"layers": self.layers, "roles": self.roles, "steps": self.steps, "run": run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from :meth:`state_dict`, layer by layer; counts of another model or other roles begin anew."""
        names: list[str] = state["layers"]
        if self.layers and (self.roles != state["roles"] or not {*self.layers} & {*names}):
            return
        new, opened = [layer for layer in self.layers if layer not in names], self.open
        # In the order of the state, since the last bits of a sum over the layers depend on it.
        self.layers, self.roles, self.steps = list(names), list(state["roles"]), state["steps"]
        self.open = {layer: opened.get(layer, {}) for layer in names}
        run: Mapping[str, Tensor] = state["run"]
        self._run = Counts(run["sums"], run["maxima"]) if run else None
        for layer in new:
            self._join(layer)


def turn(
    ledgers: Mapping[str, Ledger],
    device: torch.device,
    beside: Mapping[str, Tensor] = MappingProxyType({}),
    ranks: Ranks | None = None,
) -> dict[str, Page]:
    """Close the step of ledgers and return the page of each that has layers, with one transfer to the host for all."""
    tables = {name: each.close(device, beside.get(name), ranks) for name, each in ledgers.items() if each.layers}
    if not tables:
        return {}
    parts = [part for each in tables.values() for part in each]
    flat = torch.cat([part.flatten() for part in parts]).cpu().numpy()
    split = iter(np.split(flat, np.cumsum([part.numel() for part in parts])[:-1]))
    return {
        name: Page(ledgers[name].layers, ledgers[name].roles, *(next(split).reshape(part.shape) for part in each))
        for name, each in tables.items()
    }


def joined(one: Counts, other: Counts) -> Counts:
    """Return the sum of two counts; neither is changed."""
    return Counts(one.sums + other.sums, torch.maximum(one.maxima, other.maxima))


TABLE = (
    *("total_quantizations", "overflow_count", "batch_overflow_rate"),
    *("total_elements", "total_overflow_elements", "element_overflow_rate"),
    *("underflow_rate", "gradient_to_noise_ratio"),
)
"""The readings in the table at the end of a run."""
HYSTERESIS = 2.0
"""A warned condition ends where the value is back within its threshold by this factor."""


def of_gradients(role: str) -> bool:
    """Return whether what is quantised in a role is a gradient."""
    return role == "output_grad" or role.startswith(("gradients/", "output_gradients/"))


def values_together(page: Page) -> Values:
    """Return the readings over all roles, of the step and of the run so far."""
    step, run = page.over((0, 1))
    return {name: plain(name, value) for name, value in step.items()} | {
        f"cumulative_{name}": plain(name, run[name]) for name in CUMULATIVE
    }


def values_by_role(page: Page, top_k: int) -> Values:
    """Return the readings of the roles in which anything was quantised, and those of their worst layers."""
    step, run = page.over((0,))
    found: Values = {}
    for index in page.heard():
        role = page.roles[index]
        found |= {f"{name}_of/{role}": plain(name, values[index]) for name, values in step.items()}
        found |= {f"cumulative_{name}_of/{role}": plain(name, run[name][index]) for name in CUMULATIVE_BY_ROLE}
        overflowing = [pair for pair in page.worst(OVERFLOW, index, largest=True)[:top_k] if pair[1] > 0]
        found |= {f"topk_{OVERFLOW}/{layer}/{role}": value for layer, value in overflowing}
        if of_gradients(role):
            noisy = page.worst(NOISE, index, largest=False)[:top_k]
            found |= {f"topk_{NOISE}/{layer}/{role}": value for layer, value in noisy}
    return found


class Alarm(Remembering):
    """Warns when layers begin to overflow, or their gradients to drown in noise, and when that is over.

    Args:
        most_overflow: the share of a layer's elements in a role above which it overflows.
        least_ratio: the ratio of gradient to noise below which a gradient drowns.
    """

    alerts = Remembered(lambda alarm: Alerts(alarm.phrases, noun="cast"), by_options=True, merged=True)

    def __init__(self, most_overflow: float, least_ratio: float) -> None:
        self._most_overflow, self._least_ratio = most_overflow, least_ratio
        above, below = f"in more than {most_overflow:.3g} of", f"a gradient-to-noise ratio below {least_ratio:.3g}"
        self.phrases = {
            OVERFLOW: (f"overflows {above} its elements", f"overflow {above} their elements"),
            NOISE: (f"has {below}", f"have {below}"),
        }

    def see(self, page: Page, step: int) -> None:
        """Note the layers that overflow, and those whose gradients drown in noise, on a page."""
        values = readings(page.sums, page.maxima)
        overflow, noise = values[OVERFLOW], values[NOISE].copy()
        noise[:, [not of_gradients(role) for role in page.roles]] = np.nan
        self._note(OVERFLOW, page, -overflow, -self._most_overflow, -self._most_overflow / HYSTERESIS, step)
        self._note(NOISE, page, noise, self._least_ratio, self._least_ratio * HYSTERESIS, step)

    def _note(self, condition: str, page: Page, values: Any, begins: float, ends: float, step: int) -> None:
        """Note the casts with values below ``begins``, and apart, of those told of, the ones that ``ends`` is above."""
        below = [(float(values[place]), place) for place in map(tuple, np.argwhere(values < ends).tolist())]
        texts = {f"{page.layers[row]} {page.roles[role]}": value for value, (row, role) in sorted(below)}
        found = {name: f"{abs(value):.3g}" for name, value in texts.items() if value < begins}
        told = self.alerts.told(condition) - found.keys()
        late = {name: f"{abs(value):.3g}" for name, value in texts.items() if name in told}
        checked = int((~np.isnan(values)).sum())
        worst, limit = abs(min(texts.values(), default=0.0)), abs(begins)
        self.alerts.see(condition, found, step=step, checked=checked, lingering=late, worst=worst, limit=limit)
