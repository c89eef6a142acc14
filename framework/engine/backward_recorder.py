"""Descriptions of the backward passes of a step, for the hooks that need them."""

import math

import torch
from torch import Tensor, nn

from ..errors import RunNotice, warn
from ..hooks import BackwardPass
from ..state import LoopState
from ..tensors import groups_of, local_shards, over_shards
from ..training import TrainingTask
from .hook_set import HookSet
from .loss_graph import describe_loss


class BackwardRecorder:
    """Records in the loop state what a loss and the gradients show before each backward pass of a step."""

    def __init__(self, task: TrainingTask, hooks: HookSet) -> None:
        self._task = task
        self._hooks = hooks
        self._is_due = self._has_warned = self._was_nonfinite = False
        self._parameters: dict[str, nn.Parameter] = {}
        self.is_needed = hooks.listeners.any_has("needs_loss_graph")
        """Whether any hook needs the descriptions."""

    def begin_step(self, loop: LoopState) -> None:
        """Clear the descriptions, and look up whether a hook needs those of this step."""
        loop.backward_passes = ()
        self._is_due = self._hooks.listeners.any_scheduled("needs_loss_graph", loop.epoch, loop.step)
        # Read now, since under FSDP2 the parameters are gathered copies without gradients before the backward pass.
        self._parameters = dict(self._task.model.named_parameters()) if self._is_due else {}

    def record(self, loop: LoopState, loss: Tensor, divisor: float, *, is_scaled: bool) -> None:
        """Append the description of the pass that starts next; the trainer divides the loss by ``divisor`` itself."""
        if not self._is_due:
            self._record_nonfinite(loop, loss, is_scaled=is_scaled)
            return
        described = self._described(loss, is_scaled=is_scaled)
        index, names = len(loop.backward_passes), tuple[str, ...]()
        try:
            # Between the passes of a step FSDP2 may keep gradients elsewhere than in ``.grad``.
            if index == 0 or (index == 1 and not self._task.ranks.shards):
                names = with_gradient(self._parameters)
        except Exception as error:
            self._hooks.leave_out_needing("needs_loss_graph", error)
            self._is_due, loop.backward_passes = False, ()
            return
        record = described._replace(
            divisor=described.divisor * divisor,
            divisions=described.divisions if divisor == 1 else (divisor, *described.divisions),
            leftover_gradients=names if index == 0 else (),
            accumulated_gradients=names if index == 1 else (),
        )
        loop.backward_passes = (*loop.backward_passes, record)

    def _record_nonfinite(self, loop: LoopState, loss: Tensor, *, is_scaled: bool) -> None:
        """Describe the first loss that is not finite, at other steps, too; reading an accelerator's would wait."""
        if not self.is_needed or self._was_nonfinite or type(loss) is not Tensor or loss.ndim or not loss.is_cpu:
            return
        if not math.isfinite(loss.item()):
            self._was_nonfinite = True
            loop.backward_passes = (*loop.backward_passes, self._described(loss, is_scaled=is_scaled))

    def _described(self, loss: Tensor, *, is_scaled: bool) -> BackwardPass:
        """Return the description of a loss, without facts if its graph cannot be read: other checks do not need it."""
        try:
            return describe_loss(loss, is_scaled=is_scaled)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                reason = f"{type(error).__name__}: {error}"
                warn(f"The graph of the loss cannot be read ({reason}), so checks of it are left out.", RunNotice)
            return BackwardPass()


@torch.no_grad()
def with_gradient(parameters: dict[str, nn.Parameter]) -> tuple[str, ...]:
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
