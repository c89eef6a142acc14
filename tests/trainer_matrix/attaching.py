"""The two forms of ``loopscope.attach`` that a training of the matrix is given: one with hooks, and one without."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from tests.trainer_matrix.digests import Recorder

OPTIONS: dict[str, dict[str, Any]] = {
    "gradient_flow": {"interval": 1},
    "gradient_overflow": {"interval": 2},
    "hessian": {"burst_length": 2},
    "loss_spikes": {"window": 2},
    "lr_probe": {"steps": 6, "smoothing": 0.5},
    "path_length": {"every": 1},
    "sharpness": {"iterations": 3, "k": 1, "probes": 2, "density_points": 9, "density_probes": 1, "batches": 2},
    "subspace_gradient_info": {"every": 1},
    "variance": {"window": 2, "every": 2},
    "weight_average": {"interval": 1, "swa_interval": 1, "evaluate_every": 1},
    "weight_updates": {"interval": 1},
}
"""Options with which the shipped hooks report within a few steps."""


class PlainScope:
    """The calls of a scope in a bare training, as the plain calls of torch."""

    def __init__(self, scaler: Any, accelerator: Any) -> None:
        self._scaler, self._accelerator = scaler, accelerator

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over the loader."""
        return iter(loader)

    def backward(self, loss: Tensor, *, last: bool = False, **options: Any) -> None:
        """Run the backward pass like a script that does not use loopscope."""
        if self._accelerator is not None:
            self._accelerator.backward(loss, **options)
        else:
            (loss if self._scaler is None else self._scaler.scale(loss)).backward(**options)

    def gradients_ready(self, loss: Tensor | None = None) -> None:
        """Do nothing."""

    def closure(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function itself."""
        return function

    def evaluate(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Evaluate like a script that does not use loopscope."""
        return function(*inputs)

    def epoch_end(self, **metrics: Any) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        """Return the scope."""
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing."""


class AttachNothing:
    """Stands for ``loopscope.attach`` in a bare training, which evaluates only if it ``evaluates``."""

    def __init__(self, recorder: Recorder, *, evaluates: bool = False) -> None:
        self._recorder, self.is_bare = recorder, not evaluates

    def __call__(self, target: Any, optimizer: Any = None, **options: Any) -> Any:
        """Return a scope that only makes the plain calls."""
        watch(self._recorder, target)
        return PlainScope(options.get("scaler"), options.get("accelerator"))


class AttachHooks:
    """Attaches the hooks of the group ``full``, which has all observers, and two interventions that are rolled back."""

    is_bare = False

    def __init__(self, recorder: Recorder, folder: Path, **options: Any) -> None:
        self._recorder, self._folder, self._options = recorder, folder, options
        self.scopes: list[Any] = []

    def __call__(self, target: Any, optimizer: Any = None, **options: Any) -> Any:
        """Attach, and return the scope."""
        watch(self._recorder, target)
        # Imported here, after the script has seeded its generators, as late as a script can import it.
        import loopscope

        from tests.trainer_matrix.interventions import Idle, Restless

        out = self._folder / f"run_{len(self.scopes)}"
        given: dict[str, Any] = {"out": out, "display": "none"}
        given |= {
            "with_hooks": "full",
            "hooks": [Idle(), Restless()],
            "hook_options": OPTIONS,
            "log_every": 3,
            **self._options,
            **options,
        }
        positional = [target] if optimizer is None else [target, optimizer]
        scope: Any = loopscope.attach(*positional, **given)
        self.scopes.append(scope)
        return scope


def watch(recorder: Recorder, target: Any) -> None:
    """Let a recorder watch the model and, of a Trainer of Hugging Face, the log."""
    recorder.watch(model_of(target))
    if hasattr(getattr(target, "state", None), "log_history"):
        recorder.watch_log(lambda: target.state.log_history)


def model_of(target: Any) -> Callable[[], nn.Module]:
    """Return a function that finds the model of a Trainer, which Lightning knows only during a fit."""
    if isinstance(target, nn.Module):
        return lambda: target
    return lambda: target.lightning_module if hasattr(target, "lightning_module") else target.model
