"""The targets from which values are learned, and the network that computes them."""

import gc
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from weakref import ref

import torch
from loopscope.doctor.senses import EPISODES, PolicyTerms, Regressed, variables_of_callers
from loopscope.hooks import BackwardContext
from torch import Tensor, nn

from .rollouts import with_attributes

Measures = dict[str, Tensor | float]
LEAST_ROWS = 8
"""Rows at the ends of episodes from which their targets are compared."""
MOST_ROWS = 64
TARGET = re.compile(r"(.*_)?(target|tgt)(_?(q|v|qf|dqn|net|network|model|critic|values?|\d))*", re.IGNORECASE)
"""Names of the networks that compute targets; the target policy of off-policy methods is the trained one."""
MOST_PARAMETERS = 5_000_000
"""Parameters of a network whose target network is compared at every measurement."""


class ValueTargets:
    """What the regressions of values show in the course of a training."""

    def __init__(self) -> None:
        self._twins: list[tuple[list[str], Callable[[], nn.Module | None]]] | None = None
        self._copies: list[Tensor] = []
        self._changed_at = 0
        self._last_targets: dict[float, deque[float]] = {}
        """Targets of the last steps of episodes, by their reward."""

    def measures_of(self, terms: PolicyTerms, ctx: BackwardContext) -> Measures:
        """Return the measures of the regressions in a loss; empty unless they are those of values."""
        values = [one for one in terms.regressed if one.has_picked or self._reads_environment(one)]
        if not values:
            return {}
        found = self._terminal_spread(values[0])
        observations = values[0].observations
        if observations is not None and len(observations) > 1:
            found["same_rows_fraction"] = (observations == observations[:1]).all(1).double().mean()
        if not terms.is_policy:
            found |= self._twin_measures(ctx)
        return found

    @staticmethod
    def _reads_environment(one: Regressed) -> bool:
        return one.observations is not None and any(True for _ in EPISODES.steps_of(one.observations[:64]))

    def _terminal_spread(self, one: Regressed) -> Measures:
        if one.observations is None:
            return {}
        targets = one.targets.reshape(-1).double()
        for index, step in EPISODES.steps_of(one.observations):
            if step.is_last and step.is_unique:
                rows = self._last_targets.setdefault(step.reward, deque(maxlen=MOST_ROWS))
                rows.append(float(targets[index]))
        rows = max(self._last_targets.values(), key=len, default=deque())
        spread = targets.std()
        if len(rows) < LEAST_ROWS or not bool(spread > 0):
            return {}
        return {"terminal_spread": torch.tensor(list(rows), dtype=torch.float64).std() / spread}

    def _twin_measures(self, ctx: BackwardContext) -> Measures:
        """Return how far networks of the same shape are, and since when none of them has changed."""
        if self._twins is None:
            self._twins = [(names, ref(item)) for names in _parts(ctx.parameters) for item in _twins_of(ctx, names)]
        twins = [(names, item) for names, one in self._twins if (item := one()) is not None]
        if _is_target_trained(ctx.parameters.values()):
            return {"target_network_age": 0.0, "target_network_distance": 0.0}
        if not twins:
            return {}
        weights = [_joined(item.parameters()) for _, item in twins]
        if len(self._copies) != len(weights) or not all(map(torch.equal, weights, self._copies)):
            self._changed_at = ctx.step if self._copies else 0
            self._copies = [item.clone() for item in weights]
        trained = [_joined(ctx.parameters[name] for name in names) for names, _ in twins]
        distances = [(one - other).norm() / one.norm() for one, other in zip(trained, weights, strict=True)]
        return {
            "target_network_age": float(ctx.step - self._changed_at),
            "target_network_distance": torch.stack(distances).min(),
        }


def _is_target_trained(parameters: Iterable[Tensor]) -> bool:
    """Return whether variables of the script, or attributes, hold the trained network, and it again as its target."""
    trained = {*map(id, parameters)}
    found: dict[bool, set[frozenset[int]]] = {False: set(), True: set()}
    for name, value in with_attributes(variables_of_callers()):
        if issubclass(type(value), nn.Module) and "_parameters" in vars(value):
            weights = frozenset(map(id, value.parameters()))
            if weights and weights <= trained:
                found[TARGET.fullmatch(name) is not None].add(weights)
    return bool(found[False] & found[True])


def _joined(values: Iterable[Tensor]) -> Tensor:
    return torch.cat([value.detach().reshape(-1) for value in values])


def _parts(parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of all parameters, and those of each network if there are several, such as two critics."""
    if sum(value.numel() for value in parameters.values()) > MOST_PARAMETERS:
        return []
    prefixes = dict.fromkeys(name.partition(".")[0] for name in parameters)
    parts = [[name for name in parameters if name.partition(".")[0] == prefix] for prefix in prefixes]
    return [list(parameters), *(part for part in parts if len(part) > 2)]


def _twins_of(ctx: BackwardContext, names: Sequence[str]) -> list[nn.Module]:
    """Return the modules whose parameters have the shapes of these, in their order, and are none of the model."""
    shapes, own = [ctx.parameters[name].shape for name in names], {*map(id, ctx.parameters.values())}
    found: list[nn.Module] = []
    for item in gc.get_objects():
        if issubclass(type(item), nn.Module) and "_parameters" in vars(item):
            values = list(item.parameters())
            if [value.shape for value in values] == shapes and not any(id(value) in own for value in values):
                found.append(item)
    inner = {id(child) for item in found for child in item.modules() if child is not item}
    return [item for item in found if id(item) not in inner]
