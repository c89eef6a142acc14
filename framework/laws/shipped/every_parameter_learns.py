"""The law that every trainable parameter gets a gradient and moves."""

from collections.abc import Collection, Iterable, Mapping

import torch

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
        copies = _owned(trial)
        owned = set(map(id, copies))
        still: set[str] = set()
        if trial.optimizers and any(rates):
            with trial.branch():
                before = {name: item.detach().clone() for name, item in parameters.items()}
                for optimizer in trial.optimizers:
                    optimizer.step()
                still = {name for name, item in parameters.items() if torch.equal(item, before[name])}
                still -= {name for name in still if name not in learning and name not in without}
                # Before a normalisation the gradient of a bias is 0 but for rounding, and may change nothing.
                still -= {
                    name for name in still if id(parameters[name]) in owned and weight_of(name) in learning - still
                }
        elif rates:
            return not_checked("the learning rate is 0")
        if stray := _stray_leaves(trial):
            shapes = listed([str(tuple(leaf.shape)) for leaf in stray], 3)
            return broken(f"parameters of no module of the model, shapes {shapes}: in no optimizer", {"stray"})
        idle = (without | still) - _with_copies(parameters, owned, copies)
        if not idle:
            return holds()
        lost = sorted(name for name in idle if id(parameters[name]) not in owned)
        names = lost or sorted(idle)
        reason = "in no optimizer" if lost else "without a gradient" if set(names) <= without else "without a change"
        # Only a missing gradient can be refuted by later steps, by its name.
        subjects = names if reason == "without a gradient" else [f"{reason}: {name}" for name in names]
        return broken(f"{listed(names, 3)}: {reason}", subjects)


def _owned(trial: Trial) -> list[torch.Tensor]:
    """Return the parameters of the optimizers."""
    return [item for one in trial.optimizers for group in one.param_groups for item in group["params"]]


def _with_copies(
    parameters: Mapping[str, torch.Tensor], owned: Collection[int], copies: Iterable[torch.Tensor]
) -> set[str]:
    """Return the parameters of which an optimizer trains copies, such as those in float32 of weights in bfloat16."""
    return {
        name
        for name, item in parameters.items()
        if id(item) not in owned
        and any(one.shape == item.shape and torch.equal(one.detach().to(item.dtype), item.detach()) for one in copies)
    }


def _is_weight(trial: Trial, leaf: torch.Tensor) -> bool:
    """Return whether a leaf is no input; of a model that is no module, any leaf that has no entry for each row."""
    return isinstance(leaf, torch.nn.Parameter) or (bool(trial.step.weights) and leaf.shape[:1] != (trial.rows,))


def _stray_leaves(trial: Trial) -> list[torch.Tensor]:
    """Return parameters that the loss depends on, and neither the model nor an optimizer has."""
    if trial.step.problem:
        return []
    known = {*map(id, _owned(trial)), *map(id, trial.model.parameters())}
    stray = [leaf for leaf in trial.leaves() if id(leaf) not in known and _is_weight(trial, leaf)]
    return [leaf for leaf in stray if not optimizers_over([leaf])]  # of another training, such as a discriminator's
