"""Test data for sinks: runs without training, values of every kind, and an equality in which NaN equals NaN."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from loopscope.hooks import STEP_POINTS, HookPoint, MetricInfo, RunInfo, Series
from loopscope.sinks.client_sink import ClientSink
from loopscope.training import TrainingTask
from torch import nn
from torch.optim import SGD

NASTY = st.sampled_from(["a,b", "c;d", "e:f", "[g]", "%2C", 'q"q', "'", "x\ny", "\r", "\x85", "ü", "=1", "a b"])
WORDS = st.one_of(st.sampled_from(["weight", "layers.0.bias", "0"]), NASTY, st.text(max_size=5))
NUMBERS = st.one_of(st.floats(), st.integers(), st.booleans())
SCALARS = st.one_of(NUMBERS, st.none(), WORDS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=6,
)
STEPS = st.lists(st.integers(1, 10**6), min_size=1, max_size=4, unique=True).map(sorted)


def disable_clients(monkeypatch: Any) -> None:
    """Disable the clients of all services, which take seconds to start, for tests of every sink."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(ClientSink, "check_enabled", lambda *service: False)


def run_info(folder: Path, strategy: str = "only", described: list[str] = (), **fields: Any) -> RunInfo:  # type: ignore[assignment]
    infos = {name: MetricInfo(name.partition("/")[2], "formula", "range", "reading") for name in described}
    model, config = fields.pop("model", nn.Linear(1, 1)), fields.pop("config", None)
    task = TrainingTask(model, None, range(1), None, config=config)  # type: ignore[arg-type]
    settings = {"experiment": "exp", "task": task, "loop": "epoch", "seed": 0, "optimizer_class": SGD, **fields}
    return RunInfo(strategy=strategy, output_dir=folder, metric_infos=infos, **settings)


@dataclass(frozen=True)
class Emit:
    metrics: dict[str, Any]
    epoch: int
    point: HookPoint
    step: int

    def to(self, sink: Any) -> None:
        sink.emit(self.metrics, self.epoch, self.point, step=self.step)


@st.composite
def emits(draw: Any, names: st.SearchStrategy[str]) -> Emit:
    """Draw one emit in the form of the delivery: series at step-level points, values elsewhere."""
    point, epoch = draw(st.sampled_from(HookPoint)), draw(st.integers(0, 99))
    if point not in STEP_POINTS:
        return Emit(draw(st.dictionaries(names, VALUES, max_size=4)), epoch, point, draw(st.integers(0, 999)))
    choices = draw(st.lists(STEPS, min_size=1, max_size=2))
    metrics = {}
    for name in draw(st.lists(names, min_size=1, max_size=4, unique=True)):
        steps = draw(st.sampled_from(choices))
        metrics[name] = Series(steps, draw(st.lists(VALUES, min_size=len(steps), max_size=len(steps))))
    return Emit(metrics, epoch, point, max(series.steps[-1] for series in metrics.values()))


@st.composite
def series_in_step(draw: Any, names: st.SearchStrategy[str]) -> dict[str, Series]:
    """Draw series of numbers with equal steps, the typical form of a flush."""
    steps = draw(STEPS)
    values = st.lists(NUMBERS, min_size=len(steps), max_size=len(steps))
    return {name: Series(list(steps), draw(values)) for name in draw(st.lists(names, min_size=1, max_size=6))}


def exact(value: Any) -> Any:
    """Convert values so that equality distinguishes types and NaN equals itself."""
    if isinstance(value, Series):
        return ("series", tuple(value.steps), exact(value.values))
    if isinstance(value, dict):
        return {key: exact(item) for key, item in value.items()}
    if isinstance(value, list):
        return [exact(item) for item in value]
    return (type(value).__name__, repr(value))
