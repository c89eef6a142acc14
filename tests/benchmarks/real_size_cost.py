"""Cost of groups of hooks on a GPT of 14.8 million parameters: own CPU time, first step, close and peak memory.

``python -m tests.benchmarks.real_size_cost GROUP`` trains a few steps in a fresh process, and prints its peak memory.
"""

import resource
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from inspect import signature
from pathlib import Path
from typing import Any

import loopscope
import torch
from loopscope.hooks import HookRegistry, hook_groups
from torch import Tensor, nn
from torch.nn import functional

from tests.benchmarks.rows import SECONDS, TIMES, Effort, Row
from tests.benchmarks.timing import Spread, clock

VOCABULARY, LAYERS, WIDTH, HEADS, ROWS, CONTEXT = 4096, 4, 512, 8, 8, 128
TINY = {"vocabulary": 32, "layers": 1, "width": 16}
DUE = 4
"""Interval of hooks in the measurement; ordinary and due steps are weighted as with intervals of ``PERIOD``."""
PERIOD = 50
BARS = {"health": (1.03, 1.15), "observers": (1.10, 1.3)}
"""By group, the most CPU time of a step and the most peak memory, in multiples of the bare loop."""


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(rows, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(self.act(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A decoder with tied embeddings."""

    def __init__(self, vocabulary: int = VOCABULARY, layers: int = LAYERS, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.blocks, self.norm = nn.ModuleList(Block(width) for _ in range(layers)), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss of the next tokens."""
    return functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Training:
    """A training whose steps are timed one by one; without a group it is the bare loop."""

    def __init__(self, group: str, options: dict[str, int], stack: ExitStack, *, interval: int | None = None) -> None:
        torch.manual_seed(0)
        self._model = GPT(**options)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-4)
        self._tokens = torch.randint(options.get("vocabulary", VOCABULARY), (ROWS, CONTEXT))
        self.seconds: list[float] = []
        self._scope = None
        if group != "bare":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            self._scope = loopscope.attach(
                self._model,
                self._optimizer,
                with_hooks=group,
                loss=loss_of,
                loop="step",
                hook_options=intervals(group, interval) if interval else {},
                out=Path(folder) / "run",
                display="none",
            )
            self._batches = iter(self._scope.batches(self._tokens for _ in range(10**6)))

    def step(self) -> None:
        """Train one step and keep its CPU time."""
        begin = clock()
        if self._scope is None:
            loss_of(self._model, self._tokens).backward()
        else:
            self._scope.backward(loss_of(self._model, next(self._batches)))
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.seconds.append(clock() - begin)

    def close(self) -> float:
        """End the training and return the CPU time of its end."""
        begin = clock()
        if self._scope is not None:
            self._scope.close()
        return clock() - begin


def intervals(group: str, interval: int) -> dict[str, dict[str, Any]]:
    """Return options that set the interval of every hook of a group that has one."""
    options: dict[str, dict[str, Any]] = {}
    for name in hook_groups()[group]:
        if "interval" in signature(HookRegistry.get(name)).parameters:
            options[name] = {"interval": interval}
    return options


def real_size(effort: Effort) -> Iterator[Row]:
    """Compare the steps of a group with those of the bare loop, trained in turn; memory in fresh processes."""
    options = {} if effort.share > 0 else TINY
    memory = peak_memory("bare", options)
    for group, (time_bar, memory_bar) in BARS.items():
        with ExitStack() as stack, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bare, ours = Training("bare", options, stack), Training(group, options, stack, interval=DUE)
            rounds = 5 if effort.share > 0 else 1
            for _ in range(1 + rounds * DUE):
                bare.step()
                ours.step()
            end = ours.close()
        parts = [slice(1 + index * DUE, 1 + (index + 1) * DUE) for index in range(rounds)]
        costs = [cost(ours.seconds[part], statistics.median(bare.seconds[part])) for part in parts]
        against = f"bare step of a GPT of 4 x 512, {statistics.median(bare.seconds):.2f} s"
        yield Row(f"{group}, own CPU time", against, TIMES, Spread.of(costs), time_bar)
        yield Row(
            f"{group}, first step", "bare first step", SECONDS, Spread.of([ours.seconds[0] - bare.seconds[0]]), 1.0
        )
        yield Row(f"{group}, close", "nothing", SECONDS, Spread.of([end]), 1.0)
        peak = peak_memory(group, options) / memory
        yield Row(f"{group}, peak memory", f"bare loop, {memory / 1e6:.0f} MB", TIMES, Spread.of([peak]), memory_bar)


def cost(seconds: list[float], bare: float) -> float:
    """Return the mean step as a multiple of the bare one, if one step in ``PERIOD`` is due; the last of each is."""
    *ordinary, due = seconds
    mean = (statistics.median(ordinary) * (PERIOD - 1) + due) / PERIOD
    return mean / bare


def peak_memory(group: str, options: dict[str, int]) -> float:
    """Return the peak resident memory, in bytes, of a fresh process that trains a few steps."""
    words = [str(value) for value in options.values()]
    command = [sys.executable, "-m", "tests.benchmarks.real_size_cost", group, *words]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main(group: str, *sizes: str) -> None:
    """Train a few steps of a group and print the peak memory of the process."""
    torch.set_num_threads(1)
    options = dict(zip(TINY, map(int, sizes), strict=False))
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = Training(group, options, stack)
        for _ in range(3):
            training.step()
        training.close()
    sys.stdout.write(f"\n{1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
