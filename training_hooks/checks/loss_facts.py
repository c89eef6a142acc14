"""Metrics of the losses of a step, from the descriptions of their backward passes."""

import math
from collections.abc import Sequence

from loopscope.doctor.senses import BackwardPass

PASS_METRICS = {
    "constant_loss": "constant_loss",
    "cosine_scale": "cosine_scale",
    "term_loss": "term_loss",
    "output_variation": "output_variation",
    "invalid_targets": "invalid_target_fraction",
    "unreachable_fraction": "unreachable_target_fraction",
    "target_sum": "soft_target_sum",
}
"""Metrics that are means over the micro-batches, by the field of their descriptions."""
TOLERANCE = 0.1
"""Deviation of the summed weights of micro-batches from 1 up to which the step averages them."""


def loss_facts(passes: Sequence[BackwardPass], rows: int = 0) -> dict[str, float]:
    """Return the metrics of a step; nothing without descriptions.

    Args:
        passes: the descriptions, one for each micro-batch.
        rows: the rows of a micro-batch, 0 if unknown.

    >>> loss_facts([BackwardPass(reduction="sum", class_count=10)])["loss_is_summed"]
    1
    """
    if not passes:
        return {}
    classes = max(one.class_count for one in passes)
    is_alone = classes > 0 and all(one.class_count == classes and not one.is_modified for one in passes)
    uniform = {"uniform_loss": math.log(classes)} if is_alone else {}
    return {
        "micro_batches": len(passes),
        "loss_is_summed": int(any(is_summed(one, len(passes), rows) for one in passes)),
        "loss_divisor": passes[0].divisor,
        "doubly_normalised": int(any(one.is_doubly_normalised for one in passes)),
        "lacks_log_softmax": int(any(one.lacks_log_softmax for one in passes)),
        "normalises_inputs": int(all(one.normalises_inputs for one in passes)),
        "loss_compares_outputs": int(any(one.compares_outputs for one in passes)),
        "loss_is_broadcast": int(any(one.is_broadcast for one in passes)),
        "loss_has_terms": int(any(one.has_terms for one in passes)),
        "reads_targets": int(any(one.reads_targets for one in passes)),
        "logits_rectified": int(any(one.is_rectified for one in passes)),
        "normalised_over_rows": int(any(one.is_normalised_over_rows for one in passes)),
        "class_count": classes,
        **uniform,
        **_averaging(passes, rows),
        **attention_facts(passes),
        **nonfinite_facts(passes),
        **_output_facts(passes),
    }


def nonfinite_facts(passes: Sequence[BackwardPass]) -> dict[str, float]:
    """Return the share of targets that are NaN or infinite; nothing for targets that are no numbers."""
    shares = [one.nonfinite_targets for one in passes if one.nonfinite_targets is not None]
    return {"nonfinite_target_fraction": max(shares)} if shares else {}


def _output_facts(passes: Sequence[BackwardPass]) -> dict[str, float]:
    """Return facts about the outputs that a loss gets and about its targets."""
    facts: dict[str, float] = {}
    quantiles = [one.target_quantiles for one in passes if one.target_quantiles]
    if quantiles:
        lowest, low, high, highest = zip(*quantiles, strict=True)
        facts |= {"target_min": min(lowest), "target_max": max(highest)}
        facts |= {"target_low": sum(low) / len(low), "target_high": sum(high) / len(high)}
    for name, metric in PASS_METRICS.items():
        values = [value for one in passes if (value := getattr(one, name)) is not None]
        if len(values) == len(passes):
            facts[metric] = sum(values) / len(values)
    return facts


def _averaging(passes: Sequence[BackwardPass], rows: int) -> dict[str, float]:
    """Return whether the losses of several micro-batches are averaged; nothing if the graph does not show it."""
    are_averaged = averages(passes, rows) if len(passes) > 1 else None
    return {} if are_averaged is None else {"averages_micro_batches": int(are_averaged)}


