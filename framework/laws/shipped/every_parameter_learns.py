"""The law that every trainable parameter gets a gradient and moves."""

from collections.abc import Iterable, Mapping

import torch
from torch.optim import Optimizer

from ...errors import listed
from ...observing import optimizers_over
from ..law import Law, Outcome, broken, holds, not_checked
from ..trial import Trial
from ..values import weight_of


class EveryParameterLearns(Law):
    """Make the update of the step, and look for trainable parameters without a gradient or without a change."""

    name = "every_parameter_learns"
    statement = "every trainable parameter has a gradient and moves"
    remedy = (
        "give the optimizer all parameters, keep layers in nn.ModuleList, look for detach, or freeze by requires_grad"
    )
    is_persistent = True

    def check(self, trial: Trial) -> Outcome:
        """Compare parameters before and after the update."""
        parameters = {name: item for name, item in trial.model.named_parameters() if item.requires_grad}
        learning = {name for name, item in parameters.items() if item.grad is not None and bool((item.grad != 0).any())}
        without = parameters.keys() - learning
        # The sum of the gradients of a bias is 0 where outputs are subtracted from each other.
        without -= {name for name in without if parameters[name].grad is not None and weight_of(name) in learning}
        if len(without) == len(parameters):
            loss = trial.step.loss_value
            if not parameters or trial.step.problem or loss is None or not loss.isfinite() or not loss:
                return not_checked("the step has no gradients")
            return broken("no parameter has a gradient", parameters)
        rates = [
            float(group["lr"]) for optimizer in trial.optimizers for group in optimizer.param_groups if "lr" in group
        ]
        owned = {id(item) for one in trial.optimizers for group in one.param_groups for item in group["params"]}
        still: set[str] = set()
        if trial.optimizers and any(rates):
            with trial.branch():
                before = {name: item.detach().clone() for name, item in parameters.items()}
                for optimizer in trial.optimizers:
                    optimizer.step()
                still = {name for name, item in parameters.items() if torch.equal(item, before[name])}
                still -= {name for name in still if name not in learning and name not in without}
        elif rates:
            return not_checked("the learning rate is 0")
        if stray := _stray_leaves(trial):
            shapes = listed([str(tuple(leaf.shape)) for leaf in stray], 3)
            return broken(f"parameters of no module of the model, shapes {shapes}: in no optimizer", {"stray"})
        idle = (without | still) - _with_copies(parameters, trial.optimizers)
        if not idle:
            return holds()
        lost = sorted(name for name in idle if id(parameters[name]) not in owned)
        names = lost or sorted(idle)
        reason = "in no optimizer" if lost else "without a gradient" if set(names) <= without else "without a change"
        # Only a missing gradient can be refuted by later steps, by its name.
        subjects = names if reason == "without a gradient" else [f"{reason}: {name}" for name in names]
        return broken(f"{listed(names, 3)}: {reason}", subjects)


def _with_copies(parameters: Mapping[str, torch.Tensor], optimizers: Iterable[Optimizer]) -> set[str]:
    """Return the parameters of which an optimizer trains copies, such as those in float32 of weights in bfloat16."""
    owned = [item for one in optimizers for group in one.param_groups for item in group["params"]]
    ids = set(map(id, owned))
    copies = [item.detach() for item in owned]
    return {
        name
        for name, item in parameters.items()
        if id(item) not in ids
        and any(one.shape == item.shape and torch.equal(one.to(item.dtype), item.detach()) for one in copies)
    }


def _stray_leaves(trial: Trial) -> list[torch.Tensor]:
    """Return parameters that the loss depends on, and neither the model nor an optimizer has."""
    if trial.step.problem:
        return []
    owned = {id(item) for one in trial.optimizers for group in one.param_groups for item in group["params"]}
    known = owned | {id(item) for item in trial.model.parameters()}
    stray = [leaf for leaf in trial.leaves() if id(leaf) not in known and isinstance(leaf, torch.nn.Parameter)]
    return [leaf for leaf in stray if not optimizers_over([leaf])]  # of another training, such as a discriminator's
