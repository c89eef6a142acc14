"""Facts about a loss that its autograd graph shows, read without running or changing anything."""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .autograd_nodes import (
    VIEWS,
    all_nodes,
    inputs_of,
    is_number,
    operation_of,
    output_of,
    saved_integer,
    saved_value,
    walk,
    without_views,
)
from .backward_passes import BackwardPass
from .divergences import divergence_facts, information, variation
from .policy_graph import count_inputs

MOST_NODES = 12
"""Length of the path."""
MOST_VISITED = 64
"""Nodes visited in the search for a loss function among the terms of a sum."""
MOST_TARGETS = 2**16
"""Targets whose classes are counted."""
DRAWS_PER_CLASS = 10
"""Targets for each class from which the entropy of a batch is near that of its distribution."""
FIRST_TARGETS = 64
"""Targets that the description contains."""
REGRESSIONS = frozenset({"MseLoss", "SmoothL1Loss", "HuberLoss"})
"""Losses of numbers, which save their targets."""
BINARY = frozenset({"BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"})
"""Losses of probabilities, which save their targets."""
LOSSES = REGRESSIONS | BINARY | {"NllLoss", "NllLoss2D", "SoftMarginLoss", "MultiMarginLoss", "MultilabelMarginLoss"}
"""Nodes with a ``_saved_reduction``."""
TERMS = frozenset({"Add", "Sub", "Mul", "Div", "Stack", "Cat"})
"""Nodes with several inputs of which one is followed."""
REDUCTIONS = {0: "", 1: "mean", 2: "sum"}  # at::Reduction
ELEMENTWISE = frozenset(
    {"Mean", "Sum", "Div", "Mul", "Add", "Neg", "Pow", "Abs", "Sqrt", "Exp", "Log", "Log1P", "Sub", "Rsub", "Clamp"}
    | {"Where", "LogSigmoid", "Softplus", "SoftMarginLoss", "Minimum", "Maximum", "ClampMin", "ClampMax"}
    | {"Expand", "Squeeze", "View", "UnsafeView", "ReshapeAlias", "ToCopy", "Clone", *REGRESSIONS}
)
"""Nodes of a loss that compares outputs and targets element by element."""
BROADCASTING = frozenset({"Sub", "Rsub", "Mul", "Div", "Expand"})
BEFORE_SOFTMAX = VIEWS | {"Mul", "Div", "NativeDropout"}
"""Nodes between the products of queries and keys and their softmax that are not masks."""
MASKED = -1e3
"""Number added to the scores of pairs below which they are masked."""
NORMS = ("BatchNorm", "LayerNorm", "GroupNorm")
"""Ends of the names of normalisations."""
MOST_OF_WEIGHT = 16
"""Nodes of a weight that is normalised."""
LARGEST_SCALE = 5.0
"""Factor of logits up to which a cross-entropy starts near that of equal probabilities."""
LENGTH_TOLERANCE = 1e-2
"""Deviation of lengths from 1 that rounding to bfloat16 causes."""
ROWS_PER_COLUMN = 64
"""Rows from which on the best constant of a column is known."""
FEW_VECTORS = 64
"""Vectors of which the length is computed."""
OF_LOSSES = frozenset({"Add", "Sub", "Mul", "Div", "Neg"})
"""Operations on the losses of several tasks before they are added."""
LENGTHS = frozenset({"LinalgVectorNorm", "Norm", "ClampMin"})
"""Nodes whose output is the length of vectors."""
LIKELIHOODS = frozenset({"NllLoss", "NllLoss2D", "CtcLoss"})
"""Losses that take log-probabilities."""
NOT_LOGARITHMS = frozenset({"Addmm", "Mm", "Bmm", "Baddbmm", "Convolution", "Relu", "Softmax"})
"""Nodes whose output is certainly not that of a log-softmax."""
LEAST_ROWS = 64
"""Outputs of which statistics are computed at least, of wide outputs."""
MOST_COLUMNS = 2**12
"""Numbers of a row of targets of which statistics are computed."""
TOLERANCE = 0.05
"""Standard deviations by which targets may be outside of a range."""
RANGES = {"Sigmoid": (0.0, 1.0), "Softmax": (0.0, 1.0), "Tanh": (-1.0, 1.0)}
RANGES |= dict.fromkeys(("Relu", "Softplus"), (0.0, math.inf))
"""Ranges of activations that are bounded."""
NORMALISED = {
    "LogSoftmax": frozenset({"Softmax", "Sigmoid"}),
    "BinaryCrossEntropyWithLogits": frozenset({"Sigmoid", "Softmax", "LogSoftmax", "LogSigmoid"}),
}
"""Operations whose outputs are probabilities or their logarithms, by the loss that takes logits instead."""
RECTIFIED = dict.fromkeys(NORMALISED, frozenset({"Relu"}))
"""The operation after which logits cannot be negative, by the loss that takes them."""
SOFT_CROSS_ENTROPY = ("Div", "Neg", "Sum", "Mul", "LogSoftmax")
"""The mean that ``cross_entropy`` computes for targets that are probabilities."""


