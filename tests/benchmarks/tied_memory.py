"""Memory costs of the hooks on a tied matrix: the peak of all tensors, in copies of the matrix."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from loopscope.engine import HookManager
from loopscope.loops import step_loop
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.rows import COPIES, Effort, Row
from tests.benchmarks.tied_cost import HOOKS, TINY, language_model, run_info
from tests.benchmarks.timing import Spread

NO_HOOKS = "no hooks"
STEPS = 4
SLACK = 0.01
LARGE = {"vocabulary": 20_000, "width": 256, "layers": 1, "context": 8, "batch_size": 2}
"""The model's sizes: a matrix of 20 MB and logits of 1.3 MB."""
MICRO_BATCHES = {"one micro-batch": 1, "two micro-batches": 2}


def extra_memory(effort: Effort) -> Iterator[Row]:
    """Compare the peak of a few steps with each hook with that of steps without it."""
    options = LARGE if effort.share > 0 else TINY
    matrix = 4 * options["vocabulary"] * options["width"]
    for what, count in MICRO_BATCHES.items():
        chosen = {**options, "accumulation_steps": count}
        against = f"the loop without it, {what}, a copy of the matrix is {matrix / 1e6:.1f} MB"
        bare = peak(NO_HOOKS, chosen)
        for label in HOOKS:
            extra = (peak(label, chosen) - bare) / matrix
            yield Row(f"Peak memory, {label}", against, COPIES, Spread.of([extra]), 1.0 + SLACK)


def peak(kind: str, options: Mapping[str, Any]) -> int:
    """Build a run, train a few steps of it, and return the most bytes of tensors that were alive at once.

    The tokens are drawn at random: no text has as many different ones.
    """

    def train() -> None:
        task, state, _ = language_model({**options, "data": data})
        task.length = STEPS
        manager = HookManager([] if kind == NO_HOOKS else [HOOKS[kind][0]()], task, state, loop="step")
        manager.start_hooks(run_info(task))
        step_loop(task, manager)
        manager.end("completed")

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "tokens.npy")
        np.save(data, np.random.default_rng(0).integers(options["vocabulary"], size=10_000))
        return peak_of_tensors(train)


def peak_of_tensors(function: Callable[[], object]) -> int:
    """Return the most bytes of tensors made in a call that were alive at once, on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text("utf-8"))["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    return max(accumulate(change for _, change in changes), default=0)
