"""Every finite value of a hook is in the range that its metric declares, for losses, weights, gradients of any size."""

import math
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from loopscope import training_hooks  # noqa: F401 - fills the registry
from loopscope.errors import LoopscopeError
from loopscope.hooks import HookRegistry, MetricInfo, TrainingHook

from tests.contracts.test_hooks import COMMITTING, HEALTH, QUIET, make, reference, refusal
from tests.support import Case, train

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{HEALTH}"),
    pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert"),
]
CASES = [
    Case("transformer", "adamw_foreach", "epoch"),
    Case("batchnorm_mlp", "sgd_momentum", "step"),
    Case("tied", "adamw_foreach", "step"),
]
STEPS = 7
NUMBER = r"[-−]?(?:\d+(?:\.\d+)?|∞)"
INTERVAL = re.compile(rf"([(\[])\s*({NUMBER}|[^,;\]]*?)\s*,\s*({NUMBER}|[^,;\])]*?)\s*([)\]])")


def bounds(text: str) -> tuple[float, float]:
    """Return the numeric ends of a declared range; infinite where an end is no number, or open."""
    found = INTERVAL.match(text.strip())
    if found is None:
        counted = re.match(r"(\d+), (\d+)", text)  # as in 0, 1, 2, …
        return (float(counted[1]), math.inf) if counted else (-math.inf, math.inf)
    low, high = (_number(found[place]) for place in (2, 3))
    return (-math.inf if math.isnan(low) else low), (math.inf if math.isnan(high) else high)


def _number(text: str) -> float:
    text = text.replace("−", "-").replace("∞", "inf")
    try:
        return float(text)
    except ValueError:
        return math.nan


def info_of(metric: str, infos: list[MetricInfo]) -> MetricInfo | None:
    """Return the description of a metric, whose name may stand for one per parameter."""
    for info in infos:
        pattern = re.escape(info.name).replace(re.escape("<parameter>"), ".+")
        if re.fullmatch(pattern, metric):
            return info
    return None


def numbers(value: Any) -> Iterator[float]:
    """Yield the numbers of a metric: of a list, or of a dict by name."""
    if isinstance(value, dict):
        for part in value.values():
            yield from numbers(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from numbers(part)
    elif isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.ndim == 0):
        yield float(value)


def scaled_loss(exponent: int, task: Any, state: Any) -> None:
    """Multiply the loss by a power of two."""
    original = task.compute_loss
    task.compute_loss = lambda *arguments: original(*arguments) * 2.0**exponent


def scaled_weights(exponent: int, task: Any, state: Any) -> None:
    """Multiply all parameters by a power of two; the attention scores of the transformer overflow above 2³⁰."""
    with torch.no_grad():
        for parameter in task.model.parameters():
            parameter.mul_(2.0**exponent)


def scaled_gradients(exponent: int, task: Any, state: Any) -> None:
    """Multiply all gradients by a power of two, after the backward pass of the unchanged loss."""
    for parameter in task.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient * 2.0**exponent)


def repeated_batch(exponent: int, task: Any, state: Any) -> None:
    """Train on one batch with a tiny learning rate, so that gradients of successive steps hardly differ."""
    for group in task.optimizer.param_groups:
        group["lr"] = 2.0**exponent
    original, first = task.compute_loss, {}
    task.compute_loss = lambda model, batch: original(model, first.setdefault(len(batch[0]), batch))


EXPONENTS = {
    scaled_loss: (-90, -40, 0, 40),
    scaled_weights: (-40, 40),
    scaled_gradients: (-126, 110),
    repeated_batch: (-40,),
}
FAST = {(scaled_loss, -90, CASES[0]), (scaled_gradients, 110, CASES[1])}
SCALES = [
    pytest.param(
        case,
        partial(change, exponent),
        id=f"{case}-{change.__name__}-{exponent}",
        marks=[] if (change, exponent, case) in FAST else [pytest.mark.slow],
    )
    for case in CASES
    for change, exponents in EXPONENTS.items()
    for exponent in exponents
]


def violations(hook: TrainingHook, rows: Any) -> list[str]:
    infos = list(hook.describe_metrics())
    found = []
    for metrics, *_ in rows:
        for name, value in metrics.items():
            info = info_of(name.removeprefix(f"{hook.name}/"), infos)
            if not name.startswith(f"{hook.name}/") or info is None:
                continue
            low, high = bounds(info.range)
            found += [f"{name} = {number!r}, range {info.range}" for number in numbers(value)
                      if math.isfinite(number) and not low <= number <= high]  # fmt: skip
    return found


@pytest.mark.parametrize("name", QUIET + COMMITTING)
@pytest.mark.parametrize(("case", "change"), SCALES)
def test_values_stay_in_declared_ranges(name, case, change):
    """Loss, weights or gradients are multiplied by a power of two, or gradients of successive steps are alike."""
    if refusal(name, case):
        pytest.skip("the hook does not support the model")
    hook = make(name)
    run = train(case, [hook], steps=STEPS, audit=False, every_step=False, raises=LoopscopeError,
                reference_weights=reference(case), introduce=change)  # fmt: skip
    assert not violations(hook, run.sink.emitted)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[0, ∞)", (0, math.inf)),
        ("(−∞, ∞)", (-math.inf, math.inf)),
        ("[−1, 1], NaN", (-1, 1)),
        ("[1, n], n = min(rows, columns)", (1, math.inf)),
        ("[0, 1 − 1/V], NaN", (0, math.inf)),
        ("0, 1, 2, …", (0, math.inf)),
        ("the range of the evaluation", (-math.inf, math.inf)),
        ("[−1/W, ∞]", (-math.inf, math.inf)),
    ],
)
def test_ranges_are_read(text, expected):
    assert bounds(text) == expected


def test_ranges_of_most_metrics_have_numbers():
    infos = [info for hook in HookRegistry for info in HookRegistry.get(hook.name)().describe_metrics()]
    with_numbers = [info for info in infos if any(map(math.isfinite, bounds(info.range)))]
    assert len(with_numbers) > 0.6 * len(infos)
