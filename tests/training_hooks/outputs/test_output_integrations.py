"""The hooks of outputs and experts in custom loops and in Hugging Face's Trainer."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.framework.integrations.hf_trainers import ROWS, InOrder, attached, same, traced, trainer
from tests.support import RecordingSink
from tests.training_hooks.outputs.output_runs import case, drawn

HOOKS = ["output_logits", "token_loss"]
OPTIONS: dict[str, dict[str, Any]] = {"output_logits": {"interval": 1}, "token_loss": {"interval": 1}}


def by_step(sink: RecordingSink, hook: str) -> dict[int, dict[str, Any]]:
    metrics: dict[int, dict[str, Any]] = {}
    for name, _, step, value in sink.rows(hook + "/"):
        metrics.setdefault(step, {})[name.removeprefix(hook + "/")] = value
    return metrics


class Copies:
    """Moves batches to another tensor, as ``to(device)`` does, and yields them in parts."""

    def __init__(self, *batches: tuple[Tensor, Tensor]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def attached_run(folder: Path, accumulate: int, hooks: list[str]) -> tuple[list[Tensor], RecordingSink]:
    """Train a tagger for one step, with the targets only in the loop, and return its weights and metrics."""
    model, _, (tokens, labels) = case("lstm")
    optimizer, sink = torch.optim.AdamW(model.parameters(), lr=1e-2), RecordingSink()
    parts = list(zip(tokens.chunk(accumulate), labels.chunk(accumulate), strict=True))
    chosen = {name: OPTIONS[name] for name in hooks}
    with loopscope.attach(
        model, optimizer, hooks=hooks, hook_options=chosen, out=folder, accumulate=accumulate, display="none",
        sinks=[sink], audit=True,
    ) as scope:  # fmt: skip
        for batch in scope.batches(Copies(*parts)):
            logits = model(batch[0].clone())
            scope.backward(functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten()) / accumulate)
            if len(scope._loop._losses) == 0 or scope._loop._is_complete:
                optimizer.step()
                optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()], sink


@pytest.mark.parametrize("accumulate", [1, 3])
def test_custom_loops_with_micro_batches(tmp_path: Path, accumulate: int) -> None:
    """Targets that only the loop uses are found in its batches, micro-batch by micro-batch."""
    weights, sink = attached_run(tmp_path / "hooked", accumulate, HOOKS)
    bare, _ = attached_run(tmp_path / "bare", accumulate, [])
    assert all(torch.equal(a, b) for a, b in zip(weights, bare, strict=True))
    model, _, (tokens, labels) = case("lstm")
    expected = functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).item()
    losses, logits = by_step(sink, "token_loss")[1], by_step(sink, "output_logits")[1]
    assert losses["mean"] == pytest.approx(expected, rel=1e-5)
    assert logits["log_z_mean"] == pytest.approx(model(tokens).logsumexp(-1)[labels >= 0].mean().item(), rel=1e-5)


@pytest.mark.trainer
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "bf16": True}], ids=["plain", "bf16, 2"])
def test_trainer_of_hugging_face_is_measured_unchanged(tmp_path: Path, options: dict[str, Any]) -> None:
    """The traces are equal at every step.

    The Trainer divides the sum of the token losses by the labels, 12 in two rows of 6, of which 10 are predicted.
    """
    hooks = [loopscope.HookRegistry.get(name)(interval=1) for name in HOOKS]
    assert same(traced(tmp_path / "a", hooks, **options), traced(tmp_path / "b", **options))
    made, sink = trainer(tmp_path / "c", dropout=0.0, kind=InOrder, **options), RecordingSink()
    attached(made, [loopscope.HookRegistry.get(name)(interval=1) for name in HOOKS], sinks=[sink])
    made.train()
    losses = by_step(sink, "token_loss")
    assert len(losses) == (8 if options else ROWS)
    for metrics in losses.values():
        step_loss = metrics["mean"] + metrics["unexplained"]
        assert step_loss == pytest.approx(metrics["mean"] * 10 / 12, rel=2e-3 if options else 1e-5)
    assert all(metrics["tokens"] % 10 == 0 for metrics in losses.values())  # two rows of five predicted tokens
    assert all(math.isfinite(metrics["calibration_error"]) for metrics in by_step(sink, "output_logits").values())


@pytest.mark.trainer
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_label_smoothing_of_the_trainer_is_unexplained(tmp_path: Path) -> None:
    """The Trainer takes the labels from the model's arguments; they are found in the batch, and shifted."""
    made, sink = trainer(tmp_path, dropout=0.0, kind=InOrder, label_smoothing_factor=0.2), RecordingSink()
    attached(made, [loopscope.HookRegistry.get("token_loss")(interval=1)], sinks=[sink])
    made.train()
    first = by_step(sink, "token_loss")[1]
    assert first["tokens"] == 10
    smoothed = first["mean"] + first["unexplained"]  # divided by 12 labels, of which 10 are predicted
    assert smoothed * 12 / 10 == pytest.approx(first["mean"], rel=0.1)
    assert smoothed * 12 / 10 != pytest.approx(first["mean"], rel=1e-4)


@pytest.mark.compile
def test_compiled_models_are_measured_in_an_eager_pass(tmp_path: Path) -> None:
    """Taps do not enter the graphs; the numbers are those of the eager model."""
    tokens, labels = drawn(4, 5), drawn(4, 5, seed=9)

    def run(compiled: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(23, 8), nn.Linear(8, 23))
        if compiled:
            model.compile(backend="eager", dynamic=False)
        optimizer, sink = torch.optim.SGD(model.parameters(), lr=0.1), RecordingSink()
        folder = tmp_path / str(compiled)

        def loss(model: nn.Module, batch: Any) -> Tensor:
            return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

        with loopscope.attach(
            model, optimizer, hooks=HOOKS, hook_options=OPTIONS, out=folder, display="none", sinks=[sink], loss=loss
        ) as scope:
            for batch in scope.batches([(tokens, labels)]):
                scope.backward(loss(model, batch))
                optimizer.step()
        return by_step(sink, "token_loss")[1] | by_step(sink, "output_logits")[1]

    assert run(compiled=True) == pytest.approx(run(compiled=False), rel=1e-5, abs=1e-6)
