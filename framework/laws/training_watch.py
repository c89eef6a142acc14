"""The first evaluation and the updates of a training, watched between the tries of laws."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..errors import listed
from ..isolation import VISITS
from ..observing import PassiveListener, listen, stop_listening
from ..state import Transient


class _Moment(NamedTuple):
    """The model at the start of a pass."""

    modes: set[str]
    """The modules in train mode."""
    changes: set[str]
    """The tensors that have changed since the newest update."""
    has_gradients: bool
    seed: int


class TrainingWatch(PassiveListener, Transient):
    """Reports what the first evaluation has changed, once the training continues.

    The model is compared with its state after the newest update: an evaluation may swap weights before its first pass.
    What also changes between two steps without an evaluation, such as clipped weights, does not count.

    Args:
        report: receives the problems, as sentences; none if nothing changed.
        on_update: receives the model after each update, and the parameters that it has changed.
    """

    def __init__(self, report: Callable[[list[str]], None], on_update: Callable[[nn.Module, set[str]], None]) -> None:
        self._report, self._on_update = report, on_update
        self._model = nn.Module()
        self._is_active: Callable[[], bool] = bool
        self._last: _Moment | None = None
        """The start of the newest training pass."""
        self._copies: dict[str, Tensor] = {}
        """The tensors of the model after the newest update."""
        self._usually_changed: set[str] = set()
        self._has_evaluated = False
        self._usually_has_gradients = False
        self._newest: _Moment | None = None
        """The start of the newest pass with gradients."""
        self.is_decided = self._is_stopped = False

    @contextmanager
    def recording(self, model: nn.Module, is_active: Callable[[], bool]) -> Iterator[None]:
        """Watch the passes of a model in the body."""
        self._model, self._is_active = model, is_active
        with VISITS:
            handles: list[Any] = [
                register_module_forward_pre_hook(self._before_pass),
                register_optimizer_step_post_hook(self._after_update),
            ]
            listen(self)
        try:
            yield
        finally:
            stop_listening(self)
            with VISITS:
                for handle in handles:
                    handle.remove()

    def _before_pass(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if module is not self._model or not self._is_watching():
            return
        if torch.is_grad_enabled():
            self._newest = _Moment(self._modes(), self._changes(), self._has_gradients(), torch.initial_seed())
        if self._last is not None and not (torch.is_grad_enabled() and module.training):
            self._has_evaluated = True

    def _after_update(self, *_: Any) -> None:
        if not self._is_watching():
            return
        self._on_update(self._model, self._changes())
        if not self._is_stopped:
            self._copies = {name: item.detach().clone() for name, item in self._tensors().items()}

    def before_backward(self, roots: Sequence[Tensor]) -> None:
        """Compare the state at the start of the newest pass, which was one of the training."""
        if self._newest is None or not self._is_watching():
            return
        now, self._newest = self._newest, None
        if self._last is not None and self._has_evaluated and self._copies and not self.is_decided:
            self.is_decided = True
            self._report(self._problems(self._last, now))
        self._usually_changed |= now.changes
        self._usually_has_gradients |= now.has_gradients
        self._last = now

    def stop(self) -> None:
        """Watch no longer, and free the copies."""
        self._is_stopped, self._copies, self._newest = True, {}, None

    def _is_watching(self) -> bool:
        return not self._is_stopped and self._is_active()

    def _problems(self, last: "_Moment", now: "_Moment") -> list[str]:
        """Return what an evaluation between two training passes has changed."""
        lost, changed = sorted(last.modes - now.modes), sorted(now.changes - self._usually_changed)
        problems = [f"an evaluation leaves {self._named(lost)} in eval mode"] if lost else []
        if changed:
            problems.append(f"an evaluation changes {listed(changed, 3)}")
        if now.has_gradients and not self._usually_has_gradients:
            problems.append("an evaluation leaves gradients, to which the next step adds its own")
        if now.seed != last.seed:
            problems.append("an evaluation sets the seed of the random numbers of the training")
        return problems

    def _has_gradients(self) -> bool:
        return any(item.grad is not None and bool(item.grad.any()) for item in self._model.parameters())

    def _named(self, modules: Sequence[str]) -> str:
        return "the model" if "" in modules else listed(list(modules), 3)

    def _modes(self) -> set[str]:
        return {name for name, module in self._model.named_modules() if module.training}

    def _tensors(self) -> dict[str, Tensor]:
        named = self._model.state_dict(keep_vars=True)
        return {name: item for name, item in named.items() if isinstance(item, Tensor)}

    def _changes(self) -> set[str]:
        now = self._tensors() if self._copies else {}
        return {name for name, copy in self._copies.items() if name in now and not torch.equal(copy, now[name])}
