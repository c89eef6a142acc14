"""Gradient health and true weight updates, parameter by parameter, around an optimizer's step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from loopscope.errors import UsageError, require
from loopscope.hooks import Remembered, Remembering
from loopscope.state import groups_of, over_shards, trainable
from torch import Tensor, nn
from torch.optim import Optimizer

from .watched_elements import Named, WatchedElements, gradient_shards, norms

EPSILON = 1e-12
"""Added to the norm of the weights, so that the update ratio of weights that are all zero is finite."""
Rates = Mapping[str, tuple[float, float]]
"""By parameter, of a step: the learning rate, and the share of a weight that decoupled decay takes (0 without any)."""
UNKNOWN = (math.nan, 0.0)
"""The rates of a parameter that no group has."""


@dataclass(slots=True)
class GradientDiagnostics:
    """The gradient of one parameter; norms of a sample are scaled to the whole."""

    l2_norm: float
    max_abs: float
    """The largest absolute value, of the sample if there is one; NaN where it was not asked for."""
    mean_abs: float
    learning_rate: float
    """Of the parameter's group; NaN if no group has the parameter."""
    is_vanishing: bool
    is_exploding: bool

    @property
    def is_finite(self) -> bool:
        """Whether every element that was looked at is finite."""
        return math.isfinite(self.l2_norm)


@dataclass(slots=True)
class UpdateDiagnostics:
    """What one step did to one parameter; norms and counts of a sample are scaled to the whole."""

    update_ratio: float
    """‖Δw‖₂ / (‖w‖₂ + ε), w before the step, ε = 1e-12."""
    update_norm: float
    weight_norm: float
    learning_rate: float
    """Of the parameter's group; NaN if no group has the parameter."""
    frozen_checks: int
    """How many checks in a row, this one included, it has not moved."""
    is_frozen: bool
    driven_elements: float
    """Elements with a gradient other than zero, if the weights are of lower precision than float32 and the learning
    rate is above 0; otherwise 0."""
    stuck_elements: float
    """Those of them that are where decoupled decay alone takes them: the gradient's part was rounded away."""
    decayed_elements: float
    """Elements other than zero that decoupled decay should shrink, if their precision is low; otherwise 0."""
    undecayed_elements: float
    """Those of them that the decay alone, rounded, leaves as they are."""
    lost: tuple[str, ...]
    """The terms of the update of which all was rounded away: ``gradient``; ``decay``, where nothing moved."""

    @property
    def is_rounded_away(self) -> bool:
        """Whether a whole term of its update was lost, so that it does not move as it should: it is not frozen."""
        return bool(self.lost)

    @property
    def rounded_away(self) -> float:
        """The share of the stuck among the driven elements; NaN if none is driven."""
        return self.stuck_elements / self.driven_elements if self.driven_elements else math.nan

    @property
    def decay_rounded_away(self) -> float:
        """The share of the undecayed among the decayed elements; NaN if none is decayed."""
        return self.undecayed_elements / self.decayed_elements if self.decayed_elements else math.nan


