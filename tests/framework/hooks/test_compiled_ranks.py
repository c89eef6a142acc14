"""Compiled models and blocks on two ranks: hooks read the pass and keep the bits of every step."""

import json
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
import torch.distributed as distributed
from loopscope.hooks import ForwardTap, GradientTap, HookPoint, Tap
from loopscope.state.digest import digest
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support import SpyHook
from tests.support.ranks import on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.compile]
STEPS = 4
KINDS = ("DDP of blocks", "compiled DDP", "DDP of a compiled model", "FSDP2 of blocks")


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Reader(SpyHook):
    """Counts the calls of taps by module, and reports the sums of what they read."""

    name = "reader"
    hook_points = frozenset({HookPoint.POST_STEP})

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def taps(self, model: nn.Module) -> Iterable[Tap]:
        for name, module in model.named_modules():
            if isinstance(module, (nn.Linear, nn.LayerNorm)):
                yield ForwardTap(name, lambda call, name=name: self._count(name))
                yield GradientTap(name, "output", lambda gradient, name=name: self._count(name))

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1


def careless(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Compile a graph on the second rank to one with other last bits if a LayerNorm is tapped."""
    is_tapped = distributed.get_rank() == 1 and any("norm (LayerNorm)" in node.args for node in graph.graph.nodes)
    return lambda *values: tuple(item * (1 + 1e-6) if is_tapped else item for item in graph(*values))


def train(kind: str, folder: Path | None, hooks: list[Any], backend: Any = "aot_eager") -> list[list[int]]:
    """Return the digests of the parameters of this rank after every step, and the number of graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model: Any = Net()
    for block in model.blocks if kind.endswith("blocks") else ():
        block.compile(backend=backend)
        if kind.startswith("FSDP2"):
            fully_shard(block)
    if kind.startswith("FSDP2"):
        trained: Any = fully_shard(model)
    else:
        inner: Any = torch.compile(model, backend=backend) if kind == "DDP of a compiled model" else model
        is_large = kind in ("split DDP", "whole DDP")
        if is_large:
            distributed._DEFAULT_FIRST_BUCKET_BYTES = 512  # by default, graphs with a megabyte of weights are split
            torch._dynamo.config.optimize_ddp = kind == "split DDP"
        trained = DistributedDataParallel(inner, bucket_cap_mb=1e-3 if is_large else None)
        trained = torch.compile(trained, backend=backend) if is_large or kind == "compiled DDP" else trained
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(1 + distributed.get_rank())
    data = [(torch.randn(4, 8), torch.arange(4) % 3) for _ in range(STEPS)]
    options: dict[str, Any] = {"out": folder, "display": "none"}
    states = []
    with loopscope.attach(trained, optimizer, hooks=hooks, **options) if folder else nullcontext() as scope:
        for inputs, targets in scope.batches(data) if scope else data:
            nn.functional.cross_entropy(trained(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            local = [item.to_local() if hasattr(item, "to_local") else item for item in model.parameters()]
            states.append([digest(item.detach()) for item in local])
    return [*states, [torch._dynamo.utils.counters["stats"]["unique_graphs"]]]


def compared() -> tuple[bool, dict[str, int]]:
    """Return whether hooks keep the bits of every step, and the calls of taps."""
    kind, backend = os.environ["KIND"].split(":")
    reader, folder = Reader(), Path(os.environ["OUT"])
    states = train(kind, folder, [reader, "activations", "gradient_flow"], backend)
    return states == train(kind, None, [], backend), reader.calls


@pytest.mark.slow_rows(*(f"aot_eager-{kind}" for kind in KINDS[1:]), *(f"inductor-{kind}" for kind in KINDS))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_models_on_ranks_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, kind: str
) -> None:
    """Every module twice per step, on its output and the gradient of it."""
    monkeypatch.setenv("OUT", str(tmp_path / "run"))
    monkeypatch.setenv("KIND", f"{kind}:{backend}")
    for is_neutral, calls in on_two_ranks(compared, tmp_path):
        assert is_neutral
        assert [*calls.values()] == [2 * STEPS] * 7
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["compiled_graphs"]["compared"] > 0
    assert not summary["hooks_left_out"]
    assert '"activations/' in (tmp_path / "run/run.jsonl").read_text()


class HeadReader(Reader):
    """Reads no LayerNorm."""

    name = "head_reader"

    def taps(self, model: nn.Module) -> Iterable[Tap]:
        return [tap for tap in super().taps(model) if tap.target == "blocks.0.up"]


@pytest.mark.slow
def test_split_graphs_of_replicas_have_no_taps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are kept; the next test has the remedy of the notice."""
    monkeypatch.setenv("OUT", str(tmp_path / "run"))
    monkeypatch.setenv("KIND", "split DDP:aot_eager")
    for is_neutral, calls in on_two_ranks(compared, tmp_path):
        assert is_neutral
        assert calls == {}
    changed = json.loads((tmp_path / "run/summary.json").read_text())["compiled_graphs"]["changed_by"]
    assert {*changed} == {"* (Block)", "norm (LayerNorm)", "up (Linear)", "down (Linear)", "head (Linear)"}


@pytest.mark.slow
def test_unsplit_graphs_of_replicas_have_taps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy of the notice, ``optimize_ddp = False``, for a model whose graph would be split."""
    monkeypatch.setenv("OUT", str(tmp_path / "run"))
    monkeypatch.setenv("KIND", "whole DDP:aot_eager")
    for is_neutral, calls in on_two_ranks(compared, tmp_path):
        assert is_neutral
        assert [*calls.values()] == [2 * STEPS] * 7


def disputed() -> tuple[bool, dict[str, int], dict[str, int]]:
    """Return whether hooks keep the bits, and the calls of taps on disputed modules and on others."""
    reader, other, folder = Reader(), HeadReader(), Path(os.environ["OUT"])
    states = train("DDP of blocks", folder, [reader, other], careless)
    return states == train("DDP of blocks", None, [], careless), reader.calls, other.calls


@pytest.mark.slow
def test_hooks_on_sites_that_ranks_dispute_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks leave out the hook whose values would come from one rank, and keep the other hook and the bits."""
    monkeypatch.setenv("OUT", str(tmp_path / "run"))
    for is_neutral, calls, others in on_two_ranks(disputed, tmp_path):
        assert is_neutral
        assert max(calls.values()) == 2
        assert others == {"blocks.0.up": 2 * STEPS}
    left_out = json.loads((tmp_path / "run/summary.json").read_text())["hooks_left_out"]
    assert left_out.keys() == {"reader"}
    assert "norm (LayerNorm)" in left_out["reader"]
