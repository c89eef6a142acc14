"""Gradient health and measured weight updates of every parameter around a step of the optimizer."""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from loopscope.errors import UsageError, require
from loopscope.hooks import Remembered, Remembering
from loopscope.state.parameter_groups import learning_rate_of, number_or, rounds_stochastically
from loopscope.tensors import groups_of, over_shards, trainable
from torch import Tensor, nn
from torch.optim import Optimizer

from .watched_elements import Named, WatchedElements, gradient_shards, norms
from .weight_matrices import EMBEDDINGS

EPSILON = 1e-12
"""Added to the norm of the weights, so that the update ratio of all-zero weights is finite."""
Rates = Mapping[str, tuple[float, float]]
"""By parameter: the learning rate of a step, and the share lr·λ of a weight that decoupled decay takes (or 0)."""
UNKNOWN = (math.nan, 0.0)
"""The rates of a parameter that is in no group."""


@dataclass(slots=True)
class GradientDiagnostics:
    """The gradient of one parameter; norms of a sample are scaled to the complete parameter."""

    l2_norm: float
    max_abs: float
    """The largest absolute value of the checked elements; NaN if not requested."""
    mean_abs: float
    """The mean absolute value of the checked elements; NaN if not requested."""
    learning_rate: float
    """The learning rate of the parameter's group; NaN if no group has the parameter."""
    is_vanishing: bool
    is_exploding: bool

    @property
    def is_finite(self) -> bool:
        """Whether all checked elements are finite."""
        return math.isfinite(self.l2_norm)


@dataclass(slots=True)
class UpdateDiagnostics:
    """The effect of one step on one parameter; norms and counts of a sample are scaled to the complete parameter."""

    update_ratio: float
    """‖Δw‖₂ / (‖w‖₂ + ε), w the weights before the step, ε = 1e-12."""
    update_norm: float
    weight_norm: float
    learning_rate: float
    """The learning rate of the parameter's group; NaN if no group has the parameter."""
    frozen_checks: int
    """The number of consecutive checks, including this one, without movement."""
    is_frozen: bool
    driven_elements: float
    """The number of elements with a nonzero gradient, for weights narrower than float32 at a learning rate above 0;
    otherwise 0."""
    stuck_elements: float
    """The number of driven elements that only moved by decoupled decay: rounding removed the gradient's part."""
    decayed_elements: float
    """The number of nonzero elements that decoupled decay should shrink, for weights narrower than float32; otherwise
    0."""
    undecayed_elements: float
    """The number of decayed elements that decay alone, rounded, would not change."""
    lost: tuple[str, ...]
    """The terms of the update that rounding removed completely: ``gradient``, and ``decay`` if no weight moved."""

    @property
    def is_rounded_away(self) -> bool:
        """Whether rounding removed a complete term of the update; such a parameter does not count as frozen."""
        return bool(self.lost)

    @property
    def rounded_away(self) -> float:
        """The share of stuck elements among the driven ones; NaN if no element is driven."""
        return self.stuck_elements / self.driven_elements if self.driven_elements else math.nan

    @property
    def decay_rounded_away(self) -> float:
        """The share of undecayed elements among the decayed ones; NaN if no element is decayed."""
        return self.undecayed_elements / self.decayed_elements if self.decayed_elements else math.nan


