"""The table of docs/compiled-models.md: the taps that change bits of a compiled training, and the bits of whole runs.

``python -m tests.benchmarks.compiled_taps`` prints it, in minutes: every tap is compiled alone if bits change.
"""

import sys
import tempfile
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import loopscope
import torch
from loopscope.hooks import ForwardTap, GradientTap, HookPoint, StepSchedule, Tap, TrainingHook
from torch import Tensor, nn

CADENCES = {"never": 1000, "every step": 1, "every 3rd": 3}
STEPS, BACKEND = 6, "inductor"


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.activation, self.down = nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.activation(self.up(self.norm(x)))))


class EverySite(TrainingHook):
    """Reads the inputs, the output and the gradient of every module."""

    name = "every_site"
    hook_points = frozenset({HookPoint.POST_STEP})
    metrics = "calls | calls of taps | 0, 1, 2, … | none"

    def __init__(self, every: int) -> None:
        self.calls = 0
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=every, warmup=0 if every < 1000 else 999)

    def taps(self, model: nn.Module) -> Iterable[Tap]:
        for name, module in model.named_modules():
            if name and not isinstance(module, nn.Sequential):
                yield ForwardTap(name, lambda call: self.count())
                yield GradientTap(name, "output", lambda gradient: self.count())

    def count(self) -> None:
        self.calls += 1

    def compute(self, ctx: object) -> dict[str, float]:
        return {"calls": float(self.calls)}


def train(dtype: torch.dtype, *, autocast: bool, every: int | None) -> tuple[list[Tensor], dict[str, object], int]:
    """Return the weights of a compiled training, its comparison of graphs, and the calls of taps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), Block(), Block(), nn.Linear(32, 5)).to(dtype)
    called = torch.compile(model, dynamic=False, fullgraph=True, backend=BACKEND)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    hook = EverySite(every or 1)
    folder = Path(tempfile.mkdtemp()) / "run"
    watched = (
        loopscope.attach(called, optimizer, hooks=[hook], out=folder, display="none", sinks=[], digest_every=0)
        if every
        else nullcontext()
    )
    draws = torch.Generator().manual_seed(1)
    data = [(torch.randn(16, 8, generator=draws), torch.randint(5, (16,), generator=draws)) for _ in range(STEPS)]
    with watched as scope:
        for inputs, targets in scope.batches(data) if scope else data:
            with torch.autocast("cpu", torch.float16, enabled=autocast):
                loss = nn.functional.cross_entropy(called(inputs.to(dtype)).float(), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        graphs = scope._attached.manager.taps.graphs if scope else {}
    return [item.detach().clone() for item in model.parameters()], graphs, hook.calls


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    sys.stdout.write(
        "| dtype | taps that change bits | weights: never due | every step | every 3rd |\n" + "|---" * 5 + "|\n"
    )
    for name, dtype, autocast in (
        ("float32", torch.float32, False),
        ("bfloat16", torch.bfloat16, False),
        ("float16 autocast", torch.float32, True),
    ):
        bare = train(dtype, autocast=autocast, every=None)[0]
        cells, changed = [], ""
        for every in CADENCES.values():
            weights, graphs, calls = train(dtype, autocast=autocast, every=every)
            same = all(map(torch.equal, bare, weights))
            cells.append(f"{'equal' if same else 'differ'} ({calls} calls)")
            changed = ", ".join(graphs["changed_by"]) or "none"
        sys.stdout.write(f"| {name} | {changed} | {' | '.join(cells)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
