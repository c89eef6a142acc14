"""The two models of a loss of which one gives targets to the other, if the gradient reaches both."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor

from .autograd_nodes import inputs_of, operation_of, walk
from .policy_graph import PASSED, is_log_probability, is_probability, log_probs_at

MOST_NODES = 512
"""Nodes visited in the search for comparisons of two models."""
OF_LOSSES = PASSED | {"Neg", "Sub", "Rsub", "Mul", "Div", "Exp", "LogSigmoid", "Softplus", "Clamp", "Xlogy", "Dot"}
"""Operations between a loss and log-probabilities."""
Side = dict[int, Tensor]


def trained_sides(loss: Tensor) -> tuple[list[Tensor], list[Tensor]] | None:
    """Return the parameters of a model that gives targets, and of one that learns from them, if both get a gradient.

    The two have no parameter in common. The first one of a divergence Σ p·(log p − log q) is that of p, if nothing
    else in the loss reaches it; a distribution p that is learned otherwise, such as a posterior, is no teacher.
    """
    nodes = [*_outer(loss.grad_fn)]
    sides = next((found for node in nodes if (found := _of_ratio(node) or _of_preference(node)) is not None), None)
    sides = sides or _of_divergences(loss.grad_fn, nodes)
    return None if sides is None else (list(sides[0].values()), list(sides[1].values()))


def _outer(root: Any) -> Iterator[Any]:
    """Yield the nodes from a loss to the log-probabilities, in breadth."""
    return walk(root, _is_of_losses, MOST_NODES)


def _is_of_losses(node: Any) -> bool:
    return operation_of(node) in OF_LOSSES or operation_of(node).startswith("NllLoss")


def _of_ratio(node: Any) -> tuple[Side, Side] | None:
    """Return both models of exp(log q − log p), of probabilities of actions that were taken."""
    if operation_of(node) != "Exp" or operation_of(inputs_of(node)[0]) != "Sub":
        return None
    inputs = inputs_of(inputs_of(node)[0])
    if len(inputs) != 2 or not all(_picks(item) for item in inputs):
        return None
    return _apart([_leaves([inputs[0]]), _leaves([inputs[1]])])


def _of_preference(node: Any) -> tuple[Side, Side] | None:
    """Return both models of log σ(β·(Δ log p − Δ log q)), each with two log-probabilities."""
    if operation_of(node) not in ("LogSigmoid", "Softplus"):
        return None
    groups: list[tuple[Side, int]] = []
    for pick in _picks(inputs_of(node)[0]):
        side = _leaves([pick])
        place = next((index for index, (one, _) in enumerate(groups) if one.keys() == side.keys()), None)
        if place is None:
            groups.append((side, 1))
        else:
            groups[place] = side, groups[place][1] + 1
    is_pair = len(groups) == 2 and all(count >= 2 for _, count in groups)
    return _apart([side for side, _ in groups]) if is_pair else None


def _picks(root: Any) -> list[Any]:
    """Return the log-probabilities behind sums, differences and views, once for each way to them."""
    found, waiting = [], [root]
    for node in waiting:
        if log_probs_at(node) is not None:
            found.append(node)
        elif operation_of(node) in PASSED | {"Neg", "Sub", "Rsub", "Mul", "Div"} and len(waiting) < MOST_NODES:
            waiting += inputs_of(node)
    return found


def _of_divergences(root: Any, nodes: Sequence[Any]) -> tuple[Side, Side] | None:
    """Return the model of p, which nothing but the divergence reaches, and that of q."""
    found = [sides for node in nodes if operation_of(node) == "Mul" and (sides := _divergence(node)) is not None]
    if not found:
        return None
    hidden = {node for of_targets, _ in found for node in of_targets}
    hidden |= {node for node in nodes if operation_of(node) == "Xlogy"}
    teacher, student = _leaves([node for one, _ in found for node in one]), _leaves([one for _, one in found])
    elsewhere = _leaves([root], hidden)
    return _apart([teacher, student]) if not teacher.keys() & elsewhere.keys() else None


def _divergence(node: Any) -> tuple[list[Any], Any] | None:
    """Return the nodes of p and log p, and that of log q, of a product p·(log p − log q) or p·log q."""
    inputs = inputs_of(node)
    if len(inputs) != 2:
        return None
    for item, other in (inputs, inputs[::-1]):
        if not is_probability(item):
            continue
        if is_log_probability(other):
            return [item], other
        terms = inputs_of(other) if operation_of(other) in ("Sub", "Rsub") else []
        if len(terms) == 2 and all(map(is_log_probability, terms)):
            first, second = terms if operation_of(other) == "Sub" else terms[::-1]
            return [item, first], second
    return None


def _leaves(roots: Sequence[Any], hidden: Collection[Any] = ()) -> Side:
    """Return the parameters behind nodes, without those behind hidden ones."""
    waiting, seen, found = [*roots], {*roots, *hidden}, {}
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)  # only of nodes that accumulate a gradient
        if isinstance(variable, Tensor):
            found[id(variable)] = variable
        new = [item for item in inputs_of(node) if item not in seen]
        seen.update(new)
        waiting += new
    return found


def _apart(sides: Sequence[Side]) -> tuple[Side, Side] | None:
    first, second = sides
    return (first, second) if first and second and not first.keys() & second.keys() else None