def describe_loss(loss: Tensor, *, is_scaled: bool = False) -> BackwardPass:
    """Return the description of the pass that ``loss.backward()`` runs, without leftover gradients.

    Args:
        loss: the loss with its graph.
        is_scaled: a loss scaler has multiplied the loss.
    """
    root = root_of(loss, is_scaled=is_scaled)
    nodes = path_of(root)
    names = [operation_of(node) for node in nodes]
    reduction, divisor, is_divided_by_tensor = _reduction(nodes, names)
    return BackwardPass(
        loss_operations=tuple(node.name() for node in nodes),
        reduction=reduction,
        divisor=divisor,
        divisions=_factors(nodes, names, "Div"),
        weights=tuple(1 / factor for factor in _factors(nodes, names, "Mul")),
        is_divided_by_tensor=is_divided_by_tensor,
        class_count=_class_count(nodes, names),
        ignore_index=_ignore_index(nodes, names),
        **_class_facts(nodes, names),
        **_number_facts(nodes, names),
        **_target_sum(nodes, names),
        **divergence_facts(nodes, names),
        is_doubly_normalised=_gets_output_of(names, NORMALISED),
        lacks_log_softmax=_lacks_log_softmax(nodes, names) or _has_divergence_of_probabilities(root),
        is_modified=_has_other_terms(nodes, names) or _has_scaled_logits(nodes, names),
        is_rectified=_gets_output_of(names, RECTIFIED),
        compares_outputs=_compares_outputs(nodes, names),
        cosine_scale=_cosine_scale(nodes, names),
        is_broadcast=_is_broadcast(root),
        has_terms=_has_terms(nodes),
        **_model_facts(root, nodes, names),
        is_float16=any(output_of(node)[1] is torch.float16 for node in nodes),
    )


def root_of(loss: Tensor, *, is_scaled: bool) -> Any:
    """Return the node of a loss, before the multiplication by a scaler; ``None`` without a graph."""
    root = loss.grad_fn
    if root is not None and is_scaled and operation_of(root) == "Mul":
        return next(iter(inputs_of(root)), None)
    return root


def last_divisor(loss: Tensor) -> float:
    """Return the number by which a loss was divided last, apart from the scale of a scaler; 1 if there is none."""
    node: Any = loss.grad_fn
    for _ in range(2):
        name = "" if node is None else operation_of(node)
        if name not in ("Mul", "Div"):
            break
        divisor = _divisor(node, name)
        if divisor is not None and divisor != 1:
            return divisor
        node = _next(node)
    return 1.0


def reaches(loss: Tensor, parameters: Collection[Tensor]) -> bool:
    """Return whether the gradient of a loss reaches one of the parameters within the first 20,000 nodes."""
    own = {id(parameter) for parameter in parameters}
    return any(id(getattr(node, "variable", None)) in own for node in all_nodes(loss.grad_fn))


def path_of(root: Any) -> list[Any]:
    """Return the nodes from that of a loss towards the model, at most 12, as in :class:`.BackwardPass`."""
    nodes: list[Any] = []
    node = root
    while node is not None and len(nodes) < MOST_NODES:
        nodes.append(node)
        node = _next(node)
    return nodes


def _next(node: Any) -> Any:
    """Return the next node of the path: the only input, or the first term of a sum with a loss function."""
    inputs = inputs_of(node)
    if len(inputs) <= 1:
        return inputs[0] if inputs else None
    if operation_of(node) not in TERMS:
        return None
    return next((term for term in inputs if any(operation_of(item) in LOSSES for item in _visited(term))), None)


def _visited(root: Any) -> Iterator[Any]:
    """Yield the nodes from a term of a sum to the inputs of its loss functions, in breadth, up to a limit."""
    return walk(root, _is_term, MOST_VISITED)


