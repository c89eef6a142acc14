"""Optimizers, losses and steps that torch compiles: hooks observe them without a change of their graphs and bits."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.errors import RunNotice
from torch import Tensor, nn


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace", "ignore::DeprecationWarning")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_steps_are_observed_or_refused_by_torch(tmp_path: Path, fullgraph: bool) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-2))
    step = torch.compile(lambda: optimizer.step(), fullgraph=fullgraph, backend="eager")
    scope = loopscope.attach(model, optimizer, hooks=["norms"], out=tmp_path / "run", display="none")
    steps = 0
    with scope:
        for batch in scope.batches([torch.ones(2, 4)] * 3):
            scope.backward(model(batch).square().mean())
            if fullgraph:
                with pytest.raises(torch._dynamo.exc.Unsupported):
                    step()
                optimizer.step()
            else:
                step()
            optimizer.zero_grad()
            steps += 1
        assert scope._attached.manager.state.loop.step == steps == 3


DATA = [(torch.randn(8, 4, generator=torch.Generator().manual_seed(step)), torch.arange(8) % 3) for step in range(4)]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(compiled: str, **options: Any) -> tuple[list[list[float]], int]:
    """Train with one compiled function, and return the weights and the number of broken graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scope = loopscope.attach(model, optimizer, display="none", **options) if options else None

    def step(batch: Any) -> None:
        loss = compute(batch)
        optimizer.zero_grad()
        scope.backward(loss) if scope else loss.backward()
        update()

    functions: dict[str, Callable[..., Any]] = {"loss": lambda batch: loss_of(model, batch), "update": optimizer.step}
    functions |= {"step": step}
    functions[compiled] = torch.compile(functions[compiled], backend="aot_eager")
    compute, update = functions["loss"], functions["update"]
    for batch in scope.batches(DATA) if scope else DATA:
        functions["step"](batch)
    if scope:
        scope.close()
    return [item.tolist() for item in model.parameters()], sum(torch._dynamo.utils.counters["graph_break"].values())


bare_training = cache(train)
"""The same training for every group of hooks."""


@pytest.mark.some_rows(3)
@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("group", ["health", "observers"])
@pytest.mark.parametrize("compiled", ["loss", "update", "step"])
def test_hooks_keep_bits_of_compiled_functions(tmp_path: Path, compiled: str, group: str) -> None:
    """Taps break no graph of a compiled loss."""
    bare, breaks = bare_training(compiled)
    weights, breaks_with_hooks = train(compiled, with_hooks=group, out=tmp_path / "run")
    assert weights == bare
    assert compiled != "loss" or breaks_with_hooks == breaks == 0


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@torch._dynamo.config.patch(compiled_autograd=True)
def test_compiled_autograd_of_compiled_steps_is_read(tmp_path: Path) -> None:
    """The backward pass is called in a compiled function, and is compiled by the configuration of torch."""
    bare, _ = train("step")
    captures = torch._dynamo.utils.counters["compiled_autograd"]["captures"]
    weights, _ = train("step", hooks=["activations"], out=tmp_path / "run")
    assert weights == bare
    assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] == captures > 0
    assert '"activations/' in (tmp_path / "run" / "run.jsonl").read_text()


@pytest.mark.compile
def test_compiled_functions_need_no_loss_function(tmp_path: Path) -> None:
    """Taps receive the values of the training's pass, without a break of its graph."""
    weights, breaks = train("loss", hooks=["activations"], out=tmp_path / "run")
    assert (weights, breaks) == bare_training("loss")
    assert '"activations/' in (tmp_path / "run" / "run.jsonl").read_text()


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore::loopscope.errors.RunNotice", "ignore::DeprecationWarning")
def test_other_compiled_code_hides_no_modules(tmp_path: Path) -> None:
    """A process has compiled another function; the tapped layers of the run are never called, the model is."""

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = nn.functional.linear(x, layer.weight, layer.bias)
            return x

    other = torch.compile(lambda x: x.sin() + 1, backend="eager")
    assert float(other(torch.zeros(2)).sum()) == 2.0
    model = Functional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options: dict[str, Any] = {"gradient_flow": {"interval": 1, "pattern": "layers.*"}}
    with loopscope.attach(
        model, optimizer, hooks=["gradient_flow"], hook_options=options, out=tmp_path / "run", display="none"
    ) as scope:
        for x in scope.batches([torch.randn(3, 4) for _ in range(3)]):
            scope.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert other(torch.zeros(2)).sum() == 2.0
    assert "gradient_flow" not in scope._attached.manager.hooks.failures.left_out
    assert not model._forward_pre_hooks


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_functions_compiled_before_attach_are_reported(tmp_path: Path) -> None:
    """The warm function calls no tap: the named hook is left out, and the training continues."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    compute = torch.compile(lambda batch: loss_of(model, batch), backend="aot_eager")
    compute(DATA[0]).backward()
    optimizer.zero_grad()
    with loopscope.attach(model, optimizer, out=tmp_path / "run", hooks=["activations"], display="none") as scope:
        for step, batch in enumerate(scope.batches(DATA)):
            with (
                pytest.warns(RunNotice, match=r"compiled before the hooks started.*torch\.compiler\.reset")
                if step == 1
                else nullcontext()
            ):
                scope.backward(compute(batch))
            optimizer.step()
            optimizer.zero_grad()
        assert scope._attached.manager.state.loop.step == len(DATA)
    assert "activations" in json.loads((tmp_path / "run" / "summary.json").read_text())["hooks_left_out"]


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_reset_compiler_includes_taps_in_warm_functions(tmp_path: Path) -> None:
    """The remedy that the notice names, for scripts that cannot attach before their first compiled step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    compute = torch.compile(lambda batch: loss_of(model, batch), backend="aot_eager")
    compute(DATA[0]).backward()
    optimizer.zero_grad()
    torch.compiler.reset()
    with loopscope.attach(model, optimizer, out=tmp_path / "run", hooks=["activations"], display="none") as scope:
        for batch in scope.batches(DATA):
            scope.backward(compute(batch))
            optimizer.step()
            optimizer.zero_grad()
    assert not json.loads((tmp_path / "run" / "summary.json").read_text())["hooks_left_out"]
    assert '"activations/' in (tmp_path / "run" / "run.jsonl").read_text()
