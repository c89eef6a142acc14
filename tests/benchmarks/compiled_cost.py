"""Cost of taps in graphs of torch.compile: steps with hooks that are never or always due, against bare ones."""

import multiprocessing
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import loopscope
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.benchmarks.compiled_taps import BACKEND, CADENCES, Block, EverySite
from tests.benchmarks.real_models import GPT
from tests.benchmarks.rows import TIMES, Effort, Row
from tests.benchmarks.timing import clock, ratio


class Sized(NamedTuple):
    """A model, its batch, the steps of a block and the number of blocks, and the bars of both cadences."""

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    steps: int
    blocks: int
    bars: tuple[float, float]


def tiny() -> nn.Module:
    """Return a model of 20 modules besides itself."""
    return nn.Sequential(nn.Linear(8, 32), Block(), Block(), Block(), nn.Linear(32, 5))


def gpt() -> nn.Module:
    """Return a GPT of 4 blocks of width 512."""
    return GPT(2048, 4, 512, 8, 64)


SIZES: Mapping[str, Sized] = {
    "20 modules": Sized(tiny, lambda: (torch.randn(16, 8), torch.randint(5, (16,))), 20, 200, (1.2, 1.5)),
    "GPT of 4 × 512": Sized(gpt, lambda: (torch.randint(2048, (4, 64)),) * 2, 1, 120, (1.02, 1.05)),
}


def compiled_steps(effort: Effort) -> Iterator[Row]:
    """Compare steps of compiled models whose every module has a tap on its output and one on its gradient."""
    for name, size in SIZES.items() if effort.share > 0 else [("20 modules", SIZES["20 modules"])]:
        backend = BACKEND if effort.share > 0 else "eager"
        bare, *others = in_turns(size, (None, CADENCES["never"], 1), backend, effort.times(size.blocks))
        against = f"a bare compiled step, {name}, {median(bare) * 1e3:.2f} ms"
        for kind, seconds, bar in zip(("never due", "due at every step"), others, size.bars, strict=True):
            yield Row(f"Taps in a compiled graph, {kind}, {name}", against, TIMES, ratio(seconds, bare), bar)


def in_turns(size: Sized, cadences: Sequence[int | None], backend: str, blocks: int) -> list[list[float]]:
    """Return the seconds per step of every block, from one process for each cadence, which take turns.

    In one process the bare training would call what attach adds to torch, too.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in cadences]
    begun = zip(cadences, pipes, strict=True)
    processes = [context.Process(target=_serve, args=(size, every, backend, end)) for every, (_, end) in begun]
    seconds: list[list[float]] = [[] for _ in cadences]
    try:
        for process, (own, end) in zip(processes, pipes, strict=True):
            process.start()
            end.close()  # otherwise this process waits for a failed one
            own.recv()  # compilations run one at a time
        for turn in range(blocks):
            for index in range(len(pipes)) if turn % 2 else reversed(range(len(pipes))):
                pipes[index][0].send(size.steps)
                seconds[index].append(pipes[index][0].recv())
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
    return seconds


def _serve(size: Sized, every: int | None, backend: str, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    with ExitStack() as stack:
        step = training(size, every, stack, backend)
        pipe.send(None)
        while steps := pipe.recv():
            begin = clock()
            for _ in range(steps):
                step()
            pipe.send((clock() - begin) / steps)


def training(size: Sized, every: int | None, stack: ExitStack, backend: str) -> Callable[[], Any]:
    """Return a function that takes a step of a new compiled model, with taps if there is a cadence."""
    torch.manual_seed(0)
    model, (inputs, targets) = size.build(), size.batch()
    called = torch.compile(model, dynamic=False, fullgraph=True, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if every:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options: dict[str, Any] = {"out": folder / "run", "display": "none", "sinks": [], "digest_every": 0}
        stack.enter_context(loopscope.attach(called, optimizer, hooks=[EverySite(every)], **options))

    def step() -> None:
        functional.cross_entropy(called(inputs).flatten(0, -2), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(20):
        step()
    return step