def _is_term(node: Any) -> bool:
    return len(inputs_of(node)) == 1 or operation_of(node) in TERMS


def _reduction(nodes: list[Any], names: list[str]) -> tuple[str, float, bool]:
    """Return the outermost reduction, the number by which its result is divided, and whether a tensor divides it."""
    divisor, is_divided_by_tensor = 1.0, False
    for position, (node, name) in enumerate(zip(nodes, names, strict=True)):
        if tuple(names[position : position + len(SOFT_CROSS_ENTROPY)]) == SOFT_CROSS_ENTROPY:
            return "mean", divisor, is_divided_by_tensor
        if name in LOSSES:
            return REDUCTIONS.get(getattr(node, "_saved_reduction", 0), ""), divisor, is_divided_by_tensor
        if name in ("Mean", "Sum") and not _is_over_terms(node):
            return name.lower(), divisor, is_divided_by_tensor
        if name in ("Add", "Sub", "Stack", "Cat"):
            reduction, of_term, term_by_tensor = _reduction(nodes[position + 1 :], names[position + 1 :])
            if reduction == "sum":  # its divisor is probably the number of rows; those of means are weights
                return reduction, divisor * of_term, is_divided_by_tensor or term_by_tensor
            return reduction, divisor, is_divided_by_tensor
        if math.prod(output_of(node)[0]) > 1:  # an unknown reduction, beyond which factors belong to the model
            break
        if name in ("Mul", "Div"):
            number = _divisor(node, name)
            is_divided_by_tensor = is_divided_by_tensor or number is None
            divisor *= number or 1.0
    return "", divisor, is_divided_by_tensor


