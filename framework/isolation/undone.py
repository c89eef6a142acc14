"""Passes of user code that loopscope runs itself, such as those of hooks and evaluations: undone completely."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad_mode
from torch.optim import Optimizer

from ..state import TrainingState, Transient
from ..state.parameter_groups import trained_by
from ..state.settings import entered_modes, leave_modes, script_settings
from ..tensors import addresses, resharded_afterwards
from .borrowing import borrowed_extras
from .guardian import Objects, copy_each


class ModulesCopy(Transient):
    """The contents of modules and other objects before a pass, with the bytes of all tensors that they reach.

    The objects are walked at the first :meth:`save`, and again after they have changed.
    """

    def __init__(self) -> None:
        self._roots: tuple[Any, ...] = ()
        self._objects: Objects | None = None
        self._written: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._natives: list[Any] = []
        self._versions: grad_mode._unsafe_preserve_version_counter | None = None

    @property
    def owners(self) -> list[Tensor]:
        """The tensors that may have a gradient."""
        return [] if self._objects is None else self._objects.identities.owners

    @torch.no_grad()
    def save(self, roots: tuple[Any, ...], excluded: Iterable[Any] = ()) -> None:
        """Copy everything that is reachable from ``roots`` without the ``excluded`` objects."""
        objects = self._objects
        if objects is None or addresses(roots) != addresses(self._roots) or not objects.is_current():
            objects = Objects(roots, excluded={*map(id, excluded)})
            self._roots, self._objects = roots, objects
            # Not those of inference mode, which cannot be written to outside of it, and not those in shared memory,
            # which other processes may train at the same time.
            self._written = [item for item in objects.identities.bytes if not item.is_inference() and _is_ours(item)]
        self._natives = objects.structure.read_natives()
        self._copies = [*map(Tensor.clone, self._written)]
        # Restoring bytes counts as a write, after which autograd refuses the backward pass of an earlier graph. The
        # bytes are the same, so the counters may be as well; torch has no public function that sets them.
        self._versions = grad_mode._unsafe_preserve_version_counter(tuple(self._written))

    def is_changed(self) -> bool:
        """Return whether an object or a byte differs from the copy."""
        objects = self._objects
        is_current = objects is not None and objects.is_current(keeps_graphs=True)
        return not is_current or not all(map(torch.equal, self._written, self._copies))

    def restore(self) -> None:
        """Restore everything: the same objects with the same contents; free the copies."""
        assert self._objects is not None
        assert self._versions is not None
        with torch.no_grad():
            self._objects.structure.restore()
            # A graph that the pass returns may be differentiated later.
            self._objects.identities.restore(keeps_graphs=True)
        self._objects.structure.write_natives(self._natives)
        copy_each(self._written, self._copies)
        self._versions.__exit__(None, None, None)
        self._natives, self._copies, self._versions = [], [], None


def _is_ours(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu" or not tensor.is_shared()  # type: ignore[no-untyped-call]


@contextmanager
def undone_in_modules(
    modules: Sequence[nn.Module],
    optimizers: Iterable[Optimizer] = (),
    spare: list[ModulesCopy] | None = None,
    others: Sequence[Any] = (),
    excluded: Iterable[Any] = (),
) -> Iterator[ModulesCopy]:
    """Undo, after the body, all changes of modules: parameters, buffers, modes, attributes, submodules and hooks.

    Objects are restored as the same objects, tensors with the same bytes and versions. Of optimizers that swap weights
    to evaluate, the state is restored, too: such a swap rounds. ``spare`` is a list of copies to use again, ``others``
    are further objects to restore; what is reached only through ``excluded`` objects is left out. Yields the copy.
    """
    copies = [] if spare is None else spare
    swapping = [optimizer for optimizer in optimizers if swaps_weights(optimizer)]
    entries = [entry for optimizer in swapping for entry in (*optimizer.param_groups, *optimizer.state.values())]
    copy = copies.pop() if copies else ModulesCopy()
    copy.save((*modules, *others, *entries), excluded)
    try:
        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(resharded_afterwards(module))
            yield copy
    finally:
        copy.restore()
        copies.append(copy)


def swaps_weights(optimizer: Any) -> bool:
    """Return whether an optimizer has other weights in evaluations, which its methods ``eval`` and ``train`` swap."""
    return callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None))


@contextmanager
def undone_pass(
    state: TrainingState, optimizers: Iterable[Optimizer] = (), *, clears_gradients: bool = False
) -> Iterator[None]:
    """Run a pass of user code with the script's settings, and undo all its changes of the training state afterwards.

    These are random generators, process-wide settings, the declared state of experiments, gradients, parameters of the
    optimizer, and everything in modules. ``optimizers`` are as in :func:`undone_in_modules`. The pass starts without
    gradients if it ``clears_gradients``.
    """
    settings = state.flags.read_all()
    with ExitStack() as stack:
        stack.enter_context(state.streams.preserved())
        stack.callback(state.flags.restore, settings)
        stack.enter_context(script_settings())
        if "torch._dynamo" in sys.modules:
            # A function compiled for the shapes or modes of a pass would compute other bits in the training.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(borrowed_extras(state))
        modules, trained = (state.model, *state.also.values()), trained_by(state.optimizer)
        copy = stack.enter_context(undone_in_modules(modules, optimizers, state.spare_copies, trained))
        gradients = [(owner, owner.grad) for owner in copy.owners]
        stack.callback(_set_gradients, gradients)
        if clears_gradients:
            _set_gradients([(owner, None) for owner in copy.owners])
        # Left first, since an entered mode could intercept the operations that restore the rest.
        stack.callback(leave_modes, entered_modes())
        yield


def _set_gradients(gradients: list[tuple[Tensor, Tensor | None]]) -> None:
    for owner, gradient in gradients:
        if owner.grad is not gradient:
            owner.grad = gradient
