"""Memory costs of hooks: peak and tensors of runs in separate processes."""

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loopscope.hooks import TrainingHook
from loopscope.training.profiler import peak_resident_bytes
from loopscope.training_hooks.clipping import GradClip
from torch import Tensor

from tests.benchmarks.rows import COPIES, Effort, Row
from tests.benchmarks.subjects import Mutator, Subject, bare_steps, mod_arithmetic, observers
from tests.benchmarks.timing import Spread

ROOT = Path(__file__).parents[2]
STEPS = 4
MUTATING = "a mutating intervention"
HOOKS: dict[str, Callable[[], Sequence[TrainingHook]]] = {
    "no hooks": lambda: (),
    "ten observers": lambda: observers(10),
    "grad_clip (mutates = False)": lambda: [GradClip()],
    MUTATING: lambda: [Mutator()],
}
BARE = "bare loop"
Measured = Mapping[str, float]


def peak_memory(effort: Effort) -> Iterator[Row]:
    """Measure each kind of run in separate processes, against the bare loop."""
    rounds = [{kind: _in_a_process(kind, effort.paper) for kind in (BARE, *HOOKS)} for _ in range(effort.times(2))]
    return memory_rows(rounds)


def memory_rows(rounds: Sequence[Mapping[str, Measured]]) -> Iterator[Row]:
    """Compare the measured rounds, by kind of run, with the bare loop."""
    for kind in HOOKS:
        copies = 1.0 if kind == MUTATING else 0.0
        state = rounds[0][kind]["state"]
        against = f"bare loop, paper preset, a copy is {state / 1e6:.1f} MB"
        for key, label, slack in (("peak", "Peak memory", 0.05), ("tensors", "Tensors alive", 0.01)):
            extra = [(each[kind][key] - each[BARE][key]) / state for each in rounds]
            yield Row(f"{label}, {kind}", against, COPIES, Spread.of(extra), copies + slack)


def _in_a_process(kind: str, options: Mapping[str, Any]) -> Measured:
    command = [sys.executable, "-m", "tests.benchmarks.memory_cost", kind, json.dumps(dict(options))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    measurements: Measured = json.loads(done.stdout)
    return measurements


def measure(kind: str, options: Mapping[str, Any]) -> Measured:
    """Train a few steps; return the process's peak memory, the bytes of new tensors, and the bytes of the state."""
    gc.collect()
    bytes_before = tensor_bytes()
    subject = mod_arithmetic(options)
    measurements: list[Measured] = []

    def look() -> None:
        state = sum(tensor.nbytes for tensor in subject.tensors)
        measurements.append({"peak": peak_resident_bytes(), "tensors": tensor_bytes() - bytes_before, "state": state})

    _train(subject, kind, look)
    return measurements[0]


def _train(subject: Subject, kind: str, look: Callable[[], None]) -> None:
    """Train, and measure after a few steps, while the last gradients exist."""
    if kind == BARE:
        steps = bare_steps(subject)
        for _ in range(STEPS):
            next(steps)
        look()
        return
    loop = subject.state.loop
    subject.train(STEPS, lambda: look() if loop.step == STEPS else None, HOOKS[kind]())


def tensor_bytes() -> int:
    """Return the bytes of all storages that Python can reach through a tensor or its gradient."""
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    storages = [tensor.untyped_storage() for tensor in tensors]
    real = [storage for storage in storages if storage.device.type != "meta"]  # compilers leave fake tensors
    return sum({storage.data_ptr(): storage.nbytes() for storage in real}.values())


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(sys.argv[1], json.loads(sys.argv[2]))))