def _is_over_terms(node: Any) -> bool:
    """Return whether a sum or mean combines whole losses, or is that of a single number."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    is_single = sizes is not None and math.prod(int(size) for size in sizes) == 1
    return is_single or any(operation_of(item) in ("Stack", "Cat") or _stacks_losses(item) for item in inputs_of(node))


def _stacks_losses(node: Any, depth: int = 4) -> bool:
    """Return whether a vector is a stack of single losses, perhaps with weights and further terms for each."""
    if len(output_of(node)[0]) != 1 or not depth:
        return False
    name = operation_of(node)
    return name == "Stack" or (name in OF_LOSSES and any(_stacks_losses(item, depth - 1) for item in inputs_of(node)))


def _factors(nodes: list[Any], names: list[str], operation: str) -> tuple[float, ...]:
    """Return the numbers by which the nodes of an operation divide a reduced loss."""
    divisors = []
    for node, name in zip(nodes, names, strict=True):
        if name in LOSSES or (name in ("Mean", "Sum") and not _is_over_terms(node)):
            break
        divisor = _divisor(node, name) if name == operation and math.prod(output_of(node)[0]) == 1 else None
        if divisor is not None and divisor != 1:
            divisors.append(divisor)
    return tuple(divisors)


def _divisor(node: Any, name: str) -> float | None:
    """Return the number by which a node divides its input, 1 if it is unknown; ``None`` if a tensor divides it."""
    if len(inputs_of(node)) != 1:
        return 1.0
    value = saved_value(node, "other")
    if value is None and name == "Mul":
        value = saved_value(node, "self")
    if isinstance(value, Tensor):
        if not is_number(value):
            return None
        value = value.item()
    if not isinstance(value, (int, float)) or value == 0 or not math.isfinite(value):
        return 1.0
    return float(value) if name == "Div" else 1.0 / value


def _class_count(nodes: list[Any], names: list[str]) -> int:
    """Return the size of the class dimension of the log-softmax of a cross-entropy, else 0."""
    if "LogSoftmax" not in names:
        return 0
    position = names.index("LogSoftmax")
    shape, _ = output_of(nodes[position])
    is_cross_entropy = any(name in ("NllLoss", "NllLoss2D", "Neg", "Gather") for name in names[:position])
    if not shape or not is_cross_entropy:
        return 0
    if not {"NllLoss", "NllLoss2D"} & {*names[:position]} and len(shape) == 2 and shape[0] == shape[1]:
        return 0  # the similarities of all pairs of rows, not classes
    dimension = saved_integer(nodes[position], "dim")
    return shape[dimension] if dimension is not None and -len(shape) <= dimension < len(shape) else 0


def _ignore_index(nodes: list[Any], names: list[str]) -> int:
    """Return the target that the loss function leaves out, −100 if it is unknown."""
    positions = [index for index, name in enumerate(names) if name in ("NllLoss", "NllLoss2D")]
    index = saved_integer(nodes[positions[0]], "ignore_index") if positions else None
    return -100 if index is None else index


def _saved_targets(nodes: list[Any], names: list[str]) -> Tensor | None:
    """Return the classes that a cross-entropy gets; ``None`` on an accelerator, where reading them would wait."""
    position = _position(names, LIKELIHOODS - {"CtcLoss"})
    targets = None if position is None else saved_value(nodes[position], "target")
    is_readable = isinstance(targets, Tensor) and targets.device.type == "cpu" and targets.numel() > 0
    return targets if is_readable else None


def _position(names: list[str], wanted: frozenset[str]) -> int | None:
    return next((index for index, name in enumerate(names) if name in wanted), None)


def _class_facts(nodes: list[Any], names: list[str]) -> dict[str, Any]:
    """Return facts about outputs and targets of a cross-entropy on the CPU."""
    targets = _saved_targets(nodes, names)
    if targets is None:
        return {}
    node, ignored = nodes[_position(names, LIKELIHOODS) or 0], _ignore_index(nodes, names)
    counted = targets[targets != ignored]
    counts = torch.unique(counted[:MOST_TARGETS], return_counts=True)[1]
    facts: dict[str, Any] = {
        "target_count": counted.numel(),
        "first_targets": tuple(targets.flatten()[:FIRST_TARGETS].tolist()),
        "ignored_fraction": 1 - counted.numel() / targets.numel(),
        "target_classes": len(counts),
    }
    outputs, entropy = saved_value(node, "self"), _entropy(counts)
    if not isinstance(outputs, Tensor) or outputs.ndim < 2 or not len(counted):
        return facts
    classes = outputs.shape[1]
    rows, labels = outputs.detach().movedim(1, -1).reshape(-1, classes), targets.reshape(-1)
    kept = (labels != ignored).nonzero().flatten()
    kept = kept[:: -(-len(kept) // max(LEAST_ROWS, MOST_TARGETS // classes))]
    rows, labels = rows[kept].double(), labels[kept]
    if saved_value(node, "weight") is None and entropy is not None and not _has_scaled_logits(nodes, names):
        facts |= {"constant_loss": entropy, "term_loss": -float(rows.gather(1, labels[:, None]).mean())}
    shares = torch.unique(labels, return_counts=True)[1] / len(labels)
    return facts | variation(information(rows.exp()), float(-(shares * shares.log()).sum()))


def _entropy(counts: Tensor) -> float | None:
    """Return the entropy of the distribution from which counts were drawn; ``None`` for too few draws."""
    total = int(counts.sum())
    if total < DRAWS_PER_CLASS * len(counts) or not total:
        return None
    shares = counts.double() / total
    # The entropy of the sample is too low by (K − 1)/2N on average (Miller 1955).
    return float(-(shares * shares.log()).sum()) + (len(counts) - 1) / (2 * total)


def _number_facts(nodes: list[Any], names: list[str]) -> dict[str, Any]:
    """Return facts about outputs and targets that are numbers, on the CPU: reading an accelerator's would wait."""
    position = _position(names, REGRESSIONS | BINARY)
    targets = None if position is None else saved_value(nodes[position], "target")
    if position is None or not isinstance(targets, Tensor) or targets.device.type != "cpu" or targets.numel() < 2:
        return {}
    values = _sample(targets.detach()).double()
    nonfinite = float((~values.isfinite()).double().mean())
    facts: dict[str, Any] = {"nonfinite_targets": nonfinite}
    if nonfinite:
        return facts
    outputs = saved_value(nodes[position], "self")
    if isinstance(outputs, Tensor) and outputs.shape == targets.shape and len(values) > 1:
        found = _constant_facts(names[position], _sample(outputs.detach()).double(), values)
        if any(saved_value(nodes[position], weight) is not None for weight in ("weight", "pos_weight")):
            found = {name: value for name, value in found.items() if name == "output_variation"}
        facts |= found
    ordered = values.flatten().sort().values
    places = [round(share * (len(ordered) - 1)) for share in (0.0, 0.1, 0.9, 1.0)]
    quantiles = {"target_quantiles": tuple(ordered[places].tolist())}
    if names[position] in BINARY:
        invalid = float(((values < 0) | (values > 1)).double().mean())
        return facts | {"invalid_targets": invalid} | (quantiles if invalid else {})
    facts |= quantiles
    inner = next((name for name in names[position + 1 :] if name not in VIEWS), "")
    if inner in RANGES:
        low, high = RANGES[inner]
        margin = TOLERANCE * values.std(correction=0)  # noise around a bound is no mistake
        facts["unreachable_fraction"] = float(((values < low - margin) | (values > high + margin)).double().mean())
    return facts


