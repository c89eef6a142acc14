"""The gradients and updates of the first steps of a training, which ``loopscope equal --numbers`` compares."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..durable_files import read_tensors, save_tensors, write_json
from ..hooks import (
    DebugInterventionHook,
    HookPoint,
    HookRegistry,
    Metrics,
    ModelDataContext,
    RunDataContext,
    RunInfo,
    StatePart,
    StepTap,
    Tap,
    TrainingHook,
)
from ..state import Transient
from ..tensors import trainable, unsharded
from .recording import registered
from .trial import moved_weights

FILE = "layout_numbers.json"
FOLDER = "layout_numbers"
START, GRADIENT, UPDATE = "start", "gradient", "update"


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class LayoutNumbers(TrainingHook):
    """Write the gradients and the updates of every step, or compare them with those of another run.

    The numbers are those of the complete model: the gradients that the optimizer uses, and the sums of all updates up
    to the step. The result is ``layout_numbers.json`` in the folder of the run: for each step and tensor the distance
    from the other run and the norm there, both in float64, and the norm of a change of every element by its last bit.

    Args:
        reference: the folder of the run to compare with; by default this run writes its numbers.
    """

    name = "layout_numbers"
    debug = True
    hook_points = frozenset({HookPoint.PRE_UPDATE, HookPoint.POST_STEP})
    metrics = """
        tensors | number of tensors that were written or compared | 0, 1, 2, … | One for each trainable parameter.
    """

    reference: str = ""

    @classmethod
    def file_names(cls, strategy: str) -> tuple[str, ...]:
        """Return the names of the file with the result, and of the folder with the numbers."""
        return FILE, FOLDER

    def start(self, run: RunInfo) -> None:
        """Compare from here on."""
        self._out, self._is_main = Path(run.output_dir), run.ranks.is_main
        self._precision = _Precision()
        self._start: dict[str, Tensor] = {}
        """The weights before the first update, on the CPU."""
        self._entries: list[dict[str, Any]] = []
        self._unmatched: set[str] = set()

    def taps(self, model: nn.Module) -> list[Tap]:
        """Return the tap that notes the precision of the passes."""
        return [StepTap(self._precision, always=True)]

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Take the gradients before the update, and the updates after it."""
        parameters = trainable(ctx.model)
        if ctx.hook_point is HookPoint.PRE_UPDATE:
            if not self._start:
                self._start = _complete(parameters)
                self._take(0, START, self._start, self._start)
            gradients = _complete(parameters, _gradient)
            self._take(ctx.step, GRADIENT, gradients, gradients)
        else:
            now = _complete(parameters)
            updates = {name: _wide(now[name]) - _wide(start) for name, start in self._start.items() if name in now}
            self._take(ctx.step, UPDATE, updates, now)
        return {"tensors": float(len(parameters))}

    def _take(self, step: int, kind: str, values: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
        """Write values or compare them; ``stored`` are the tensors whose type limits their precision."""
        if not self._is_main:
            return
        name = f"{step}_{kind}.pt"
        if not self.reference:
            save_tensors(dict(values), self._out / FOLDER / name)
            self._entries.append({"step": step, "kind": kind, "tensors": len(values)})
        elif (path := Path(self.reference, FOLDER, name)).is_file():
            others = read_tensors(path)
            for tensor in {**others, **values}:
                if tensor not in values or tensor not in others or values[tensor].shape != others[tensor].shape:
                    self._unmatched.add(tensor)
                    continue
                one, other = (item[tensor].to(torch.complex128) for item in (values, others))
                ulp = float(stored[tensor].to(torch.complex128).norm()) * torch.finfo(stored[tensor].dtype).eps
                numbers = {"distance": float((one - other).norm()), "size": float(other.norm()), "ulp": ulp}
                self._entries.append({"step": step, "kind": kind, "tensor": tensor, **numbers})
        content = {"precision": self._precision.name, "unmatched": sorted(self._unmatched), "entries": self._entries}
        write_json(self._out / FILE, content)


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class MovedWeights(DebugInterventionHook):
    """Move every weight to the next number of its type before the first step, in random directions.

    Args:
        seed: selects the directions.
        precision: the name of the dtype of autocast, whose next number is taken then; by default that of the weights.
    """

    name = "moved_weights"
    hook_points = frozenset({HookPoint.PRE_STEP})
    commits = frozenset({StatePart.PARAMETERS})
    mutates = False
    metrics = """
        moved | whether this call has moved the weights | 0 or 1 | 1 at the first step.
    """

    seed: int = 0
    precision: str = ""

    def start(self, run: RunInfo) -> None:
        """Move weights at the next step."""
        self._is_moved = False

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Move the weights once."""
        if self._is_moved:
            return {"moved": 0.0}
        self._is_moved = True
        precision = getattr(torch, self.precision) if self.precision else None
        model_ctx.blend_parameters(moved_weights(model_ctx.model, self.seed, precision), 1.0)
        return {"moved": 1.0}


class _Precision(Transient):
    """Notes whether passes of modules run under autocast, and in which dtype."""

    name = ""
    """The name of the dtype, or empty."""

    @contextmanager
    def recording(self, model: nn.Module, is_active: Callable[[], bool]) -> Iterator[None]:
        """Note the precision of the passes in the body."""
        self._device = next((item.device.type for item in model.parameters()), "cpu")
        with registered(partial(register_module_forward_pre_hook, self._note)):
            yield

    def _note(self, *_: Any) -> None:
        if not self.name and not torch.compiler.is_compiling() and torch.is_autocast_enabled(self._device):
            self.name = str(torch.get_autocast_dtype(self._device)).removeprefix("torch.")


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient, with zeros for a parameter that has none."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return gradient.to_dense() if gradient.is_sparse else gradient


def _complete(
    parameters: Mapping[str, nn.Parameter], value: Callable[[nn.Parameter], Tensor] = torch.detach
) -> dict[str, Tensor]:
    """Return copies of the parameters, or of values of them, on the CPU; those of all shards together."""
    return {name: unsharded(value(item).detach()).to("cpu", copy=True) for name, item in parameters.items()}


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
