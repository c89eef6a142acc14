"""Terms of policies in a loss, read from its autograd graph: probability ratios, advantages, entropies and values.

The graph of a loss of PPO, GRPO, REINFORCE, DPO or DQN has the tensors that its operations need for the backward pass:
ratios, advantages, masks, logits and targets. They are read without a further pass, and nothing is changed.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from .autograd_nodes import VIEWS, inputs_of, is_number, operation_of, output_of, saved_value, without_views

MOST_NODES = 512
"""Nodes visited in the search for terms."""
MOST_PARTS = 32
"""Log-probabilities that are computed apart, one for each action of an episode, of which entropies are computed."""
MOST_LOGITS = 2**20
"""Logits of which entropies are computed, of rows that are evenly spaced."""
LOG_TOLERANCE = 1e-3
"""Deviation of the sum of probabilities, or of its logarithm, that rounding causes."""
PASSED = VIEWS | {
    "Mean", "Sum", "Add", "Stack", "Cat", "Minimum", "Maximum", "Where", "MaskedFill", "IndexPut", "Unbind",
    "Split", "Unfold", "ConstantPadNd", "Nansum", "ClampMin", "ClampMax",
}  # fmt: skip
"""Operations through which a factor reaches all of their inputs."""
REGRESSIONS = frozenset({"MseLoss", "SmoothL1Loss", "HuberLoss"})
PICKS = frozenset({"Gather", "Index", "Take", "TakeAlongDim", "Select", "IndexSelect"})
"""Operations that choose the action that was taken."""
LAYERS = {"Addmm": ("mat1", 1), "Mm": ("self", 0), "Convolution": ("input", 0)}
"""Layers with the argument that is their input, and its place among the arguments."""

FIRST_LAYERS = {"Embedding": "indices", "Mv": "vec", "Addmv": "vec"} | {
    name: item for name, (item, _) in LAYERS.items()
}
"""Layers with the argument that is their input."""


class LogProbs(NamedTuple):
    """Log-probabilities of actions that were taken, and the distribution."""

    number: int
    """How many there are."""
    rows: Tensor | None = None
    """Log-probabilities of all actions, shape (…, actions), of discrete ones."""
    scale: Tensor | None = None
    """Standard deviations, of a normal distribution."""
    may_be_classes: bool = False
    """Whether a loss of a classifier computes the same."""
    observations: Tensor | None = None
    """The inputs of the network, shape (rows, numbers), if it has layers only."""


class Weighted(NamedTuple):
    """A ratio or log-probability with the constant that multiplies it in the loss."""

    advantages: Tensor
    """The constants, as the loss has them: perhaps with the other sign."""
    sign: int
    """1 if the loss rises with constant times log-probability, −1 if it falls with it, 0 if that is unknown."""
    number: int
    """How many log-probabilities there are."""
    shape: tuple[int, ...]
    """The shape of the ratios or log-probabilities."""


class Regressed(NamedTuple):
    """Predicted values and their targets in a regression."""

    values: Tensor
    targets: Tensor
    has_picked: bool
    """Whether the values are those of the actions that were taken, among those of all actions."""
    observations: Tensor | None
    """The inputs of the network, one for each value, if it has layers only."""


@dataclass
class PolicyTerms:
    """What the graph of a loss shows about a policy; empty for other losses."""

    ratios: Tensor | None = None
    """exp(log π − log π_old) of the actions."""
    to_reference: Tensor | None = None
    """exp(log π_ref − log π), or the same for the old policy."""
    clip: tuple[float, float] | None = None
    """The limits between which ratios are clipped."""
    masks: list[Tensor] = field(default_factory=list)
    """Factors of zeros and ones."""
    weighted: list[Weighted] = field(default_factory=list)
    log_probs: list[LogProbs] = field(default_factory=list)
    log_scales: list[tuple[Tensor, int]] = field(default_factory=list)
    """Scales whose logarithms the loss adds, with their signs: the entropy of a normal distribution, if it is one."""
    entropy_sign: int = 0
    """1 if the loss rises with the entropy of the policy, −1 if it falls."""
    divergence_signs: set[int] = field(default_factory=set)
    """1 if the loss rises with a divergence of the policy from constant probabilities, −1 if it falls with one."""
    preferences: Tensor | None = None
    """Arguments of the log-sigmoid in a loss of preferences, such as that of DPO."""
    regressed: list[Regressed] = field(default_factory=list)

    critics: set[Any] = field(default_factory=set)
    """Nodes of values v with a gradient, in products of a log-probability or ratio and returns − v."""
    learned: set[Any] = field(default_factory=set)
    """Nodes of values that squared differences from constants learn."""

    @property
    def is_critic_in_policy(self) -> bool:
        """Whether the gradient of the policy's term reaches values that a regression of the loss learns."""
        return not self.critics.isdisjoint(self.learned)

    @property
    def is_full(self) -> bool:
        """Whether there are enough actions of an episode, so that further ones are left out."""
        return len(self.log_probs) >= MOST_PARTS

    @property
    def is_policy(self) -> bool:
        """Whether actions of a policy are in the loss."""
        has_actions = self.ratios is not None or bool(self.weighted) or self.preferences is not None
        return has_actions or self.is_critic_in_policy