def _constant_facts(name: str, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """Return the mean loss of outputs and of their best constants, and how much outputs vary between the rows.

    Args:
        name: the operation of the loss.
        outputs: numbers, logits or probabilities, shape (rows,) or (rows, columns).
        targets: the same shape.
    """
    if name in REGRESSIONS:
        variance = float(targets.var(dim=0, correction=0).mean())
        facts = {"constant_loss": variance, "term_loss": float((outputs - targets).square().mean())}
        return (facts if name == "MseLoss" else {}) | variation(float(outputs.var(0, correction=0).mean()), variance)
    chances = outputs.sigmoid() if name.endswith("Logits") else outputs

    def surprise(shares: Tensor, chances: Tensor) -> Tensor:
        bounded = chances.clamp(1e-12, 1 - 1e-12)
        return -(shares * bounded.log() + (1 - shares) * (1 - bounded).log())

    shares = targets.mean(0)
    entropy = float(surprise(shares, shares).mean())
    # In few rows, the shares of ones in single columns, such as pixels, are too close to 0 or 1.
    constant = entropy if len(targets) >= ROWS_PER_COLUMN else float(surprise(targets.mean(), targets.mean()))
    information = float((surprise(chances.mean(0), chances.mean(0)) - surprise(chances, chances).mean(0)).mean())
    facts = {"constant_loss": constant, "term_loss": float(surprise(targets, chances).mean())}
    return facts | variation(information, entropy)


def _sample(targets: Tensor) -> Tensor:
    """Return about 2¹⁶ targets of the first rows at most, since sorting a large batch takes as long as a layer."""
    if targets.ndim < 2:
        return targets.reshape(-1)[:MOST_TARGETS]
    columns = targets.flatten(1)
    columns = columns[:, :: -(-columns.shape[1] // MOST_COLUMNS)]
    return columns[: max(2, MOST_TARGETS // columns.shape[1])]


def _has_terms(nodes: list[Any]) -> bool:
    """Return whether one of these nodes combines several terms before the loss function."""
    before = itertools.takewhile(lambda node: operation_of(node) not in LOSSES | {"LogSoftmax"}, nodes)
    return any(len(inputs_of(node)) > 1 for node in before)


def _target_sum(nodes: list[Any], names: list[str]) -> dict[str, Any]:
    """Return the mean sum over the classes of the targets of a cross-entropy that are numbers, if known."""
    count = len(SOFT_CROSS_ENTROPY)
    starts = [index for index in range(len(names)) if tuple(names[index : index + count]) == SOFT_CROSS_ENTROPY]
    if not starts:
        return {}
    product = nodes[starts[0] + count - 2]
    targets = next((item for name in ("other", "self") if isinstance(item := saved_value(product, name), Tensor)), None)
    if targets is None or targets.device.type != "cpu" or targets.ndim < 2 or not targets.numel():
        return {}
    return {"target_sum": float(targets.detach()[:MOST_TARGETS].double().sum(1).mean())}


def _gets_output_of(names: list[str], operations: Mapping[str, frozenset[str]]) -> bool:
    """Return whether a loss gets the output of one of its operations, directly or after views and conversions."""
    remaining = [name for name in names if name not in VIEWS]
    return any(inner in operations.get(outer, ()) for outer, inner in pairwise(remaining))


def _lacks_log_softmax(nodes: list[Any], names: list[str]) -> bool:
    """Return whether a loss that takes log-probabilities gets the output of a layer, or probabilities."""
    position = next((index for index, name in enumerate(names) if name in LIKELIHOODS), len(names))
    node = next((node for node in nodes[position + 1 :] if operation_of(node) not in VIEWS), None)
    if node is None:
        return False
    # A linear layer on several dimensions may add its bias to the product.
    terms = [without_views(term) for term in inputs_of(node)] if operation_of(node) == "Add" else [node]
    return any(operation_of(term) in NOT_LOGARITHMS for term in terms)


def _has_divergence_of_probabilities(root: Any) -> bool:
    """Return whether a term is ``kl_div``, which is t·log(t) − t·x, with the probabilities of a softmax as x."""
    for term in _visited(root):
        names = [name for name in map(operation_of, path_of(term)) if name not in VIEWS]
        if names[:1] in (["Sum"], ["Mean"]) and names[1:4] == ["Sub", "Mul", "Softmax"]:
            return True
    return False


def _has_other_terms(nodes: list[Any], names: list[str]) -> bool:
    """Return whether a cross-entropy is added to terms that do not depend on its log-softmax.

    The terms of label smoothing depend on it.
    """
    if "LogSoftmax" not in names:
        return False
    position = names.index("LogSoftmax")
    softmax, path = nodes[position], nodes[: position + 1]
    others = [term for node in path[:-1] for term in inputs_of(node) if term not in path]
    return any(softmax not in _visited(term) for term in others)


def _has_scaled_logits(nodes: list[Any], names: list[str]) -> bool:
    """Return whether the logits of a cross-entropy are multiplied by a number above 5."""
    if "LogSoftmax" not in names:
        return False
    first = names.index("LogSoftmax") + 1
    rest = [pair for pair in zip(nodes[first:], names[first:], strict=True) if pair[1] not in VIEWS]
    if not rest or rest[0][1] not in ("Mul", "Div"):
        return False
    divisor = _divisor(*rest[0])
    return divisor is not None and 0 < divisor < 1 / LARGEST_SCALE


def _is_normalised_over_rows(nodes: list[Any], names: list[str]) -> bool:
    """Return whether the log-softmax of a cross-entropy runs over the rows of a matrix of logits and not over classes.

    Square matrices are left out, since losses of pairs normalise both ways.
    """
    for position, (node, name) in enumerate(zip(nodes, names, strict=True)):
        shape = output_of(node)[0]
        is_tall = len(shape) == 2 and shape[0] != shape[1] and min(shape) > 1
        if name == "LogSoftmax" and is_tall and saved_integer(node, "dim") in (0, -2):
            return any(outer in ("NllLoss", "Gather", "Index") for outer in names[:position])
    return False


def _compares_outputs(nodes: list[Any], names: list[str]) -> bool:
    """Return whether the logits of a cross-entropy are products of outputs, and not of outputs and weights."""
    inputs = inputs_of(nodes[names.index("LogSoftmax")]) if "LogSoftmax" in names else []
    return len(inputs) == 1 and _is_product_of_outputs(inputs[0])


def _is_product_of_outputs(node: Any) -> bool:
    node, name = _without_scale(node)
    inputs = inputs_of(node)
    if name == "Cat":
        return len(inputs) > 1 and all(map(_is_product_of_outputs, inputs))
    if name == "Sum" and len(inputs) == 1:  # Σ_j a_ij·b_ij, the products of pairs
        (node,), name = inputs, operation_of(inputs[0])
        inputs = inputs_of(node) if name == "Mul" else []
    return name in ("Mm", "Bmm", "Mul") and bool(inputs) and not any(map(_is_weight, inputs))


def _without_scale(node: Any) -> tuple[Any, str]:
    """Return the first node from this one on that is more than a view or a scalar factor, and its name."""
    name = operation_of(node)
    while name in VIEWS or name in ("Mul", "Div", "Exp"):
        inputs = inputs_of(node)
        if len(inputs) > 1:  # the temperature may be trained
            inputs = [item for item in inputs if math.prod(output_of(item)[0]) > 1]
        if len(inputs) != 1:
            break
        (node,) = inputs
        name = operation_of(node)
    return node, name


def _cosine_scale(nodes: list[Any], names: list[str]) -> float | None:
    """Return the factor of the cosines that are the logits of a cross-entropy; ``None`` for other logits."""
    inputs = inputs_of(nodes[names.index("LogSoftmax")]) if "LogSoftmax" in names else []
    return _scale_of_cosines(inputs[0]) if len(inputs) == 1 else None


def _scale_of_cosines(node: Any) -> float | None:
    """Return the constant factor of a node's cosines; ``None`` if it has other values or a trained factor."""
    name, inputs = operation_of(node), inputs_of(node)
    if name == "Cat":
        scales = [_scale_of_cosines(item) for item in inputs]
        largest = max((scale for scale in scales if scale is not None), default=None)
        return None if None in scales else largest
    if name in VIEWS or (name == "MaskedFill" and len(inputs) == 1):
        return _scale_of_cosines(inputs[0]) if len(inputs) == 1 else None
    if name in ("Mul", "Div") and len(inputs) == 1:
        divisor, scale = _divisor(node, name), _scale_of_cosines(inputs[0])
        return None if divisor is None or scale is None else scale / divisor
    sides = (("self", -1), ("mat2", -2))
    if name == "Sum" and len(inputs) == 1 and operation_of(inputs[0]) == "Mul":  # Σ_j a_ij·b_ij
        node, sides = inputs[0], (("self", -1), ("other", -1))
    elif name not in ("Mm", "Bmm"):
        return None
    sources = [following for following, _ in node.next_functions]
    pairs = zip(sides, sources, strict=True)
    return 1.0 if all(_has_length_one(saved_value(node, side), dim, source) for (side, dim), source in pairs) else None


def _has_length_one(values: Any, dim: int, source: Any) -> bool:
    """Return whether vectors along a dimension have the length 1: those of a saved tensor, or those of a node.

    A product saves an argument only if the other one has a gradient.
    """
    if isinstance(values, Tensor):
        if values.device.type != "cpu" or values.ndim < 2 or values.shape[dim] < 2:
            return False
        lengths = values.detach().movedim(dim, -1).flatten(0, -2)[:FEW_VECTORS].float().norm(dim=-1)
        return bool(len(lengths)) and bool(((lengths - 1).abs() < LENGTH_TOLERANCE).all())
    node = None if source is None else without_views(source)
    if node is None or operation_of(node) != "Div":
        return False
    return any(operation_of(without_views(item)) in LENGTHS for item in inputs_of(node))


def _is_weight(node: Any) -> bool:
    """Return whether a node is a parameter, perhaps moved, normalised or scaled."""
    waiting, seen = [node], {node}
    for item in waiting:
        new = [one for one in inputs_of(item) if one not in seen]
        if len(waiting) + len(new) > MOST_OF_WEIGHT or operation_of(item) in NOT_LOGARITHMS:
            return False
        seen.update(new)
        waiting += new
    return sum(operation_of(item).endswith("AccumulateGrad") for item in waiting) == 1


def _is_broadcast(root: Any) -> bool:
    """Return whether the loss compares N outputs with N targets as N × N pairs, as (N, 1) against (N,) does.

    All terms of the loss are searched, up to operations that are not element by element. Pairs that are formed on
    purpose begin with an added dimension, ``x[:, None]``, or have a separate matrix, such as a mask.
    """
    for node in walk(root, _is_elementwise, MOST_VISITED):
        inputs = inputs_of(node)
        if operation_of(node) in BROADCASTING and any(_is_squared(node, item) for item in inputs):
            is_on_purpose = any(operation_of(item) in ("Unsqueeze", "Expand") for item in inputs)
            if not is_on_purpose and not _has_matrix(node):
                return True
    return False


def _is_elementwise(node: Any) -> bool:
    return operation_of(node) in ELEMENTWISE


def _is_squared(outer: Any, inner: Any) -> bool:
    """Return whether a vector of N elements becomes a matrix of N × N."""
    result, argument = output_of(outer)[0], output_of(inner)[0]
    count = math.prod(argument)
    return count > 1 and argument in ((count,), (count, 1), (1, count)) and result == (count, count)


def _has_matrix(node: Any) -> bool:
    """Return whether a factor that an operation has saved has several rows and several columns."""
    factors = [saved_value(node, argument) for argument in ("self", "other")]
    return any(isinstance(item, Tensor) and item.ndim == 2 and min(item.shape) > 1 for item in factors)


def _model_facts(root: Any, path: list[Any], names: list[str]) -> dict[str, Any]:
    """Return the number of attention operations over as many queries as keys, of those that look ahead, whether an
    embedding reads the targets of the loss themselves, whether inputs are normalised, and whether a softmax runs over
    the rows, and how many tensors the first layer gets.
    """
    targets, nodes = _saved_targets(path, names), [*all_nodes(root)]
    found = [looks_ahead for node in nodes if (looks_ahead := _looks_ahead(node)) is not None]
    rows = next((shape[0] for node in path if (shape := output_of(node)[0])), 0)
    return {
        "normalises_inputs": any(map(_normalises_inputs, nodes)),
        "attention_count": len(found),
        "look_ahead_count": found.count(True),
        "input_count": count_inputs(nodes),
        "reads_targets": targets is not None
        and any(_reads(node, targets) for node in nodes if operation_of(node) == "Embedding"),
        "is_normalised_over_rows": _is_normalised_over_rows(path, names)
        or any(_is_softmax_over(node, rows) for node in nodes if operation_of(node) == "Softmax"),
    }


def _is_softmax_over(node: Any, rows: int) -> bool:
    """Return whether a softmax runs over the rows of the loss; not if another dimension has as many elements."""
    shape = output_of(node)[0]
    is_over_first = saved_integer(node, "dim") in (0, -len(shape))
    return rows > 1 and len(shape) > 1 and is_over_first and shape[0] == rows and rows not in shape[1:]


def _reads(node: Any, targets: Tensor) -> bool:
    """Return whether an embedding looks up all targets, in their order."""
    indices = saved_value(node, "indices")
    if not isinstance(indices, Tensor) or indices.device.type != "cpu" or indices.numel() != targets.numel():
        return False
    first, second = indices.flatten(), targets.flatten()
    # Few different ones, or numbers in order such as positions, may agree by chance.
    return bool((first == second).all()) and len(first) > 8 and bool((first.diff() != 1).any())


def _normalises_inputs(node: Any) -> bool:
    """Return whether a node normalises the inputs of the model, or a linear function of them."""
    if not operation_of(node).endswith(NORMS):
        return False
    values = [without_views(item) for item in inputs_of(node)]
    return all(_is_parameter(item) or _is_layer_of_inputs(item) for item in values)


def _is_layer_of_inputs(node: Any) -> bool:
    return operation_of(node) in ("Addmm", "Mm", "Convolution") and all(map(_is_parameter, inputs_of(node)))


def _is_parameter(node: Any) -> bool:
    return operation_of(without_views(node)).endswith("AccumulateGrad")


def _looks_ahead(node: Any) -> bool | None:
    """Return whether positions see later ones in an attention operation; ``None`` for other nodes.

    Masks that cannot be read count as causal. Attention over other numbers of keys than queries is left out.
    """
    if operation_of(node).startswith("ScaledDotProduct"):
        return _fused_looks_ahead(node)
    shape = output_of(node)[0]
    if operation_of(node) not in ("Softmax", "SafeSoftmax") or len(shape) < 3 or shape[-1] != shape[-2]:
        return None
    while len(inputs := inputs_of(node)) == 1:
        (node,) = inputs
        name = operation_of(node)
        if name == "Bmm":
            return True
        if name not in BEFORE_SOFTMAX and not _is_open_mask(node, name):
            return False
    return False


def _fused_looks_ahead(node: Any) -> bool | None:
    query, key = (saved_value(node, argument) for argument in ("query", "key"))
    if not isinstance(query, Tensor) or not isinstance(key, Tensor) or query.shape[-2] != key.shape[-2]:
        return None
    if getattr(node, "_saved_is_causal", True):
        return False
    mask = next((item for kind in ("mask", "bias") if (item := saved_value(node, f"attn_{kind}")) is not None), None)
    return mask is None or _lets_see_ahead(mask)


def _is_open_mask(node: Any, name: str) -> bool:
    """Return whether a node between scores and softmax is a mask through which positions see later ones."""
    if name == "MaskedFill":
        return _lets_see_ahead(saved_value(node, "mask"), allowed=False)
    # Of the two arguments of torch.where, the scores are the one with a gradient.
    are_first = node.next_functions[0][0] is not None
    return name == "Where" and _lets_see_ahead(saved_value(node, "condition"), allowed=are_first)


def _lets_see_ahead(mask: Any, *, allowed: bool = True) -> bool:
    """Return whether a mask lets the last position but one see the last one, in any row of the batch.

    Masks of padding do for rows without padding, causal masks and those with a prefix do not.

    Args:
        mask: booleans, or numbers that are added to the scores, shape (..., queries or 1, keys).
        allowed: the boolean of pairs that are not masked.
    """
    if not isinstance(mask, Tensor) or mask.device.type != "cpu" or not mask.ndim or mask.shape[-1] < 2:
        return False
    last = mask[..., -1]
    entries = last[..., -2] if last.ndim and last.shape[-1] > 1 and mask.ndim > 1 else last
    return bool(((entries == allowed) if mask.dtype is torch.bool else (entries > MASKED)).any())
