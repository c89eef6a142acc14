"""Costs of casts to narrow formats on two cores, compiled and not, against reading and writing the same bytes."""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from loopscope.lowbit.casts import Cast, kernels
from loopscope.lowbit.casts.casts import COMPILER
from loopscope.lowbit.casts.compiled import SWITCH

from tests.benchmarks.rows import SECONDS, TIMES, Effort, Row
from tests.benchmarks.timing import Spread, Turns, ratio

ROOT = Path(__file__).parents[2]
ELEMENTS = 2**24
THREADS = 2
RULES = ("block", "tensor", "nvfp4", "mx_floor")
KEPT_IN_THE_PROCESS = 2**30
"""Size in bytes up to which freed memory stays with the process, so that the next tensor needs no new pages."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Constants of glibc's ``mallopt``."""
PASS, GIVEN, COMPUTED, COUNTED, COMPILED, EAGER, STOCHASTIC, EAGER_STOCHASTIC = range(8)
"""Indices of the timed functions."""

Measured = dict[str, Any]


def casts(effort: Effort) -> Iterator[Row]:
    """Compare casts to e2m1 with a plain pass, with the uncompiled composition, and with counting."""
    small = effort.share <= 0
    options = {"elements": 2**16 if small else ELEMENTS, "rules": RULES[: 1 if small else None]}
    measured = _in_a_process({**options, "rounds": effort.times(30), "slow_rounds": effort.times(4)})
    for rule, blocks in measured["seconds"].items():
        yield from _rows(rule, blocks, options["elements"])
    compiling = Spread.of(measured["compiling"])
    yield Row("Compiling one cast, counted and not", "the first compilation, import included", SECONDS, compiling)


def _rows(rule: str, blocks: list[list[float]], elements: int) -> Iterator[Row]:
    plain = f"torch.mul of {elements / 1e6:.1f}M float32 by 1, {1e3 * Spread.of(blocks[PASS]).median:.1f} ms"
    yield Row(f"e2m1, rule {rule}, scales given", plain, TIMES, ratio(blocks[GIVEN], blocks[PASS]), 1.5)
    yield Row(f"e2m1, rule {rule}", plain, TIMES, ratio(blocks[COMPUTED], blocks[PASS]), 2.5)
    yield Row(f"e2m1, rule {rule}, counted", "not counted", TIMES, ratio(blocks[COUNTED], blocks[COMPUTED]), 1.15)
    uncompiled = ratio(blocks[EAGER], blocks[COMPILED])
    yield Row(f"e2m1, rule {rule}, uncompiled", "compiled", TIMES, uncompiled, floor=3.0)
    drawn = ratio(blocks[EAGER_STOCHASTIC], blocks[STOCHASTIC])
    yield Row(f"e2m1, rule {rule}, stochastic, uncompiled", "compiled, draws included", TIMES, drawn)


def _in_a_process(options: Mapping[str, Any]) -> Measured:
    """Measure in a process that starts with no thread pool and an empty cache of compiled code."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", SWITCH)}
        command = [sys.executable, "-m", "tests.benchmarks.lowbit_cost", json.dumps(dict(options))]
        environment["TORCHINDUCTOR_CACHE_DIR"] = cache
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found: Measured = json.loads(done.stdout)
    return found


def measure(elements: int, rules: list[str], rounds: int, slow_rounds: int) -> Measured:
    """Return the seconds of compiling, and of each way to cast under each rule, block by block."""
    torch.set_num_threads(THREADS)
    with suppress(AttributeError, OSError):  # another C library
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(option, KEPT_IN_THE_PROCESS)
    COMPILER.patience = -1
    values = torch.randn(elements // 256, 256, generator=torch.Generator().manual_seed(0))
    begin = time.perf_counter()
    _ = Cast("e2m1", rules[0])(values), Cast("e2m1", rules[0]).with_counts(values)
    compiling = time.perf_counter() - begin
    return {"compiling": [compiling], "seconds": {rule: _timed(rule, values, rounds, slow_rounds) for rule in rules}}


def _timed(rule: str, values: torch.Tensor, rounds: int, slow_rounds: int) -> list[list[float]]:
    cast, stochastic = Cast("e2m1", rule), Cast("e2m1", rule, "stochastic")
    layout, generator = kernels.Layout.of(values, cast.blocks()), torch.Generator()
    given = (layout.blocks, kernels.scales_of(layout.blocks, cast.scaling), None, cast.number_format, cast.rounding)
    fast = Turns(
        [
            lambda: torch.mul(values, 1),
            lambda: layout.values(COMPILER.run(kernels.cast, *given)),
            lambda: cast(values),
            lambda: cast.with_counts(values),
        ],
        timer=time.perf_counter,
    )
    slow = Turns(
        [
            lambda: cast(values),
            lambda: _uncompiled(lambda: cast(values)),
            lambda: stochastic(values, generator=generator),
            lambda: _uncompiled(lambda: stochastic(values, generator=generator)),
        ],
        timer=time.perf_counter,
    )
    for turns, count in ((fast, rounds), (slow, slow_rounds)):
        turns.round()
        turns.forget()
        for _ in range(count):
            turns.round()
    return fast.seconds + slow.seconds


def _uncompiled(function: Callable[[], Any]) -> None:
    os.environ[SWITCH] = "0"
    function()
    del os.environ[SWITCH]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(**json.loads(sys.argv[1]))))
