"""The hooks of outputs in custom loops, eager and compiled."""

from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support import RecordingSink
from tests.training_hooks.outputs.output_runs import by_step, case, drawn

HOOKS = ["output_logits", "token_loss"]
OPTIONS: dict[str, dict[str, Any]] = {"output_logits": {"interval": 1}, "token_loss": {"interval": 1}}


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
        for number, batch in enumerate(scope.batches(parts), start=1):
            logits = model(batch[0].clone())
            scope.backward(functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten()) / accumulate)
            if number == accumulate:
                optimizer.step()
                optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()], sink


@pytest.mark.longer
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


@pytest.mark.compile
def test_compiled_models_are_measured_in_their_pass(tmp_path: Path) -> None:
    """No loss function is needed for a separate pass; the numbers are those of the eager model."""
    tokens, labels = drawn(4, 5), drawn(4, 5, seed=9)

    def run(compiled: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(23, 8), nn.Linear(8, 23))
        if compiled:
            model.compile(backend="aot_eager", dynamic=False)
        optimizer, sink = torch.optim.SGD(model.parameters(), lr=0.1), RecordingSink()
        folder = tmp_path / str(compiled)

        def loss(model: nn.Module, batch: Any) -> Tensor:
            return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

        with loopscope.attach(
            model, optimizer, hooks=HOOKS, hook_options=OPTIONS, out=folder, display="none", sinks=[sink]
        ) as scope:
            for batch in scope.batches([(tokens, labels)]):
                scope.backward(loss(model, batch))
                optimizer.step()
        return by_step(sink, "token_loss")[1] | by_step(sink, "output_logits")[1]

    assert run(compiled=True) == pytest.approx(run(compiled=False), rel=1e-5, abs=1e-6)
