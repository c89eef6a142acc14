"""Taps in graphs of torch.compile: their values, the bits of the training, and the comparison of graphs."""

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.hooks import AttentionTap, ForwardTap, GradientTap, HookPoint, StepSchedule, Tap
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from tests.support import SpyHook

pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf", "ignore:.torch.jit:DeprecationWarning"
    ),
]
DATA = [(torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(step)), torch.arange(4) % 3) for step in range(4)]


class Block(nn.Module):
    """A residual block with attention, whose ReLU works in place, and which may be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.mix(self.norm(x)).view(-1, 3, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return x + self.relu(self.out(mixed.transpose(1, 2).reshape(x.shape)))


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.blocks, self.head, self.recomputes = nn.ModuleList([Block(), Block()]), nn.Linear(8, 3), recomputes

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x.mean(1))


class Mean(nn.Module):
    """Averages tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Reader(SpyHook):
    """Keeps what taps of every kind read."""

    name = "reader"
    hook_points = frozenset({HookPoint.POST_STEP})

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.values: dict[str, list[Tensor]] = {}
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=every)

    def taps(self, model: nn.Module) -> Iterable[Tap]:
        for name, module in model.named_modules():
            if isinstance(module, (nn.Linear, nn.LayerNorm, nn.ReLU)):
                yield ForwardTap(name, lambda call, name=name: self._keep(f"{name} output", call.output))
                yield GradientTap(name, "input", lambda value, name=name: self._keep(f"{name} input", value))
                yield GradientTap(name, "output", lambda value, name=name: self._keep(f"{name} gradient", value))
            if isinstance(module, nn.Linear):
                yield GradientTap(name, "weight", lambda value, name=name: self._keep(f"{name} weight", value))
            if isinstance(module, Block):
                yield AttentionTap(name, lambda call, name=name: self._keep(f"{name} query", call.query))

    def _keep(self, name: str, value: Tensor) -> None:
        self.values.setdefault(name, []).append(value.clone())


