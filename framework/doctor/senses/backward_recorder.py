"""Descriptions of the backward passes of a step, from the calls before them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...errors import RunNotice, warn
from ...hooks import BackwardContext
from ...tensors import groups_of, local_shards, over_shards
from .backward_passes import BackwardPass
from .loss_graph import describe_loss


class BackwardRecorder:
    """Records what the loss and the gradients show before each backward pass of a step."""

    def __init__(self) -> None:
        self._step = 0
        self._passes: tuple[BackwardPass, ...] = ()
        self._has_warned = False

    def record(self, ctx: BackwardContext) -> None:
        """Append the description of the pass that starts next; without the gradients if the step is not due."""
        # A pass with the index of an earlier one replaces it.
        earlier = self._passes[: ctx.index] if ctx.step == self._step else ()
        self._step, self._passes = ctx.step, earlier
        described = self._described(ctx)
        if ctx.is_due:
            index, names = len(self._passes), tuple[str, ...]()
            # Between the passes of a step FSDP2 may keep gradients elsewhere than in ``.grad``.
            if index == 0 or (index == 1 and not ctx.ranks.shards):
                names = with_gradient(ctx.parameters)
            described = described._replace(
                divisor=described.divisor * ctx.divisor,
                divisions=described.divisions if ctx.divisor == 1 else (ctx.divisor, *described.divisions),
                leftover_gradients=names if index == 0 else (),
                accumulated_gradients=names if index == 1 else (),
            )
        self._passes = (*self._passes, described)

    def of(self, step: int) -> tuple[BackwardPass, ...]:
        """Return the descriptions of a step, one for each micro-batch; none if the loop runs backward itself."""
        return self._passes if step == self._step else ()

    def _described(self, ctx: BackwardContext) -> BackwardPass:
        """Return the description of a loss, without facts if its graph cannot be read: other checks do not need it."""
        try:
            return describe_loss(ctx.loss, is_scaled=ctx.is_scaled)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                reason = f"{type(error).__name__}: {error}"
                warn(f"The graph of the loss cannot be read ({reason}), so checks of it are left out.", RunNotice)
            return BackwardPass()


@torch.no_grad()
def with_gradient(parameters: Mapping[str, nn.Parameter]) -> tuple[str, ...]:
    """Return the names of the parameters that have a gradient with a non-zero element, with one transfer per device."""
    trained = {name: value for name, value in parameters.items() if value.requires_grad and not value.is_meta}
    groups = groups_of(trained.values())
    if not groups:  # otherwise all ranks must take part, also one without gradients
        trained = {name: value for name, value in trained.items() if value.grad is not None}
    if not trained:
        return ()
    counts = [_nonzero_count(value) for value in trained.values()]
    device = counts[0].device
    totals = over_shards(torch.stack([count.to(device) for count in counts]), groups)
    return tuple(name for name, total in zip(trained, totals.tolist(), strict=True) if total)


def _nonzero_count(parameter: nn.Parameter) -> Tensor:
    """Return the number of non-zero elements of the gradient on this rank, float32, zero-dimensional."""
    shard = local_shards([parameter])[0]
    if parameter.grad is None:
        return torch.zeros((), device=shard.device)
    gradient = local_shards([parameter.grad])[0]
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.count_nonzero(values).float()