@dataclass(kw_only=True)
class WeightUpdateMonitor(Remembering):
    """Checks gradients after backward, and weights around the optimizer's step, in any training loop.

    Call :meth:`check_gradients` after ``backward()``, before clipping and step; it also keeps the weights. Call
    :meth:`check_updates` after the step; it compares the weights with those. Parameters without a gradient are skipped.
    An update is skipped if a sample cannot show it: no sampled element had a gradient, while others had one. Each call
    transfers its numbers to the host once, and a second time if a sampled gradient vanishes, since the complete
    gradient is then checked. Gradients of embeddings are always complete.

    Args:
        sample_size: number of elements to check in each parameter; a smaller parameter is checked completely. Keeps a
            weight and an index for each element: 8 bytes in float32.
        exact: check all elements, and keep a copy of all parameters.
        vanishing_grad_threshold: a gradient vanishes if ‖g‖₂ is at most this.
        exploding_grad_threshold: a gradient explodes if ‖g‖₂ is at least this or not finite.
        frozen_update_ratio_threshold: a parameter has not moved if its update ratio is at most this.
        frozen_patience_steps: consecutive checks without movement after which a parameter is frozen.
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
    """Consecutive checks without movement."""
    _checked = Remembered[Named](dict, saved=False)
    _rates = Remembered[dict[str, tuple[float, float]]](dict)
    """The learning rates of the step; a scheduler may change them before :meth:`updates`."""
    _stochastic = Remembered(set[str], saved=False)
    """Parameters whose weights the optimizer rounds stochastically, so that the lost part of a step is chance."""
    _missed = Remembered(list[str])
    """Parameters with a gradient that is zero in all sampled elements."""

    def __post_init__(self) -> None:
        for option in ("sample_size", "frozen_patience_steps"):
            require(vars(self)[option] >= 1, f"{option} is {vars(self)[option]}; it must be at least 1.")
        for option in ("vanishing_grad_threshold", "exploding_grad_threshold", "frozen_update_ratio_threshold"):
            if not 0 <= vars(self)[option] < math.inf:
                raise UsageError(f"{option} is {vars(self)[option]}; it must be a number of at least 0.")
        if self.vanishing_grad_threshold >= self.exploding_grad_threshold:
            raise UsageError(
                f"vanishing_grad_threshold is {self.vanishing_grad_threshold} and exploding_grad_threshold is "
                f"{self.exploding_grad_threshold}; the first must be smaller than the second."
            )

    @property
    def bytes(self) -> int:
        """The memory that is kept between checks, in bytes."""
        return self._watched.bytes

    def check_gradients(self, model: nn.Module, optimizer: Optimizer) -> dict[str, GradientDiagnostics]:
        """Measure the gradients by parameter name, and keep the weights; call it before the step."""
        parameters = trainable(model)
        self.expect_stochastic_rounding(
            {
                name
                for group in optimizer.param_groups
                if rounds_stochastically(optimizer, group)
                for name, value in parameters.items()
                if any(value is other for other in group["params"])
            }
        )
        rates = {
            id(value): step_rate(float(learning_rate_of(group)), number_or(group.get("weight_decay"), 0.0), group)
            for group in optimizer.param_groups
            for value in group["params"]
        }
        rates_by_name = {name: rates[id(value)] for name, value in parameters.items() if id(value) in rates}
        return self.gradients(parameters, rates_by_name, extremes=True, embeddings=embeddings_of(model))

    def check_updates(self, model: nn.Module, optimizer: Optimizer) -> dict[str, UpdateDiagnostics]:
        """Measure the effect of the step on the weights that :meth:`check_gradients` kept; empty if it kept none.

        Learning rates are those at :meth:`check_gradients`, even if a scheduler has stepped since. Do not call it for a
        step that ``torch.amp.GradScaler`` skipped: the step would count as one that moved nothing.
        """
        return self.updates(model)

    def expect_stochastic_rounding(self, names: Iterable[str]) -> None:
        """Set the parameters whose weights the optimizer rounds stochastically in the next step.

        On average they move as they should, so no part of their updates counts as rounded away, and no parameter with
        a gradient as frozen.
        """
        self._stochastic = set(names)

    @torch.no_grad()
    def gradients(
        self, parameters: Named, rates: Rates, *, extremes: bool, embeddings: Set[str]
    ) -> dict[str, GradientDiagnostics]:
        """Measure the gradients of parameters, and keep their weights and rates.

        Args:
            parameters: trainable parameters by name.
            rates: the learning rates of this step.
            extremes: measure the largest and the mean absolute value as well.
            embeddings: names of the parameters of which all elements of the gradient are measured.
        """
        with_gradient = {name: value for name, value in parameters.items() if value.grad is not None and value.numel()}
        orders = (2.0, math.inf, 1.0) if extremes else (2.0,)

        def complete_tables(chosen: Named) -> list[list[Tensor]]:
            return [[norms(gradient_shards([value]), order) for order in orders] for value in chosen.values()]

        tables = self._watched.measure(with_gradient, extremes=extremes)
        self._checked = {name: with_gradient[name] for name in self._watched.names}
        self._rates = {name: rates[name] for name in self._checked if name in rates}
        kinds = ("norm", "largest", "sum")
        # The few rows of an embedding with large gradients are rarely in a sample, so all of its elements are measured.
        tables_of_tokens = {name: value for name, value in self._sampled() if name in embeddings}
        pairs = [*self._checked.items(), *tables_of_tokens.items()]
        columns = _transfer([*tables, *complete_tables(tables_of_tokens)], kinds, pairs)
        count = len(self._checked)
        sampled = {name: self._diagnose_gradient(name, column) for name, *column in columns[:count]}
        complete = {name: self._diagnose_gradient(name, column, complete=True) for name, *column in columns[count:]}
        # A gradient that vanishes in a sample may be nonzero elsewhere: check all of its elements.
        doubtful = {
            name: value for name, value in self._sampled() if sampled[name].is_vanishing and name not in complete
        }
        columns = _transfer(complete_tables(doubtful), kinds, doubtful.items())
        complete |= {name: self._diagnose_gradient(name, column, complete=True) for name, *column in columns}
        self._missed = [
            name for name, gradient in complete.items() if sampled[name].is_vanishing and not gradient.is_vanishing
        ]
        return sampled | complete

    def _sampled(self) -> list[tuple[str, nn.Parameter]]:
        """Return the checked parameters of which only a sample is watched."""
        return [pair for pair in self._checked.items() if self._watched[pair[0]].elements_per_sample > 1]

    def _diagnose_gradient(self, name: str, column: Sequence[float], *, complete: bool = False) -> GradientDiagnostics:
        selection = self._watched[name]
        # ‖g‖ ≈ √(n/k)·‖g_sample‖ for k sampled of n elements
        norm = column[0] * (1.0 if complete else math.sqrt(selection.elements_per_sample))
        count = selection.elements if complete else selection.sample_size
        return GradientDiagnostics(
            l2_norm=norm,
            max_abs=column[1] if len(column) > 1 else math.nan,
            mean_abs=column[2] / count if len(column) > 1 else math.nan,
            learning_rate=self._rates.get(name, UNKNOWN)[0],
            is_vanishing=norm <= self.vanishing_grad_threshold,
            # Not ``>=``, which would be false for NaN
            is_exploding=not norm < self.exploding_grad_threshold,
        )

    def updates(self, model: nn.Module) -> dict[str, UpdateDiagnostics]:
        """Measure the change of the weights that :meth:`gradients` kept, and discard the copies."""
        if not self._watched.has_copies:
            return {}
        names, parameters, self._checked = self._watched.names, self._checked, {}
        if list(parameters) != names:
            parameters = {name: model.get_parameter(name) for name in names}
        decays = {name: decay for name, (rate, decay) in self._rates.items() if not rate <= 0}  # NaN: unknown
        kinds = ("norm", "norm", "sum", "sum", "sum", "sum")
        columns = _transfer(self._watched.compare(parameters, decays), kinds, parameters.items())
        invisible = {name for name, _, change, *_ in columns if not change and name in self._missed}
        return {name: self._diagnose_update(name, column) for name, *column in columns if name not in invisible}

    def _diagnose_update(self, name: str, column: Sequence[float]) -> UpdateDiagnostics:
        # Norms of k sampled of n elements are scaled by √(n/k), counts by n/k.
        share = self._watched[name].elements_per_sample
        weight_norm, update_norm = column[0] * math.sqrt(share), column[1] * math.sqrt(share)
        driven, stuck, decayed, undecayed = (count * share for count in column[2:])
        # r = ‖Δw‖₂/(‖w‖₂ + ε), w the weights before the step
        ratio = update_norm / (weight_norm + EPSILON)
        is_still = ratio <= self.frozen_update_ratio_threshold
        if name in self._stochastic:
            is_still = is_still and not driven
            driven = stuck = decayed = undecayed = 0.0
        losses = {"gradient": stuck > 0 and (is_still or stuck == driven), "decay": undecayed > 0 and is_still}
        lost = tuple(term for term, is_lost in losses.items() if is_lost)
        earlier_checks = self._frozen.pop(name, 0)
        checks = earlier_checks + 1 if is_still and not lost else 0
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
        """Return the distribution of the gradient norms, and how many of them vanish, explode or are not finite."""
        diagnostics = list(gradients.values())
        return {
            **distribution("grad_norm", [gradient.l2_norm for gradient in diagnostics]),
            "vanishing_count": sum(gradient.is_vanishing for gradient in diagnostics),
            "exploding_count": sum(gradient.is_exploding for gradient in diagnostics),
            "nonfinite_count": sum(not gradient.is_finite for gradient in diagnostics),
        }

    @staticmethod
    def aggregate_update_stats(updates: Mapping[str, UpdateDiagnostics]) -> dict[str, float]:
        """Return the distribution of the update ratios, the number of frozen parameters and the shares rounded away.

        The distribution excludes weights that were all zero, since they have no relative change. There is no
        ``rounded_away_fraction`` without driven elements, and no ``decay_rounded_away_fraction`` without decayed ones.
        """
        diagnostics = list(updates.values())
        ratios = [update.update_ratio for update in diagnostics if update.weight_norm != 0]
        stats = {
            **distribution("update_ratio", ratios),
            "frozen_count": sum(update.is_frozen for update in diagnostics),
        }
        driven = sum(update.driven_elements for update in diagnostics)
        if driven:
            stats["rounded_away_fraction"] = sum(update.stuck_elements for update in diagnostics) / driven
        decayed = sum(update.decayed_elements for update in diagnostics)
        if decayed:
            stats["decay_rounded_away_fraction"] = sum(update.undecayed_elements for update in diagnostics) / decayed
        return stats

    @staticmethod
    def top_k_largest_gradients(gradients: Mapping[str, GradientDiagnostics], k: int) -> list[tuple[str, float]]:
        """Return the ``k`` parameters with the largest gradient norms, largest first; NaN counts as infinite."""
        ranks = {name: _rank(gradient.l2_norm) for name, gradient in gradients.items()}
        return [(name, gradients[name].l2_norm) for name in sorted(ranks, key=ranks.__getitem__, reverse=True)[:k]]

    @staticmethod
    def top_k_smallest_updates(updates: Mapping[str, UpdateDiagnostics], k: int) -> list[tuple[str, float]]:
        """Return the ``k`` parameters with the smallest update ratios, smallest first; NaN counts as infinite."""
        ranks = {name: _rank(update.update_ratio) for name, update in updates.items()}
        return [(name, updates[name].update_ratio) for name in sorted(ranks, key=ranks.__getitem__)[:k]]

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of checks without movement and, between the two checks of a step, the kept weights.

        Of sharded parameters a rank keeps its shard only, so another number of ranks cannot use the kept weights.
        """
        return super().state_dict() | {"before": self._watched.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._checked = {}
        self._watched.load_state_dict(state["before"])


def step_rate(rate: float, weight_decay: float, options: Mapping[str, Any]) -> tuple[float, float]:
    """Return the entry of a parameter group in :data:`Rates`; ``options`` are the group's options.

    Without a learning rate (NaN) the decay of a step is unknown, and not watched.
    """
    is_decoupled = options.get("decoupled_weight_decay", False) and not math.isnan(rate)
    return rate, rate * weight_decay if is_decoupled else 0.0


def distribution(name: str, values: Iterable[float]) -> dict[str, float]:
    """Return ``name_median``, ``name_p95``, ``name_min`` and ``name_max`` of values; nothing without values.

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


def embeddings_of(model: nn.Module) -> set[str]:
    """Return the names of the weights of embeddings."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, EMBEDDINGS)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in embeddings}


def _transfer(
    tables: Sequence[Sequence[Tensor]], kinds: Sequence[str], parameters: Iterable[tuple[str, nn.Parameter]]
) -> list[tuple[Any, ...]]:
    """Transfer tables to the host at once; return the name and the numbers of every parameter.

    Args:
        tables: rows with one number per parameter, shape (parameters,) each, for every block of parameters.
        kinds: for each row, how to combine the numbers of ranks that have parts of a parameter: ``norm`` (Euclidean),
            ``largest`` or ``sum``; kinds beyond the rows of the tables are ignored.
        parameters: names and parameters in the order of the tables.
    """
    if not tables:
        return []
    names, values = zip(*parameters, strict=True)
    device = tables[0][0].device
    table = torch.stack([torch.cat([row.to(device) for row in rows]) for rows in zip(*tables, strict=True)])
    if groups := groups_of(values):
        table = _combine_ranks(table.double(), kinds, groups)
    return list(zip(names, *table.tolist(), strict=True))


def _combine_ranks(table: Tensor, kinds: Sequence[str], groups: Any) -> Tensor:
    """Combine the numbers of all ranks by kind; overwrites the table of shape (rows, parameters)."""
    rows = {kind: [row for row, row_kind in enumerate(kinds[: len(table)]) if row_kind == kind] for kind in kinds}
    norms, largest, sums = (rows.get(kind, []) for kind in ("norm", "largest", "sum"))
    # ‖x‖ = √(Σ_r ‖x_r‖²) over the ranks r
    table[norms] **= 2
    table[norms + sums] = over_shards(table[norms + sums], groups)
    table[largest] = over_shards(table[largest], groups, largest=True)
    table[norms] **= 0.5
    return table