def train(
    folder: Path | None, place: str, reader: Reader | None = None, *, recomputes: bool = False, **options: Any
) -> list[Tensor]:
    """Train the model, a container, the blocks or a function compiled, and return the weights.

    Only functions and blocks need ``scope.batches``.
    """
    torch._dynamo.reset()
    counters.clear()
    kind: dict[str, Any] = {"backend": options.pop("backend", "aot_eager"), "fullgraph": True}
    kind["dynamic"], data = options.pop("dynamic", None), options.pop("data", DATA)
    stack = ExitStack()
    if options.pop("compiles_autograd", False):
        compiler = torch.compile(backend=kind["backend"])
        stack.enter_context(torch._dynamo.compiled_autograd._enable(compiler))
    torch.manual_seed(0)
    container = nn.Sequential(nn.Linear(8, 8), Block(), Mean(), nn.Linear(8, 3))
    model: Any = container if place == "container" else Net(recomputes=recomputes)
    called: Callable[[Tensor], Tensor] = torch.compile(model, **kind) if place == "model" else model
    for part in {"blocks": getattr(model, "blocks", ()), "container": [container]}.get(place, ()):
        part.compile(**kind)

    def compute(inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(called(inputs), targets)

    function = torch.compile(compute, **kind) if place == "function" else compute
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    settings = {"out": folder, "display": "none", "sinks": [], **options}
    watched = nullcontext() if reader is None else loopscope.attach(called, optimizer, hooks=[reader], **settings)
    with stack, watched as scope:
        for inputs, targets in scope.batches(data) if scope and place != "container" else data:
            function(inputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [*model.parameters()]


def equal(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, actual, expected))


PLACES = [("model", 3), ("blocks", 1), ("function", 2), ("container", 1)]


@pytest.mark.guarantee("every-training-mode")
@pytest.mark.slow_rows("blocks-1", "function-2", "container-1")
@pytest.mark.parametrize(("place", "every"), PLACES)
def test_taps_read_compiled_passes_and_keep_bits(tmp_path: Path, place: str, every: int) -> None:
    """Values equal those of taps in the eager pass; no graph breaks, and their number is that without hooks."""
    bare, graphs = train(None, place), counters["stats"]["unique_graphs"]
    reader, eager = Reader(every), Reader(every)
    assert equal(train(tmp_path / "compiled", place, reader), bare)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    with torch.compiler.set_stance("force_eager"):
        train(tmp_path / "eager", place, eager)
    assert reader.values.keys() == eager.values.keys()
    for name, values in reader.values.items():
        assert len(values) == len(eager.values[name]) == -(-len(DATA) // every), name
        torch.testing.assert_close(values, eager.values[name])


@pytest.mark.slow
@pytest.mark.parametrize("place", ["model", "blocks"])
def test_recomputation_of_compiled_blocks_counts_once(tmp_path: Path, place: str) -> None:
    """Within a graph the compiler does not repeat the taps; a block that is a graph runs again in the backward pass."""
    reader = Reader()
    assert equal(train(tmp_path / "run", place, reader, recomputes=True), train(None, place, recomputes=True))
    assert {len(values) for values in reader.values.values()} == {len(DATA)}


def careless(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Compile a graph to one with other last bits if a LayerNorm is tapped."""
    is_tapped = any("norm (LayerNorm)" in node.args for node in graph.graph.nodes)
    return lambda *values: tuple(item * (1 + 1e-6) if is_tapped else item for item in graph(*values))


@pytest.mark.some_rows(2)
@pytest.mark.parametrize("mode", ["safe", "all"])
def test_taps_that_change_bits_are_named(tmp_path: Path, mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    """They are left out, or the run is listed as treated."""
    bare, reader = train(None, "model", backend=careless), Reader()
    weights = train(tmp_path / "run", "model", reader, backend=careless, compiled=mode)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["compiled_graphs"] == {"compared": 1, "changed_by": ["norm (LayerNorm)"], "kept": mode == "all"}
    assert ("blocks.0.norm output" in reader.values) == bool(summary["treatments"]) == (mode == "all")
    assert "blocks.0.mix output" in reader.values
    assert equal(weights, bare) == (mode == "safe")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["model", "blocks", "function"])
def test_one_graph_for_all_shapes_is_read(tmp_path: Path, place: str) -> None:
    """With ``dynamic=True``, batches of other sizes compile nothing."""
    options: dict[str, Any] = {"dynamic": True, "data": [(x[:rows], y[:rows]) for rows, (x, y) in enumerate(DATA, 2)]}
    bare, graphs, reader = train(None, place, **options), counters["stats"]["unique_graphs"], Reader()
    assert equal(train(tmp_path / "run", place, reader, **options), bare)
    assert counters["stats"]["unique_graphs"] == graphs
    assert {len(values) for values in reader.values.values()} == {len(DATA)}
    assert [len(value) for value in reader.values["head output"]] == [2, 3, 4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["model", "blocks", "function"])
def test_compiled_autograd_keeps_bits_and_is_read(tmp_path: Path, place: str) -> None:
    bare, reader = train(None, place, compiles_autograd=True), Reader()
    captures = dict(counters["compiled_autograd"])
    assert equal(train(tmp_path / "run", place, reader, compiles_autograd=True), bare)
    assert dict(counters["compiled_autograd"]) == captures
    assert captures["captures"] > 0
    assert {len(values) for values in reader.values.values()} == {len(DATA)}


@pytest.mark.slow
@pytest.mark.parametrize(("place", "every"), PLACES)
def test_inductor_trains_with_the_same_bits(tmp_path: Path, place: str, every: int) -> None:
    bare, graphs, reader = train(None, place, backend="inductor"), counters["stats"]["unique_graphs"], Reader(every)
    assert equal(train(tmp_path / "run", place, reader, backend="inductor"), bare)
    assert counters["stats"]["unique_graphs"] == graphs
    assert len({len(values) for values in reader.values.values()}) == 1
