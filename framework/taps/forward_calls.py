"""The callback of a forward tap, with a check that its function changes no tensor."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import StateMutationError
from ..hooks import ForwardCall, ForwardTap, Tap, TapOwner
from ..tensors import in_bytes
from .checked_function import is_symbolic, version_of
from .passes import RunningPasses


def forward_function(
    owner: TapOwner, tap: ForwardTap, is_active: Callable[[], bool], passes: RunningPasses
) -> Callable[[tuple[Any, ...]], None]:
    """Return a function of (args, kwargs, output) that calls the tap, with no tap active inside of it.

    It raises :class:`StateMutationError` if the tap changed a tensor.
    """

    def on_call(call: tuple[Any, ...]) -> None:
        if not is_active():
            return
        all_tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor)]
        if any(map(is_symbolic, all_tensors)):
            return
        detached = tree_map_only(Tensor, Tensor.detach, call)
        function = partial(tap.function, ForwardCall(*detached))
        call_unchanged(owner, tap, function, all_tensors, "an input or output", passes)

    return on_call


def call_unchanged(
    owner: TapOwner, tap: Tap, function: Callable[[], None], tensors: list[Tensor], subject: str, passes: RunningPasses
) -> None:
    """Call the function of a tap, with no tap active inside of it.

    It raises :class:`StateMutationError` if the function changed one of the ``tensors``, which ``subject`` describes.
    """
    # Sparse and nested tensors have no address.
    tensors = [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_nested]
    versions = list(map(version_of, tensors))
    copies = [tensor.detach().clone() for tensor in tensors] if passes.audit else []
    try:
        with torch.no_grad(), passes:  # the function may run a pass of the model itself
            owner.call(tap.target, function)
    finally:
        is_same = versions == list(map(version_of, tensors))
        for copy, tensor in zip(copies, tensors, strict=False):
            is_same = is_same and torch.equal(in_bytes(copy), in_bytes(tensor))
        if not is_same:
            raise StateMutationError(
                f"The tap of hook {owner.hook!r} on {tap.target or 'the model'!r} changed {subject} that it may only "
                "read; change a clone of the tensor instead."
            )