@dataclass(kw_only=True)
class WeightUpdateMonitor(Remembering):
    """Checks gradients after backward, and weights around the optimizer's step, in any training loop.

    :meth:`check_gradients`, after ``backward()`` and before clipping and step, also keeps the weights;
    :meth:`check_updates`, after the step, compares. Parameters without gradient are skipped, and so is an update of
    which a sample says nothing, since none of its elements had a gradient while others had. Each of the two brings its
    numbers to the host in one transfer, but for a gradient that vanishes in a sample: that is looked at whole.

    Args:
        sample_size: elements of each parameter to look at; a smaller parameter is taken whole. Keeps a weight and an
            index for each: 8 bytes in float32.
        exact: look at all elements, and keep one copy of all parameters, instead.
        vanishing_grad_threshold: a gradient vanishes if ‖g‖₂ is at most this.
        exploding_grad_threshold: a gradient explodes if ‖g‖₂ is at least this or not finite.
        frozen_update_ratio_threshold: a parameter has not moved if its update ratio is at most this.
        frozen_patience_steps: checks in a row without movement that make a parameter frozen.
    """

    sample_size: int = 1024
    exact: bool = False
    vanishing_grad_threshold: float = 1e-7
    exploding_grad_threshold: float = 1e2
    frozen_update_ratio_threshold: float = 1e-12
    frozen_patience_steps: int = 3
    _watched = Remembered(
        lambda new: WatchedElements(None if new.exact else new.sample_size), by_options=True, saved=False
    )
    _frozen = Remembered(dict[str, int])
    """Checks in a row without movement."""
    _checked = Remembered[Named](dict, saved=False)
    _rates = Remembered[dict[str, tuple[float, float]]](dict)
    """Those of the step that is made: afterwards a scheduler may have set others."""
    _missed = Remembered(list[str])
    """Parameters with a gradient of which the sample has seen nothing."""

    def __post_init__(self) -> None:
        for option in ("sample_size", "frozen_patience_steps"):
            require(vars(self)[option] >= 1, f"{option} is {vars(self)[option]}; it must be at least 1.")
        for option in ("vanishing_grad_threshold", "exploding_grad_threshold", "frozen_update_ratio_threshold"):
            if not 0 <= vars(self)[option] < math.inf:
                raise UsageError(f"{option} is {vars(self)[option]}; it must be a number of at least 0.")
        if self.vanishing_grad_threshold >= self.exploding_grad_threshold:
            raise UsageError(
                f"vanishing_grad_threshold is {self.vanishing_grad_threshold} and exploding_grad_threshold "
                f"{self.exploding_grad_threshold}; the first must be the smaller one."
            )

    @property
    def bytes(self) -> int:
        """The memory that is kept from check to check."""
        return self._watched.bytes

    def check_gradients(self, model: nn.Module, optimizer: Optimizer) -> dict[str, GradientDiagnostics]:
        """Measure the gradients by parameter name, and keep the weights they belong to; before the step."""
        parameters = trainable(model)
        rates = {
            id(value): step_rate(float(group["lr"]), float(group.get("weight_decay", 0.0)), group)
            for group in optimizer.param_groups
            for value in group["params"]
        }
        named = {name: rates[id(value)] for name, value in parameters.items() if id(value) in rates}
        return self.gradients(parameters, named, extremes=True)

    def check_updates(self, model: nn.Module, optimizer: Optimizer) -> dict[str, UpdateDiagnostics]:
        """Measure what the step did to the weights that :meth:`check_gradients` kept; empty if it kept none.

        Learning rates are those that the groups had at :meth:`check_gradients`, whether or not a scheduler has stepped.
        Not for a step that ``torch.amp.GradScaler`` skipped: it would count as one that moved nothing.
        """
        return self.updates(model)

    @torch.no_grad()
    def gradients(self, parameters: Named, rates: Rates, *, extremes: bool) -> dict[str, GradientDiagnostics]:
        """Measure the gradients of parameters, keep their weights and rates; ``extremes``: maximum and mean, too."""
        chosen = {name: value for name, value in parameters.items() if value.grad is not None and value.numel()}
        tables = self._watched.measure(chosen, extremes=extremes)
        self._checked = {name: chosen[name] for name in self._watched.names}
        self._rates = {name: rates[name] for name in self._checked if name in rates}
        kinds = ("norm", "largest", "sum")
        columns = _on_host(tables, kinds, self._checked)
        found = {name: self._gradient(name, column) for name, *column in columns}
        doubtful = {
            n: self._checked[n] for n, each in found.items() if each.is_vanishing and self._watched[n].share > 1
        }
        orders = (2.0, math.inf, 1.0) if extremes else (2.0,)
        whole = [[norms(gradient_shards([value]), order) for order in orders] for value in doubtful.values()]
        looked_at = {
            name: self._gradient(name, column, whole=True) for name, *column in _on_host(whole, kinds, doubtful)
        }
        self._missed = [name for name, each in looked_at.items() if not each.is_vanishing]
        return found | looked_at

    def _gradient(self, name: str, column: Sequence[float], *, whole: bool = False) -> GradientDiagnostics:
        choice = self._watched[name]
        norm = column[0] * (1.0 if whole else math.sqrt(choice.share))
        return GradientDiagnostics(
            l2_norm=norm,
            max_abs=column[1] if len(column) > 1 else math.nan,
            mean_abs=column[2] / (choice.elements if whole else choice.looked_at) if len(column) > 1 else math.nan,
            learning_rate=self._rates.get(name, UNKNOWN)[0],
            is_vanishing=norm <= self.vanishing_grad_threshold,
            is_exploding=not norm < self.exploding_grad_threshold,
        )

    def updates(self, model: nn.Module) -> dict[str, UpdateDiagnostics]:
        """Measure what has become of the weights that :meth:`gradients` kept; they are not kept any longer."""
        if not self._watched.keeps:
            return {}
        names, chosen, self._checked = self._watched.names, self._checked, {}
        if list(chosen) != names:
            chosen = {name: model.get_parameter(name) for name in names}
        decays = {name: decay for name, (rate, decay) in self._rates.items() if rate > 0}
        columns = _on_host(self._watched.compare(chosen, decays), ("norm", "norm", "sum", "sum", "sum", "sum"), chosen)
        silent = {name for name, _, change, *_ in columns if not change and name in self._missed}
        return {name: self._update(name, column) for name, *column in columns if name not in silent}

    def _update(self, name: str, column: Sequence[float]) -> UpdateDiagnostics:
        share = self._watched[name].share
        weight_norm, update_norm = column[0] * math.sqrt(share), column[1] * math.sqrt(share)
        driven, stuck, decayed, undecayed = (count * share for count in column[2:])
        ratio = update_norm / (weight_norm + EPSILON)
        still = ratio <= self.frozen_update_ratio_threshold
        gone = {"gradient": stuck > 0 and (still or stuck == driven), "decay": undecayed > 0 and still}
        lost = tuple(term for term, is_gone in gone.items() if is_gone)
        earlier = self._frozen.pop(name, 0)
        checks = earlier + 1 if still and not lost else 0
        if checks:
            self._frozen[name] = checks
        return UpdateDiagnostics(
            update_ratio=ratio,
            update_norm=update_norm,
            weight_norm=weight_norm,
            learning_rate=self._rates.get(name, UNKNOWN)[0],
            frozen_checks=checks,
            is_frozen=checks >= self.frozen_patience_steps,
            driven_elements=driven,
            stuck_elements=stuck,
            decayed_elements=decayed,
            undecayed_elements=undecayed,
            lost=lost,
        )

    @staticmethod
    def aggregate_gradient_stats(gradients: Mapping[str, GradientDiagnostics]) -> dict[str, float]:
        """Return the distribution of the gradients' norms and how many vanish, explode, are not finite."""
        found = list(gradients.values())
        return {
            **distribution("grad_norm", [each.l2_norm for each in found]),
            "vanishing_count": sum(each.is_vanishing for each in found),
            "exploding_count": sum(each.is_exploding for each in found),
            "nonfinite_count": sum(not each.is_finite for each in found),
        }

    @staticmethod
    def aggregate_update_stats(updates: Mapping[str, UpdateDiagnostics]) -> dict[str, float]:
        """Return the distribution of the update ratios, how many parameters are frozen, the share rounded away.

        Weights that were all zero have no relative change, and no part in the distribution; without driven elements of
        low precision there is no ``rounded_away_fraction``, without decayed ones no ``decay_rounded_away_fraction``.
        """
        found = list(updates.values())
        stats = {
            **distribution("update_ratio", [each.update_ratio for each in found if each.weight_norm != 0]),
            "frozen_count": sum(each.is_frozen for each in found),
        }
        driven = sum(each.driven_elements for each in found)
        if driven:
            stats["rounded_away_fraction"] = sum(each.stuck_elements for each in found) / driven
        decayed = sum(each.decayed_elements for each in found)
        if decayed:
            stats["decay_rounded_away_fraction"] = sum(each.undecayed_elements for each in found) / decayed
        return stats

    @staticmethod
    def top_k_largest_gradients(gradients: Mapping[str, GradientDiagnostics], k: int) -> list[tuple[str, float]]:
        """Return the ``k`` parameters with the largest gradient norms, largest first; NaN counts as infinite."""
        pairs = [(name, each.l2_norm) for name, each in gradients.items()]
        return sorted(pairs, key=lambda pair: -_rank(pair[1]))[:k]

    @staticmethod
    def top_k_smallest_updates(updates: Mapping[str, UpdateDiagnostics], k: int) -> list[tuple[str, float]]:
        """Return the ``k`` parameters with the smallest update ratios, smallest first; NaN counts as infinite."""
        pairs = [(name, each.update_ratio) for name, each in updates.items()]
        return sorted(pairs, key=lambda pair: _rank(pair[1]))[:k]

    def state_dict(self) -> dict[str, Any]:
        """Return how long parameters have not moved and, between the two checks of a step, the weights kept.

        Of sharded parameters these are a rank's own, and no other number of ranks can compare with them.
        """
        return super().state_dict() | {"before": self._watched.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._checked = {}
        self._watched.load_state_dict(state["before"])


def step_rate(rate: float, weight_decay: float, options: Mapping[str, Any]) -> tuple[float, float]:
    """Return a group's rates as :data:`Rates` has them; ``options``: those of the group."""
    return rate, rate * weight_decay if options.get("decoupled_weight_decay", False) else 0.0


def distribution(name: str, values: Iterable[float]) -> dict[str, float]:
    """Return median, 95th percentile, minimum and maximum under ``name_median`` and so on; nothing of no values.

    The median of an even count is the mean of the two middle values; the percentile is the ⌈0.95·n⌉-th smallest. NaN
    counts as infinite.

    >>> distribution("x", [3.0, 1.0, 2.0, 10.0])
    {'x_median': 2.5, 'x_p95': 10.0, 'x_min': 1.0, 'x_max': 10.0}
    """
    ordered = sorted(map(_rank, values))
    count = len(ordered)
    if not count:
        return {}
    median = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    p95 = ordered[-(-95 * count // 100) - 1]
    return {f"{name}_median": median, f"{name}_p95": p95, f"{name}_min": ordered[0], f"{name}_max": ordered[-1]}


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _on_host(tables: Sequence[Sequence[Tensor]], kinds: Sequence[str], parameters: Named) -> list[tuple[Any, ...]]:
    """Bring tables of one number per parameter in each row to the host in one transfer.

    Returns a parameter's name and its numbers for each of ``parameters``, which are in the order of the tables.
    ``kinds`` tells how the numbers of ranks that hold parts of a parameter make one: ``norm`` (a Euclidean one),
    ``largest`` or ``sum``; for rows that are not there it says nothing.
    """
    if not tables:
        return []
    device = tables[0][0].device
    table = torch.stack([torch.cat([row.to(device) for row in rows]) for rows in zip(*tables, strict=True)])
    if groups := groups_of(parameters.values()):
        table = _over_shards(table.double(), kinds, groups)
    return list(zip(parameters, *table.tolist(), strict=True))


def _over_shards(table: Tensor, kinds: Sequence[str], groups: Any) -> Tensor:
    """Combine the numbers of all ranks; overwrites the table."""
    rows = {kind: [place for place, each in enumerate(kinds[: len(table)]) if each == kind] for kind in kinds}
    norms, largest, added = (rows.get(kind, []) for kind in ("norm", "largest", "sum"))
    table[norms] **= 2
    table[norms + added] = over_shards(table[norms + added], groups)
    table[largest] = over_shards(table[largest], groups, largest=True)
    table[norms] **= 0.5
    return table
