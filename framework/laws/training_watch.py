"""The first evaluation and the updates of a training, watched between the tries of laws."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..errors import listed
from ..observing import PassiveListener, place
from ..state import Transient
from .loss_numbers import divisors_of
from .recorded_step import factors_of
from .recording import registered
from .values import has_parameters, tensors_within

FEW = 3
"""Updates that show how many backward passes an update usually has."""


class _Moment(NamedTuple):
    """The model at the start of a pass."""

    modes: set[str]
    """The modules in train mode."""
    changes: set[str]
    """The tensors that have changed since the newest update."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """The shapes of the inputs."""
    is_for_inputs: bool = False
    """Whether the pass is made in eval mode, or for the gradients of its inputs."""


@dataclass
class UpdatePasses:
    """The backward passes before an update of the weights."""

    passes: list[_Moment] = field(default_factory=list)
    """The starts of the passes before them."""
    factors: tuple[float, ...] = ()
    """The numbers by which the newest loss was multiplied last."""
    divisors: set[float] = field(default_factory=set)
    """The numbers by which the newest loss was divided."""
    adds_up: bool = False
    """Whether the newest one has added to gradients."""
    count: int = 0
    """The number of passes whose gradients the update has."""


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
        self._parts: dict[int, str] = {}
        """The names of the model's modules with parameters, by id: a loop may call parts of the model alone."""
        self._depth = 0
        self._is_active: Callable[[], bool] = bool
        self._last: _Moment | None = None
        """The start of the newest training pass of the update before."""
        self._copies: dict[str, Tensor] = {}
        """The tensors of the model after the newest update."""
        self._usually_changed: set[str] = set()
        self._has_evaluated = False
        self._is_seeded = self._is_evaluated_with_seed = False
        """Whether the seed was set since the newest update, and whether a pass of an evaluation followed."""
        self._usually_adds_up = False
        self._newest: _Moment | None = None
        """The start of the newest pass with gradients."""
        self._update = UpdatePasses()
        self.counts: list[tuple[int, tuple[float, ...]]] = []
        """For each update the number of backward passes whose gradients it has, and the factors of the loss."""
        self.batches: list[tuple[tuple[tuple[int, ...], ...], set[float]]] = []
        """For each update with one backward pass the shapes of the inputs, and the divisors of the loss."""
        self.clipping: tuple[float, float] | None = None
        """The norm of the gradients before they were clipped and at the newest update, if they are clipped."""
        self._norm: float | None = None
        self._seeding = (
            place(torch, "manual_seed", partial(self._observed, seeds=True)),
            place(torch, "set_rng_state", partial(self._observed, seeds=False)),
            place(torch.random, "set_rng_state", partial(self._observed, seeds=False)),
        )
        self.is_decided = self._is_stopped = False

    @contextmanager
    def recording(self, model: nn.Module, is_active: Callable[[], bool]) -> Iterator[None]:
        """Watch the passes of a model in the body."""
        self._model, self._is_active = model, is_active
        named = model.named_modules()
        self._parts = {id(item): name for name, item in named if has_parameters(item)}
        registrations: tuple[Callable[[], Any], ...] = (
            partial(register_module_forward_pre_hook, self._before_pass),
            partial(register_module_forward_hook, self._after_pass),
            partial(register_optimizer_step_pre_hook, self._before_update),
            partial(register_optimizer_step_post_hook, self._after_update),
            *(function.install for function in self._seeding),
        )
        with registered(*registrations, listener=self):
            yield

    def _observed(self, function: Callable[..., Any], *, seeds: bool) -> Callable[..., Any]:
        """Return a function that seeds the generators, or restores them after a seed, and is noted."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_watching():
                self._is_seeded, self._is_evaluated_with_seed = seeds, seeds and self._is_evaluated_with_seed
            return function(*args, **kwargs)

        return call

    def _after_pass(self, module: nn.Module, *_: Any) -> None:
        if id(module) in self._parts:
            self._depth = max(0, self._depth - 1)

    def _before_pass(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if id(module) not in self._parts:
            return
        self._depth = 1 if module is self._model else self._depth + 1
        if self._depth > 1 or not self._is_watching():
            return
        if torch.is_grad_enabled():
            tensors = tensors_within(inputs)
            needs_gradients = any(item.requires_grad and item.is_leaf for item in tensors)
            shapes = tuple(tuple(item.shape) for item in tensors)
            self._newest = _Moment(self._modes(), self._changes(), shapes, needs_gradients or not module.training)
        if self._last is not None and self._is_of_evaluation(module, self._last):
            self._has_evaluated = True
            self._is_evaluated_with_seed |= self._is_seeded

    def _is_of_evaluation(self, module: nn.Module, last: _Moment) -> bool:
        """Return whether a pass belongs to an evaluation; parts may be frozen, or run without gradients for targets."""
        if module is self._model:
            return not (torch.is_grad_enabled() and module.training)
        return not module.training and self._parts[id(module)] in last.modes

    def on_gradients_used(self, gradients: Sequence[Tensor]) -> None:
        """Note the norm of gradients before they are clipped."""
        if self._norm is None and self._is_watching():
            self._norm = _norm(gradients)

    def _before_update(self, *_: Any) -> None:
        if self._norm is not None and self._is_watching():
            norm = _norm([item.grad for item in self._model.parameters() if item.grad is not None])
            self.clipping, self._norm = (self._norm, norm), None

    def _after_update(self, *_: Any) -> None:
        self._depth = 0  # an error in a pass would have left it
        if not self._is_active():
            return
        if not self._is_stopped:
            self._judge()
        self._on_update(self._model, self._changes())
        if not self._is_stopped:
            self._copies = {name: item.detach().clone() for name, item in self._tensors().items()}

    def before_backward(self, roots: Sequence[Tensor]) -> None:
        """Note a backward pass, which belongs to the next update."""
        if not self._is_watching() or (self._newest is None and self._last is not None):
            return
        update = self._update
        update.passes.append(self._newest or _Moment(self._modes(), set()))  # the first one has no start
        update.adds_up = self._has_gradients()
        update.count = update.count + 1 if update.adds_up else 1
        update.factors = factors_of(roots[0]) if len(roots) == 1 else ()
        update.divisors = divisors_of(roots[0]) if len(roots) == 1 else set()
        self._newest = None

    def _judge(self) -> None:
        """Compare the state at the start of the newest pass before an update with that of the update before."""
        update, self._update = self._update, UpdatePasses()
        if not update.passes:
            return
        now, is_input_pass = update.passes[-1], self._adds_input_pass(update)
        self.counts.append((update.count, update.factors))
        self.batches.append((now.shapes if len(update.passes) == 1 else (), update.divisors))
        if self._last is not None and (self._has_evaluated or is_input_pass) and self._copies and not self.is_decided:
            self.is_decided = True
            leaves_gradients = is_input_pass or (
                update.adds_up and len(update.passes) == 1 and not self._usually_adds_up
            )
            self._report(self._problems(self._last, now, leaves_gradients=leaves_gradients))
        self._usually_changed |= now.changes
        self._usually_adds_up |= update.adds_up
        self._is_seeded = self._is_evaluated_with_seed = False
        self._last = now

    def _adds_input_pass(self, update: UpdatePasses) -> bool:
        """Return whether a pass of an evaluation, or for the gradients of its inputs, has added to those of weights.

        All updates before had one backward pass. One for the same rows, such as that of a penalty, is no evaluation.
        """
        earlier = [count for count, _ in self.counts]
        if len(earlier) < FEW or max(earlier) > 1 or len(update.passes) < 2 or not update.adds_up:
            return False
        *others, last = update.passes
        return any(one.is_for_inputs and one.shapes != last.shapes for one in others) and not last.is_for_inputs

    def stop(self) -> None:
        """Watch nothing but the number of updates any longer, and free the copies."""
        self._is_stopped, self._copies, self._newest = True, {}, None

    def _is_watching(self) -> bool:
        return not self._is_stopped and self._is_active()

    def _problems(self, last: "_Moment", now: "_Moment", *, leaves_gradients: bool) -> list[str]:
        """Return what an evaluation between two training passes has changed."""
        lost, changed = sorted(last.modes - now.modes), sorted(now.changes - self._usually_changed)
        problems = [f"an evaluation leaves {self._named(lost)} in eval mode"] if lost else []
        if changed:
            problems.append(f"an evaluation changes {listed(changed, 3)}")
        if leaves_gradients:
            problems.append("an evaluation leaves gradients, to which the next step adds its own")
        if self._is_evaluated_with_seed:
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


@torch.no_grad()
def _norm(gradients: Iterable[Tensor]) -> float:
    return float(torch.stack([item.detach().float().norm() for item in gradients] or [torch.zeros(())]).norm())