@dataclass(frozen=True)
class _Place:
    """A node on the way from the loss, with the product of the factors before it."""

    node: Any
    sign: int = 1
    factors: tuple[Tensor, ...] = ()

    def at(self, node: Any, sign: int = 1) -> "_Place":
        return replace(self, node=node, sign=self.sign * sign)


def policy_terms(loss: Tensor) -> PolicyTerms:
    """Return the terms of a policy in a loss with its graph."""
    terms = PolicyTerms()
    waiting = deque([_Place(loss.grad_fn)] if loss.grad_fn is not None else [])
    seen = {place.node for place in waiting}
    while waiting:  # in breadth, so that the terms of a stack are in its order
        for place in _visited(waiting.popleft(), terms):
            if place.node is not None and place.node not in seen and len(seen) < MOST_NODES and not terms.is_full:
                seen.add(place.node)
                waiting.append(place)
    scales = {one.scale.data_ptr() for one in terms.log_probs if one.scale is not None}
    signs = {sign for scale, sign in terms.log_scales if scale.data_ptr() in scales}
    if not terms.entropy_sign and len(signs) == 1:
        (terms.entropy_sign,) = signs
    return terms


def _visited(place: _Place, terms: PolicyTerms) -> Sequence[_Place]:
    """Note the term at a node, and return where the search continues."""
    node, name = place.node, operation_of(place.node)
    _note_values(place, terms)
    if name in REGRESSIONS:
        terms.regressed += _regressed(node)
        return ()
    if name in ("LogSigmoid", "Softplus"):
        values = saved_value(node, "self")
        if isinstance(values, Tensor) and terms.preferences is None and _is_preference(node):
            terms.preferences = values.detach() if name == "LogSigmoid" else -values.detach()
        return ()
    if name == "Exp":
        return _noted_ratio(place, terms)
    if name == "Pow" and _is_squared_log_ratio(node):
        _note_divergence(place, terms, 1)
        return ()
    found = log_probs_at(node)
    if found is not None:
        is_new = _note_weighted(place, terms, found, output_of(node)[0], -1 if name.startswith("NllLoss") else 1)
        if is_new and len(terms.log_probs) < MOST_PARTS:
            terms.log_probs.append(found)
        return ()
    return _next(place, terms)


def _note_values(place: _Place, terms: PolicyTerms) -> None:
    """Note values that a term learns, and the scale of which it is the logarithm."""
    name = operation_of(place.node)
    if name in REGRESSIONS or name == "Pow":
        terms.learned.update(_learned_values(place.node))
    scale = _saved_tensor(place.node, "self") if name == "Log" else None
    if scale is not None and _has_plain_factors(place):
        terms.log_scales.append((scale, place.sign))


def _next(place: _Place, terms: PolicyTerms) -> Sequence[_Place]:
    node, name = place.node, operation_of(place.node)
    inputs = [item for item, _ in node.next_functions]
    if name == "Neg":
        return [place.at(inputs[0], -1)]
    if name in ("Sub", "Rsub"):
        signs = (1, -1) if name == "Sub" else (-1, 1)
        return [place.at(item, sign) for item, sign in zip(inputs, signs, strict=False)]
    if name == "Clamp":
        low, high = getattr(node, "_saved_min", None), getattr(node, "_saved_max", None)
        if operation_of(inputs[0]) == "Exp" and isinstance(low, float) and isinstance(high, float):
            terms.clip = low, high
        return [place.at(inputs[0])]
    if name in ("Mul", "Div", "Dot"):
        return _after_factor(place, terms, name)
    return [place.at(item) for item in inputs] if name in PASSED else ()


