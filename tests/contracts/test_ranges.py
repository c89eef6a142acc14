"""Every value of a hook is in the range that its metric declares, for losses, weights, gradients of any size."""

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from loopscope import training_hooks  # noqa: F401 - fills the registry
from loopscope.errors import LoopscopeError
from loopscope.hooks import HookRegistry, MetricInfo, Series, TrainingHook

from tests.contracts.test_hooks import COMMITTING, HEALTH, QUIET, make, reference, refusal, supported
from tests.support import Case, Run, train

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
    """Yield the numbers of a metric: of a series, of a list, or of a dict by name."""
    if isinstance(value, Series):
        yield from numbers(value.values)
    elif isinstance(value, dict):
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


def zero_gradients(task: Any, state: Any) -> None:
    """Multiply all gradients by 0, after the backward pass of the unchanged loss."""
    for parameter in task.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(torch.zeros_like)


def zero_loss(task: Any, state: Any) -> None:
    """Multiply the loss by 0."""
    original = task.compute_loss
    task.compute_loss = lambda *arguments: original(*arguments) * 0.0


def one_row(task: Any, state: Any) -> None:
    """Compute the loss of the first row of each batch; batch normalisation refuses one row."""
    original, count = task.compute_loss, 2 if any(task.model.buffers()) else 1
    task.compute_loss = lambda model, batch: original(model, tuple(part[:count] for part in batch))


def constant_inputs(task: Any, state: Any) -> None:
    """Give every row of a batch the values of the first one."""
    original = task.compute_loss
    task.compute_loss = lambda model, batch: original(
        model, tuple(part[:1].repeat_interleave(len(part), 0) for part in batch)
    )


def zero_weights(task: Any, state: Any) -> None:
    """Set all parameters to 0."""
    with torch.no_grad():
        for parameter in task.model.parameters():
            parameter.zero_()


def zero_rate(task: Any, state: Any) -> None:
    """Train with learning rate 0, so that no weight moves."""
    for group in task.optimizer.param_groups:
        group["lr"] = 0.0


EXPONENTS = {
    scaled_loss: (-90, -40, 0, 40),
    scaled_weights: (-40, 40),
    scaled_gradients: (-126, 110),
    repeated_batch: (-40,),
}
FAST = {(scaled_loss, -90, CASES[0]), (scaled_gradients, 110, CASES[1])}
SCALES = [
    pytest.param(
        (case, partial(change, exponent)),
        id=f"{case}-{change.__name__}-{exponent}",
        marks=[] if (change, exponent, case) in FAST else [pytest.mark.slow],
    )
    for case in CASES
    for change, exponents in EXPONENTS.items()
    for exponent in exponents
]


DEGENERATE = [zero_gradients, zero_loss, one_row, constant_inputs, zero_weights, zero_rate]
QUICK = {(zero_gradients, CASES[1]), (zero_rate, CASES[1])}
DEGENERATE_RUNS = [
    pytest.param(
        (case, change), id=f"{case}-{change.__name__}", marks=[] if (change, case) in QUICK else [pytest.mark.slow]
    )
    for case in CASES
    for change in DEGENERATE
]
SHORT_WINDOWS = {name: {"window": 3} for name in ("loss_spikes", "variance")}
"""Options with which hooks report within a short run."""


def undescribed(number: float, text: str) -> bool:
    """Return whether a value that is not finite is missing in a declared range.

    >>> undescribed(math.nan, "[0, 1], NaN"), undescribed(math.nan, "[0, 1]"), undescribed(math.inf, "[0, ∞)")
    (False, True, True)
    """
    if math.isnan(number):
        return "NaN" not in text
    return math.isinf(number) and ("∞]" if number > 0 else "[−∞") not in text


def violations(hook: TrainingHook, rows: Any, *, is_finite: bool = False) -> list[str]:
    """List the values outside of the declared ranges; of a finite run also those that are not finite."""
    infos = list(hook.describe_metrics())
    found = []
    for metrics, *_ in rows:
        for name, value in metrics.items():
            own, _, metric = name.partition("/")
            info = info_of(metric, infos) if own == hook.name else None
            if info is None:
                continue
            low, high = bounds(info.range)
            found += [f"{name} = {number!r}, range {info.range}" for number in numbers(value)
                      if (math.isfinite(number) and not low <= number <= high)
                      or (is_finite and undescribed(number, info.range))]  # fmt: skip
    return found


Training = Callable[[list[str]], Run]
"""Trains with the hooks of these names."""


def training(case: Case, change: Callable[..., None], **options: Any) -> Training:
    def trained(names: list[str]) -> Run:
        hooks = [
            HookRegistry.get(name)(**SHORT_WINDOWS[name]) if name in SHORT_WINDOWS else make(name) for name in names
        ]
        return train(case, hooks, every_step=False, reference_weights=reference(case), introduce=change, **options)

    return trained


def run_with(name: str, case: Case, trained: Training, together: Run) -> Run:
    """Return the run of all observers together, or one of the hook alone, if it commits or the other run failed."""
    if refusal(name, case):
        pytest.skip("the hook does not support the model")
    return trained([name]) if name in COMMITTING or together.error else together


def hook_of(run: Run, name: str) -> TrainingHook:
    return next(hook for hook in run.manager.hooks if hook.name == name)


@pytest.fixture(scope="module")
def scaled(request: pytest.FixtureRequest) -> tuple[Case, Training, Run]:
    """A run whose loss, weights or gradients have another scale, or the error with which it ends."""
    case, change = request.param
    trained = training(case, change, steps=STEPS, raises=LoopscopeError)
    return case, trained, trained(supported(QUIET, case))


@pytest.mark.parametrize("name", QUIET + COMMITTING)
@pytest.mark.parametrize("scaled", SCALES, indirect=True)
def test_values_stay_in_declared_ranges(name, scaled):
    """Loss, weights or gradients are multiplied by a power of two, or gradients of successive steps are alike."""
    run = run_with(name, *scaled)
    assert not violations(hook_of(run, name), run.sink.emitted)


@pytest.fixture(scope="module")
def degenerate(request: pytest.FixtureRequest) -> tuple[Case, Training, Run]:
    """A run of finite numbers whose loss, weights, gradients or inputs are 0 or constant."""
    case, change = request.param
    trained = training(case, change, steps=13)
    return case, trained, trained(supported(QUIET, case))


@pytest.mark.parametrize("name", QUIET + COMMITTING)
@pytest.mark.parametrize("degenerate", DEGENERATE_RUNS, indirect=True)
def test_degenerate_runs_report_described_values(name, degenerate):
    """Where loss, weights and gradients are finite, a NaN, as of 0/0, or an infinite value needs a declared range."""
    run = run_with(name, *degenerate)
    assert not violations(hook_of(run, name), run.sink.emitted, is_finite=True)


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
