"""The law that ranks together have the gradient of their joint batch."""

import torch
import torch.distributed as dist

from ..law import Law, LawRegistry, Outcome, broken, holds, not_checked
from ..recorded_step import Constant
from ..trial import Trial, distance

SCALINGS = {"div", "truediv", "true_divide", "divide", "mul", "rmul", "multiply", "rtruediv"}
TOLERANCE = 1e-3
"""Relative; sums over ranks round differently, and mistakes of a divisor are larger."""


@LawRegistry.register
class RanksAgree(Law):
    """Compare the gradient after the reduction with the mean over all ranks' rows, and between ranks."""

    name = "ranks_agree"
    statement = "ranks have the gradient of their joint batch"
    remedy = "average gradients once over all ranks, by DistributedDataParallel, and weight uneven shards by their rows"

    def check(self, trial: Trial) -> Outcome:
        """Compute each rank's gradient again, and average it by rows."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
            return not_checked("one process trains")
        try:
            step = trial.loss_step()
            local = trial.evaluate(gradients=True).gradients if len(trial.steps) == 1 else {}
            weight = float(_terms(trial)) if step else 0.0
            problem = "" if local else "the step has several backward passes"
        except Exception as error:  # every rank must reach the exchange below
            local, weight, problem = {}, 0.0, str(error)
        parameters = {name: item for name, item in trial.model.named_parameters() if item.requires_grad}
        reduced = {
            name: torch.zeros_like(item) if item.grad is None else item.grad for name, item in parameters.items()
        }
        ours = torch.cat([reduced[name].detach().double().flatten() for name in parameters])
        own = torch.cat([local[name].double().flatten() for name in parameters]) if local else torch.zeros_like(ours)
        problems: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        gathered: list[tuple[float, torch.Tensor, torch.Tensor]] = [(0.0, own, ours)] * dist.get_world_size()
        dist.all_gather_object(gathered, (weight, own.cpu(), ours.cpu()))
        size = max(float(item[2].norm()) for item in gathered)
        if max(distance(item[2], gathered[0][2]) for item in gathered) > TOLERANCE * size:
            return broken("the gradients of the ranks differ after the backward pass")
        if any(problems):
            return not_checked(next(filter(None, problems)))
        if _has_own_divisor(trial):
            return holds("for equal gradients; the loss divides by a number that it does not compute")
        total = sum(item[0] for item in gathered)
        joint = torch.stack([item[1] * (item[0] / total) for item in gathered]).sum(0)
        difference = distance(joint, gathered[0][2])
        if difference > TOLERANCE * max(size, float(joint.norm())):
            ratio = size / max(float(joint.norm()), 1e-300)
            part = difference / size
            return broken(f"the reduced gradient is {part:.1%} off the joint one, and {ratio:.3g} times as long")
        return holds()


def _terms(trial: Trial) -> int:
    """Return the number of terms in the mean of the loss: valid integer targets, otherwise rows."""
    step = trial.step
    for index in sorted(step.constants_of_calls()):
        target = step.constants[index]
        if index in trial.layout.layouts and not target.is_floating_point() and target.dtype is not torch.bool:
            return int((target >= 0).sum())
    return trial.rows


def _has_own_divisor(trial: Trial) -> bool:
    """Return whether the loss is multiplied or divided by a number, such as the tokens of all ranks together."""
    step = trial.step
    for call in step.calls:
        if not call.is_pass and getattr(call.function, "__name__", "").strip("_i") in SCALINGS:
            for item in step.items_of(call):
                is_scalar = isinstance(item, Constant) and not step.constants[item.index].ndim
                if is_scalar or isinstance(item, (int, float)):
                    return True
    return False