def _after_factor(place: _Place, terms: PolicyTerms, name: str) -> Sequence[_Place]:
    """Return the inputs of a product or quotient, with the sign or the values of a constant factor."""
    node = place.node
    inputs = [item for item, _ in node.next_functions]
    if name == "Mul" and len(inputs) == 2 and None not in inputs:
        if _is_divergence(node, inputs):
            _note_divergence(place, terms, 1)
            return ()
        if _is_entropy(inputs):
            terms.entropy_sign = -place.sign  # Σ p·log p is minus the entropy
            return ()
        for item, other in (inputs, inputs[::-1]):
            if _is_of_action(item):
                terms.critics.update(_subtracted(other))
        return [place.at(item, 0) for item in inputs]
    if name == "Div" and (len(inputs) < 2 or inputs[1] is None):
        return [place.at(inputs[0], _sign_of(saved_value(node, "other")))]
    factor = _constant_factor(node, name)
    following = next((item for item in inputs if item is not None), None)
    if isinstance(factor, Tensor) and (sign := _sign_of_log_probs(following, factor)):
        _note_divergence(place, terms, -sign)  # Σ t·log p is a constant minus the divergence from t
        return ()
    if not isinstance(factor, Tensor):
        return [place.at(following)]
    if is_number(factor) or factor.numel() == 1:
        return [replace(place.at(following, _sign_of(factor)), factors=(*place.factors, factor))]
    return [replace(place.at(following), factors=(*place.factors, factor))]


def _is_of_action(node: Any) -> bool:
    """Return whether a node computes log-probabilities of constant actions, or their ratios to constant ones."""
    while operation_of(node) in VIEWS | {"Neg", "Clamp"} and log_probs_at(node) is None:
        node = inputs_of(node)[0]
    if operation_of(node) == "Exp":
        return (difference := _difference(node)) is not None and _first_log_probs(difference) is not None
    return log_probs_at(node) is not None and not operation_of(node).startswith("NllLoss")


def _subtracted(node: Any) -> list[Any]:
    """Return the values v of a difference of a constant tensor and v, perhaps with the other sign or a view of it."""
    while operation_of(node) in VIEWS | {"Neg"}:
        node = inputs_of(node)[0]
    values = inputs_of(node) if operation_of(node) == "Sub" else []
    return [_without_views(values[0])] if len(values) == 1 else []


def _learned_values(node: Any) -> list[Any]:
    """Return the values that a regression or the square of a difference compares with constants."""
    sources = inputs_of(node)
    if len(sources) != 1:
        return []
    return _subtracted(sources[0]) if operation_of(node) == "Pow" else [_without_views(sources[0])]


def _constant_factor(node: Any, name: str) -> Any:
    names = ("self", "tensor") if name == "Dot" else ("self", "other")
    inputs = [item for item, _ in node.next_functions]
    is_first = inputs[0] is None  # autograd saves the argument whose counterpart has a gradient
    return saved_value(node, names[0] if is_first else names[1])