def attention_facts(passes: Sequence[BackwardPass]) -> dict[str, float]:
    """Return the share of attention operations that look ahead; nothing for models without attention."""
    count = sum(one.attention_count for one in passes)
    return {"look_ahead_fraction": sum(one.look_ahead_count for one in passes) / count} if count else {}


def is_summed(one: BackwardPass, micro_batches: int, rows: int) -> bool:
    """Return whether a loss is a sum that nothing divides by a number of elements.

    The number of micro-batches is no such number, nor are small factors, as in ½·Σx².
    """
    least = max(rows, micro_batches + 1) if rows else 2 * micro_batches + 1
    divisor = max(one.divisor, *one.divisions, 1.0)  # a weight may follow the division by the rows
    return one.reduction == "sum" and not one.is_divided_by_tensor and divisor < least


def reduces_targets_alike(one: BackwardPass) -> bool:
    """Return whether a cross-entropy itself reduces the losses of its targets, so that no mask leaves some out."""
    names = [name.partition("Backward")[0] for name in one.loss_operations]
    before = names[: min((index for index, name in enumerate(names) if name.startswith("NllLoss")), default=0)]
    return any(name.startswith("NllLoss") for name in names) and not {"Sum", "Mean"} & {*before}


def averages(passes: Sequence[BackwardPass], rows: int = 0) -> bool | None:
    """Return whether a step of several micro-batches averages their losses; ``None`` if the graph does not show it.

    It does if the weights of the losses add up to 1, if each loss is divided by the number of micro-batches, apart
    from a constant weight, or if a number of tokens divides it. The weight of a mean is 1/divisor, that of a
    sum the number of its targets over the divisor.

    Args:
        passes: the descriptions, one for each micro-batch.
        rows: the rows of a micro-batch, 0 if unknown.

    >>> averages([BackwardPass(reduction="sum", divisor=30, target_count=count) for count in (10, 20)])
    True
    >>> averages([BackwardPass(reduction="mean", divisor=6, divisions=(3,), weights=(0.5,))] * 3)
    True
    """
    number = len(passes)
    if all(one.is_divided_by_tensor for one in passes):
        return True
    if not all(one.reduction for one in passes):
        return None
    counts = [(one.target_count or rows) if one.reduction == "sum" else 1 for one in passes]
    net = [count / one.divisor for one, count in zip(passes, counts, strict=True)]
    if all(counts) and _is_near(sum(net), 1):
        return True
    # Of a sum of terms the divisor has the factors of all terms, the others also those of the term that is followed.
    unweighted = [count / math.prod(one.divisions) for one, count in zip(passes, counts, strict=True)]
    weighted = [weight * math.prod(one.weights) for one, weight in zip(passes, unweighted, strict=True)]
    if any(is_summed(one, number, rows) for one in passes) or all(_is_near(weight, 1) for weight in weighted):
        return False
    if not all(counts) or _is_near(sum(unweighted), 1):
        return True  # the divisor of a sum of unknown size is probably the number of elements of the step
    return _is_divided_by(number, passes[0], weighted[0]) if len({*weighted}) == 1 else None


def _is_divided_by(number: int, one: BackwardPass, weight: float) -> bool | None:
    """Return whether one of several losses of equal weight is divided by their number; ``None`` if that is unknown.

    A single factor may join the number and a constant weight, as 6 does in ½·loss/3.
    """
    divisions = sum(math.isclose(division, number) for division in one.divisions)
    is_divided_twice = divisions > 1 or (number > 2 and any(math.isclose(item, number**2) for item in one.divisions))
    if divisions or is_divided_twice or any(math.isclose(item * number, 1) for item in one.weights):
        return not is_divided_twice
    is_plain = _is_whole(1 / weight) and not _is_whole(1 / (weight * number))
    return False if is_plain or _is_whole(weight) else None


def _is_near(value: float, expected: float) -> bool:
    return abs(value - expected) <= TOLERANCE * expected


def _is_whole(value: float) -> bool:
    return value > 0.5 and math.isclose(value, round(value))
