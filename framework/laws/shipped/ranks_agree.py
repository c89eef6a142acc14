"""The law that ranks together have the gradient of their joint batch."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ...errors import listed
from ..law import Law, Outcome, broken, holds, not_checked
from ..recorded_step import RecordedCall
from ..trial import Trial, distance
from ..values import tensors_within

TOLERANCE = 1e-3
"""Relative; sums over ranks round differently, and mistakes of a divisor are larger."""
LEAST_MISSING = 0.02
"""The part of the joint gradient that must be missing."""


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
        if sentence := _different_weights(parameters):
            return broken(sentence)
        problems: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        gathered: list[tuple[float, torch.Tensor, torch.Tensor]] = [(0.0, own, ours)] * dist.get_world_size()
        dist.all_gather_object(gathered, (weight, own.cpu(), ours.cpu()))
        size = max(float(item[2].norm()) for item in gathered)
        if max(distance(item[2], gathered[0][2]) for item in gathered) > TOLERANCE * size:
            return broken("the gradients of the ranks differ after the backward pass")
        if not any(problems) and size and all(torch.equal(item[1], gathered[0][1]) for item in gathered):
            return broken(
                "all ranks have the same gradient, bit for bit, before it is averaged: they get the same rows"
            )
        if any(problems):
            return not_checked(next(filter(None, problems)))
        if missing := _missing_part(trial, ours, own):
            return broken(missing)
        if trial.step.scalings():
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


def _different_weights(parameters: Mapping[str, torch.Tensor]) -> str:
    """Return a sentence if ranks with modules of the same shapes have different weights."""
    if any(isinstance(item, DTensor) for item in parameters.values()):
        return ""  # shards
    weights = [(name, tuple(item.shape), float(item.detach().double().sum())) for name, item in parameters.items()]
    gathered: list[list[tuple[str, tuple[int, ...], float]]] = [weights] * dist.get_world_size()
    dist.all_gather_object(gathered, weights)
    if any([item[:2] for item in one] != [item[:2] for item in weights] for one in gathered):
        return ""
    names = [item[0] for position, item in enumerate(weights) if len({one[position][2] for one in gathered}) > 1]
    return f"the weights of the ranks differ: {listed(names, 3)}" if names else ""


def _missing_part(trial: Trial, reduced: torch.Tensor, own: torch.Tensor) -> str:
    """Return a sentence if losses compare values of other ranks, without the gradients with respect to them.

    Such a value is a constant of this rank that another rank has computed from its outputs in the same step. All ranks
    must call this function.
    """
    step, rank, world = trial.step, dist.get_rank(), dist.get_world_size()
    mine = {
        index: step.constants[index].detach().cpu()
        for index in step.constants_of_calls()
        if step.constants[index].is_floating_point() and step.constants[index].numel() > 1
    }
    values: list[torch.Tensor] = []

    def keep(call: RecordedCall, arguments: Any, options: Any) -> None:
        values.extend(item for item in tensors_within((arguments, options)) if item.requires_grad and item.numel() > 1)

    with trial.branch(), torch.enable_grad():
        step.streams.restore()
        leaves = {index: item.clone().requires_grad_() for index, item in mine.items()}
        loss = step.replay(
            {index: leaf.to(trial.step.constants[index].device) for index, leaf in leaves.items()}, observe=keep
        ).loss
        given = list(leaves.values())
        gradients = torch.autograd.grad(loss, given, allow_unused=True, retain_graph=True) if given else ()
        wanted = [
            (mine[index], gradient) for index, gradient in zip(leaves, gradients, strict=True) if gradient is not None
        ]
        everything: list[Any] = [wanted] * world
        dist.all_gather_object(everything, wanted)
        parameters = [item for item in trial.model.parameters() if item.requires_grad]
        missing = torch.zeros_like(own)
        for other, pairs in enumerate(everything):
            for constant, gradient in pairs if other != rank else ():
                match = next(
                    (
                        item
                        for item in values
                        if item.shape == constant.shape and torch.equal(item.detach().cpu(), constant)
                    ),
                    None,
                )
                if match is None or isinstance(match, torch.nn.Parameter):
                    continue
                found = torch.autograd.grad(
                    match, parameters, gradient.to(match.device), allow_unused=True, retain_graph=True
                )
                missing += torch.cat(
                    [
                        (torch.zeros_like(item) if part is None else part).double().flatten()
                        for item, part in zip(parameters, found, strict=True)
                    ]
                )
    parts: list[torch.Tensor] = [missing] * world
    dist.all_gather_object(parts, missing.cpu())
    joint = reduced.cpu() * world + torch.stack(parts).sum(0)
    if not float(torch.stack(parts).norm()):
        return ""
    factor = float(joint @ reduced.cpu() / (reduced.cpu() @ reduced.cpu()).clamp(min=1e-300))
    part = distance(joint, factor * reduced.cpu()) / max(float(joint.norm()), 1e-300)
    if part < LEAST_MISSING:  # each rank has the loss of all rows, and its own part of the gradient
        return ""
    return f"the loss uses outputs of other ranks without their gradients: {part:.1%} of the joint gradient are missing"
