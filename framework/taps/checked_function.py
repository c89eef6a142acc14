"""The function of a tap with a check that it changes its tensor only if the tap declares this."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..errors import StateMutationError
from ..hooks import GradientTap, OnGradient, TapOwner
from ..state import uncompiled
from ..tensors import in_bytes
from .callbacks import FORWARD_TENSORS
from .passes import RunningPasses


def checked_function(
    owner: TapOwner, tap: GradientTap, is_active: Callable[[], bool], passes: RunningPasses
) -> OnGradient:
    """Return the function of a tap, called only while the tap is active, and with no tap active inside of it.

    It raises :class:`StateMutationError` if the tap changed its tensor undeclared.
    """

    def on_tensor(tensor: Tensor) -> Tensor | None:
        if not is_active() or is_symbolic(tensor):
            return None
        version = version_of(tensor)
        copy = tensor.clone() if passes.audit else None
        replacement: Tensor | None = None
        try:
            with passes:  # the function may run a backward pass itself
                replacement = owner.call(tap.target, partial(_replacement_of, tap, tensor))
        finally:
            is_same = version_of(tensor) == version
            if copy is not None:
                is_same = is_same and torch.equal(in_bytes(copy), in_bytes(tensor))
            if not is_same or (replacement is not None and not tap.replaces):
                raise StateMutationError(
                    f"The tap of hook {owner.hook!r} on {tap.target!r} changed "
                    f"{FORWARD_TENSORS.get(tap.kind, 'a gradient')} that it may only read; declare replaces=True and "
                    "commits = {StatePart.GRADIENTS}, and return the new gradient."
                )
        return replacement

    return uncompiled(on_tensor)  # compiled autograd traces hooks of tensors


def is_symbolic(tensor: Tensor) -> bool:
    """Return whether a tensor stands for others and has no memory: in ``torch.func`` transforms and FakeTensorMode.

    Taps leave out such passes: per-sample gradients, Jacobians, an export of the model.
    """
    # Private: torch has no public function for it (torch 2.9 to 2.15). FakeTensor is recognised by its module, whose
    # import takes a second.
    in_transform: bool = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return in_transform or type(tensor).__module__ == "torch._subclasses.fake_tensor"


def version_of(tensor: Tensor) -> tuple[int, int, torch.Size]:
    """Return numbers that change if a tensor is written, without a copy or a device synchronisation.

    The version counter detects writes in place, and the address an assignment to ``.data`` or ``set_``. Writes through
    ``.data`` change neither; only an audit detects them.
    """
    return tensor._version, tensor.data_ptr(), tensor.shape


def _replacement_of(tap: GradientTap, gradient: Tensor) -> Tensor | None:
    """Call a tap and return its replacement; raise ``ValueError`` unless shape and dtype equal the gradient's."""
    replacement = tap.function(gradient)
    if replacement is None or (replacement.shape == gradient.shape and replacement.dtype == gradient.dtype):
        return replacement
    raise ValueError(
        f"returned {replacement.dtype} of shape {tuple(replacement.shape)} as replacement of a gradient of "
        f"{gradient.dtype} and shape {tuple(gradient.shape)}; return the same dtype and shape"
    )
