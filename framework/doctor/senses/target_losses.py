"""The losses of single targets, from what a cross-entropy has saved in its graph."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .autograd_nodes import VIEWS, operation_of, output_of, saved_integer, saved_value
from .loss_graph import path_of, root_of


class TokenLikelihoods(NamedTuple):
    """The targets of a cross-entropy, shape (…), with their losses."""

    losses: Tensor
    """−ln p of each target, float32 or float64; 0 where it does not count."""
    targets: Tensor
    """The classes, int64; −1 for a target that the loss ignores."""
    classes: int
    """The number of classes."""


def token_likelihoods(loss: Tensor, *, is_scaled: bool = False) -> TokenLikelihoods | None:
    """Return the losses of the targets of ``cross_entropy`` or ``nll_loss``; ``None`` for other losses.

    Targets of rows that were flattened from sequences have the shape (rows, positions). Of several such losses it is
    the first one.

    Args:
        loss: the loss with its graph.
        is_scaled: a loss scaler has multiplied the loss.
    """
    nodes = path_of(root_of(loss, is_scaled=is_scaled))
    place = next((index for index, node in enumerate(nodes) if operation_of(node) in ("NllLoss", "NllLoss2D")), None)
    if place is None:
        return None
    logarithms, targets = (saved_value(nodes[place], name) for name in ("self", "target"))
    # The shards of a DTensor have a part of the classes.
    if type(logarithms) is not Tensor or type(targets) is not Tensor or logarithms.ndim < 2:
        return None
    classes, ignored = logarithms.shape[1], saved_integer(nodes[place], "ignore_index")
    counts = (targets >= 0) & (targets < classes)
    if ignored is not None:
        counts &= targets != ignored
    chosen = logarithms.detach().gather(1, torch.where(counts, targets, 0)[:, None]).squeeze(1)
    wide = torch.float64 if chosen.dtype == torch.float64 else torch.float32
    losses = torch.where(counts, -chosen.to(wide), 0.0)
    shape = _shape_of(nodes[place + 1 :], targets, classes)
    return TokenLikelihoods(losses.view(shape), torch.where(counts, targets, -1).view(shape), classes)


def _shape_of(nodes: list[Any], targets: Tensor, classes: int) -> tuple[int, ...]:
    """Return the shape of the targets before the logits were flattened, or unsqueezed, for the loss."""
    if targets.ndim == 3 and targets.shape[1] == 1:  # torch adds this dimension to logits of shape (N, C, positions)
        return targets.shape[0], targets.shape[2]
    for node in nodes:
        name = operation_of(node)
        if name not in VIEWS and name != "LogSoftmax":
            break
        sizes: Sequence[Any] = getattr(node, "_saved_self_sym_sizes", ())
        is_flattened = output_of(node)[0] == (targets.numel(), classes) and len(sizes) == 3
        if is_flattened and int(sizes[0]) * int(sizes[1]) == targets.numel():
            return int(sizes[0]), int(sizes[1])
    return tuple(targets.shape)