def _sign_of(value: Any) -> int:
    """Return the sign of a number; that of a tensor on an accelerator, which may not be waited for, counts as 1."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.device.type != "cpu":
            return 1
        value = value.item()
    return 1 if not isinstance(value, (int, float)) or value > 0 else -1 if value < 0 else 0


def _noted_ratio(place: _Place, terms: PolicyTerms) -> Sequence[_Place]:
    """Note exp(new − old), the ratio of two probabilities, or exp(reference − new)."""
    values, difference = saved_value(place.node, "result"), _difference(place.node)
    if not isinstance(values, Tensor) or difference is None:
        return ()
    first, second = [item for item, _ in difference.next_functions][:2]
    found = _first_log_probs(first if first is not None else second)
    if found is None:
        return ()
    terms.log_probs = terms.log_probs or [found]
    if first is None:
        _note_divergence(place, terms, 1)
        terms.to_reference = values.detach() if terms.to_reference is None else terms.to_reference
        return ()
    terms.ratios = values.detach() if terms.ratios is None else terms.ratios
    _note_weighted(place, terms, LogProbs(values.numel()), tuple(values.shape))
    return ()


def _difference(node: Any) -> Any:
    """Return the difference of new and constant log-probabilities whose exponential, or that of its mean, a node is."""
    for _ in range(8):
        inputs = inputs_of(node)
        if len(inputs) != 1:
            return None
        if operation_of(node) == "Sub" and len(node.next_functions) == 2:
            return node
        if operation_of(node) not in VIEWS | {"Exp", "Clamp", "Sum", "Mean", "Mul", "Div"}:
            return None
        (node,) = inputs
    return None


def _note_weighted(place: _Place, terms: PolicyTerms, found: LogProbs, shape: tuple[int, ...], sign: int = 1) -> bool:
    """Note masks and the advantages among the factors of a log-probability or a ratio; return whether there are any."""
    sign *= place.sign
    for factor in reversed(place.factors):
        values = factor.detach()
        if values.numel() > 1 and _is_mask(values):
            terms.masks.append(values)
            continue
        if values.numel() == 1:
            if found.number > 1 or terms.ratios is not None:  # a coefficient
                continue
            values, sign = values.reshape(1), sign * _sign_of(values)  # whose sign is none of the loss
        if found.may_be_classes and not _has_negative(values):
            return False
        terms.weighted.append(Weighted(values, sign, found.number, shape))
        return True
    return False


def _has_negative(values: Tensor) -> bool:
    """Return whether some values are below 0, as advantages are and weights of classes are not."""
    return bool((values < 0).any())


def _is_mask(values: Tensor) -> bool:
    """Return whether a factor has zeros and ones only, or integers; advantages may all be 0."""
    if not values.is_floating_point():
        return True
    is_binary = bool(((values == 0) | (values == 1)).all()) and bool((values == 1).any())
    return is_binary and (values.ndim == 2 or bool((values == 0).any()))


def log_probs_at(node: Any) -> LogProbs | None:
    """Return the log-probabilities of taken actions that a node computes, or ``None``."""
    found = _log_probs_at(node)
    return None if found is None else found._replace(observations=_observations(node))


def _log_probs_at(node: Any) -> LogProbs | None:
    name = operation_of(node)
    count = math.prod(output_of(node)[0])
    if name in ("NllLoss", "NllLoss2D"):
        is_vector = getattr(node, "_saved_reduction", 1) == 0
        return LogProbs(count, _saved_tensor(node, "self"), may_be_classes=True) if is_vector else None
    if name in ("Gather", "Index", "TakeAlongDim"):
        source = _source(node)
        return None if source is None else _of_categorical(source, count)
    if name == "Sub":
        return _of_picked_logits(node, count) or _of_normal(node, count)
    if "LogProb" in name:  # a fused function, such as that of TRL
        return LogProbs(count)
    return _of_picked_probabilities(node, count) if name == "Log" else None


def _first_log_probs(node: Any) -> LogProbs | None:
    """Return the log-probabilities from which a node is computed by sums and views."""
    waiting = [node]
    for _ in range(24):
        if not waiting:
            return None
        node = waiting.pop(0)
        if (found := log_probs_at(node)) is not None:
            return found
        if operation_of(node) in PASSED | {"Neg", "Sub", "Mul", "Div"}:
            waiting += inputs_of(node)
    return None


def _source(node: Any) -> Any:
    """Return the first node behind this one and views."""
    inputs = inputs_of(node)
    while len(inputs) == 1 and operation_of(inputs[0]) in VIEWS:
        inputs = inputs_of(inputs[0])
    return inputs[0] if len(inputs) == 1 else None


def _of_categorical(node: Any, count: int) -> LogProbs | None:
    """Return log-probabilities that are those of ``log_softmax``, or logits − logsumexp(logits), or log(softmax)."""
    name = operation_of(node)
    if name == "LogSoftmax":
        return LogProbs(count, _saved_tensor(node, "result"), may_be_classes=True)
    if name == "Log":
        values = _saved_tensor(node, "self")
        return LogProbs(count, None if values is None else values.log())
    normaliser = _logsumexp_of(node) if name == "Sub" else None
    return None if normaliser is None else LogProbs(count, _normalised(normaliser))


def _of_picked_probabilities(node: Any, count: int) -> LogProbs | None:
    """Return log(softmax(logits)[actions])."""
    picked = inputs_of(node)[0]
    while operation_of(picked) in VIEWS - {"Index", "IndexSelect"} and len(inputs := inputs_of(picked)) == 1:
        (picked,) = inputs
    source = _source(picked) if operation_of(picked) in PICKS else None
    if source is None or operation_of(source) not in ("Softmax", "Div"):
        return None
    rows = _saved_tensor(source, "result")
    return LogProbs(count, None if rows is None else rows.log())


def _of_picked_logits(node: Any, count: int) -> LogProbs | None:
    """Return log-probabilities that are picked logits − logsumexp(logits)."""
    inputs = inputs_of(node)
    if len(inputs) != 2 or operation_of(_without_views(inputs[0])) not in PICKS:
        return None
    normaliser = _logsumexp_of(node)
    return None if normaliser is None else LogProbs(count, _normalised(normaliser))


def _logsumexp_of(node: Any) -> Any:
    """Return the logsumexp that a difference subtracts."""
    inputs = inputs_of(node)
    if len(inputs) != 2:
        return None
    found = _without_views(inputs[1])
    if operation_of(found) == "Stack":
        found = _without_views(inputs_of(found)[0])
    return found if operation_of(found) == "Logsumexp" else None


def _normalised(node: Any) -> Tensor | None:
    logits, normaliser = _saved_tensor(node, "self"), _saved_tensor(node, "result")
    if logits is None or normaliser is None:
        return None
    return logits - (normaliser if normaliser.ndim == logits.ndim else normaliser.unsqueeze(-1))


def _of_normal(node: Any, count: int) -> LogProbs | None:
    """Return those of ``Normal.log_prob(value)``, −(value − mean)²/2σ² − log σ − …, of a constant value."""
    scale = None
    for _ in range(3):
        inputs = inputs_of(node)
        logs = [item for item in inputs if operation_of(_without_views(item)) == "Log"]
        if logs:
            scale = _saved_tensor(_without_views(logs[0]), "self")
        others = [item for item in inputs if item not in logs]
        if operation_of(node) != "Sub" or not others:
            break
        node = others[0]
    for name in ("Div", "Neg", "Pow"):
        if operation_of(node) != name:
            return None
        node = inputs_of(node)[0]
    is_constant = len(inputs_of(node)) == 1  # a reparametrised value has a gradient, too
    return LogProbs(count, scale=scale) if operation_of(node) in ("Sub", "Rsub") and is_constant else None


def _is_entropy(inputs: Sequence[Any]) -> bool:
    """Return whether a product is p·log p of one distribution."""
    names = {operation_of(_without_views(item)) for item in inputs}
    return any(map(is_probability, inputs)) and bool(names & {"Clamp", "LogSoftmax", "Sub", "Log"})


def _note_divergence(place: _Place, terms: PolicyTerms, sign: int) -> None:
    """Note whether the loss rises with a divergence, unless a factor other than numbers and masks multiplies it."""
    if _has_plain_factors(place):
        terms.divergence_signs.add(place.sign * sign)


def _has_plain_factors(place: _Place) -> bool:
    """Return whether the sign of a term is known, and only numbers and masks multiply it."""
    return bool(place.sign) and all(one.numel() == 1 or _is_mask(one.detach()) for one in place.factors)


def _is_squared_log_ratio(node: Any) -> bool:
    """Return whether a power is (log π − log π_ref)² with a constant reference."""
    inputs = inputs_of(node)
    if len(inputs) != 1 or operation_of(inputs[0]) != "Sub" or saved_value(node, "exponent") != 2:
        return False
    sources = inputs_of(inputs[0])
    return len(sources) == 1 and log_probs_at(_without_views(sources[0])) is not None


def _is_divergence(node: Any, inputs: Sequence[Any]) -> bool:
    """Return whether a product is p·(log p − log q) of a constant distribution q."""
    for item, side, other in zip(inputs, ("self", "other"), reversed(inputs), strict=True):
        values, differences = (_saved_tensor(node, name) for name in (side, "other" if side == "self" else "self"))
        is_difference = operation_of(other) == "Sub" and len(inputs_of(other)) == 1
        if not is_probability(item) or not is_difference or values is None or differences is None:
            continue
        if values.shape == differences.shape and values.ndim and values.shape[-1] > 1:
            rows = (values.double().log() - differences.double())[values.amin(-1) > 0]
            return len(rows) > 0 and bool((rows.logsumexp(-1).abs() < LOG_TOLERANCE).all())
    return False


def is_probability(node: Any) -> bool:
    """Return whether a node computes the probabilities of all actions or classes."""
    node = _without_views(node)
    if operation_of(node) == "Softmax":
        return True
    return operation_of(node) == "Exp" and any(map(is_log_probability, inputs_of(node)))


def is_log_probability(node: Any) -> bool:
    """Return whether a node computes the log-probabilities of all actions or classes."""
    node = _without_views(node)
    return operation_of(node) == "LogSoftmax" or (operation_of(node) == "Sub" and _logsumexp_of(node) is not None)


def _sign_of_log_probs(node: Any, factor: Tensor) -> int:
    """Return the sign of log-probabilities of all actions that constant probabilities multiply; 0 for other products.

    Zeros and ones may choose an action instead.
    """
    sign = 1
    for _ in range(4):
        inputs = [item for item, _ in node.next_functions]
        if is_log_probability(node):
            break
        if operation_of(node) not in ("Neg", "Sub", "Rsub") or len(inputs_of(node)) != 1:
            return 0
        is_negative = operation_of(node) != "Sub" or inputs[0] is None
        if operation_of(node) == "Rsub":
            is_negative = inputs[0] is not None
        sign, node = -sign if is_negative else sign, inputs_of(node)[0]
    else:
        return 0
    if output_of(node)[0] != tuple(factor.shape) or factor.ndim < 1 or factor.shape[-1] < 2:
        return 0
    values = factor.detach().double()
    is_distribution = bool((values >= 0).all()) and bool(((values.sum(-1) - 1).abs() < LOG_TOLERANCE).all())
    return sign if is_distribution and not _is_mask(factor.detach()) else 0


def _is_preference(node: Any) -> bool:
    """Return whether a log-sigmoid gets a difference of log-probabilities, and not an output of the model."""
    for _ in range(6):
        inputs = inputs_of(node)
        if operation_of(node) in ("Sub", "Rsub") and len(inputs) >= 1:
            return any(_first_log_probs(item) is not None for item in inputs)
        if not inputs:
            return False
        node = inputs[0]
    return False


def _regressed(node: Any) -> Iterator[Regressed]:
    """Yield values and targets of a regression of which one has a gradient."""
    inputs = [item for item, _ in node.next_functions]
    sides = ("self", "target") if inputs[0] is not None else ("target", "self")
    if all(item is not None for item in inputs):
        return
    values, targets = (_saved_tensor(node, side) for side in sides)
    if values is None or targets is None or values.shape != targets.shape or values.numel() < 2:
        return
    source = next(item for item in inputs if item is not None)
    picked = _without_views(source)
    observations = _observations(source)
    if observations is not None and len(observations) != values.numel():
        observations = None
    yield Regressed(values, targets, operation_of(picked) in PICKS or _has_pick(source), observations)


def _has_pick(node: Any) -> bool:
    """Return whether views before a node contain the choice of one action."""
    while len(inputs := inputs_of(node)) == 1 and operation_of(node) in VIEWS | PICKS:
        if operation_of(node) in PICKS - {"Select"}:
            return True
        (node,) = inputs
    return False


def _observations(node: Any) -> Tensor | None:
    """Return the inputs of the network of which a node is the output, one row each, flattened."""
    for _ in range(64):
        name = operation_of(node)
        inputs = [item for item, _ in node.next_functions]
        if name in LAYERS:
            argument, place = LAYERS[name]
            if place < len(inputs) and inputs[place] is None:
                values = _saved_tensor(node, argument)
                return None if values is None or not values.ndim else values.flatten(1)
            node = inputs[place]
            continue
        node = next((item for item in inputs if item is not None), None)
        if node is None:
            return None
    return None


def count_inputs(nodes: Iterable[Any]) -> int:
    """Return how many tensors a layer without inputs with gradients gets at most; views of one tensor count once."""
    found: dict[Any, set[int]] = {}
    for node in nodes:
        argument = FIRST_LAYERS.get(operation_of(node))
        values = None if argument is None else saved_value(node, argument)
        if type(values) is Tensor and all(map(_is_parameter, inputs_of(node))):
            weights = frozenset(map(without_views, inputs_of(node)))
            found.setdefault(weights, set()).add(values.untyped_storage().data_ptr())
    return max(map(len, found.values()), default=0)


def _is_parameter(node: Any) -> bool:
    return operation_of(without_views(node)).endswith("AccumulateGrad")


def _without_views(node: Any) -> Any:
    while operation_of(node) in VIEWS - {"Index", "IndexSelect", "Select"} and len(inputs := inputs_of(node)) == 1:
        (node,) = inputs
    return node


def _saved_tensor(node: Any, argument: str) -> Tensor | None:
    value = saved_value(node, argument)
    return value.detach() if isinstance(value, Tensor) else None


def sampled_rows(rows: Tensor, places: Tensor | None = None) -> Tensor:
    """Return evenly spaced rows, with about a million elements at most; of those at some places, if these are given."""
    count = len(rows) if places is None else len(places)
    step = max(1, -(-count * rows.shape[-1] // MOST_LOGITS))
    return rows[::step] if places is None else rows[places[::step]]
