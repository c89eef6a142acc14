"""The law that rounding errors of the gradient are below the noise of the batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from math import prod
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..law import Law, Outcome, broken, holds, not_checked
from ..positions import equal_positions
from ..trial import Trial, distance

NARROW = (torch.float16, torch.bfloat16)
CASTS = {"half", "bfloat16", "float"}
UPDATES = 16
"""Updates with one gradient, after which also optimizers that keep small parts have changed a weight."""
MOST_LOST = 0.5
"""The part of the weights with a gradient that updates may leave."""


class PrecisionIsEnough(Law):
    """Compare loss and gradient with those of float64, and their error with the difference of the batch's halves."""

    name = "precision_is_enough"
    statement = "rounding errors are below the noise of the batch"
    remedy = (
        "use a GradScaler for float16, compute positions, softmax, sums and losses in float32, and keep weights in "
        "float32"
    )

    def check(self, trial: Trial) -> Outcome:
        """Compute the gradient in both precisions."""
        if outcome := _of_updates(trial):
            return outcome
        if sentence := equal_positions(trial):
            return broken(sentence)
        step = trial.loss_step()
        with trial.branch():
            wide = deepcopy(trial.model).double()
            for module in wide.modules():
                module.training = False
        pairs = dict(zip(trial.model.modules(), wide.modules(), strict=True))
        wide_parameters = dict(zip(map(id, trial.model.parameters()), wide.parameters(), strict=True))
        doubles = {
            index: wide_parameters.get(id(tensor), tensor.double())
            for index, tensor in enumerate(step.constants)
            if tensor.is_floating_point()
        }
        options: dict[str, Any] = {"modules": pairs, "autocast": False, "owner": wide, "mode": _wide_calls(trial)}
        exact = trial.evaluate(doubles, gradients=True, train=False, **options)
        one, other = trial.gradient(), exact.joint_gradient()
        if not one.isfinite().all():
            if prod(step.factors) > 1 and step.loss_value is not None and step.loss_value.isfinite():
                return not_checked("the scaled gradients overflow, and the scaler skips the step")
            if other.isfinite().all() and exact.loss.isfinite().all():
                return broken("loss or gradients are not finite, and finite in float64")
            return not_checked("the loss is not finite in float64 either")
        error, size = distance(one, other), float(other.norm())
        count = len(trial.bundles)
        bundles = torch.arange(count)
        halves = (
            [
                trial.evaluate(
                    trial.with_bundles(trial.bundles, half.repeat(2)), gradients=True, train=False
                ).joint_gradient()
                for half in (bundles[: count // 2], bundles[count // 2 :])
            ]
            if count % 2 == 0
            else []
        )
        # The halves' difference is twice the standard error of the batch's mean gradient.
        noise = distance(*halves) / 2 if halves else size
        if error > noise and error > 1e-3 * size:
            return broken(f"the gradient is {error / max(size, 1e-300):.1%} off that of float64")
        return holds(f"the gradient's error is {error / max(size, 1e-300):.1e}")


@contextmanager
def _wide_calls(trial: Trial) -> Iterator[None]:
    """Compute in float64, with the same random numbers as :meth:`.Trial.gradient`."""
    with WideCalls(), trial.equal_noise:
        yield


class WideCalls(TorchFunctionMode):
    """Computes in float64 what the body casts to other types, or makes in them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch with float64 in place of narrower types."""

        def wide(item: Any) -> Any:
            return torch.float64 if item in (*NARROW, torch.float32) else item

        name = getattr(func, "__name__", "")
        if name in CASTS:
            return args[0].double()
        result = func(
            *(wide(item) if isinstance(item, torch.dtype) else item for item in args),
            **{key: wide(item) if isinstance(item, torch.dtype) else item for key, item in (kwargs or {}).items()},
        )
        is_made = isinstance(result, torch.Tensor) and not any(isinstance(item, torch.Tensor) for item in args)
        return result.double() if is_made and result.dtype in (*NARROW, torch.float32) else result


def _of_updates(trial: Trial) -> Outcome | None:
    """Return a violation if updates of narrow weights are so small that these round to what they were."""
    weights = [
        item
        for item in trial.model.parameters()
        if item.dtype in NARROW and item.grad is not None and any(_trains(one, item) for one in trial.optimizers)
    ]
    if not weights or trial.number == 1:  # of a warm-up, for example
        return None
    with trial.branch(), torch.no_grad():
        for group in (group for optimizer in trial.optimizers for group in optimizer.param_groups):
            group["lr"] = max(group["lr"], group.get("initial_lr", 0.0))
        copies = [item.detach().clone() for item in weights]
        for _ in range(UPDATES):
            for optimizer in trial.optimizers:
                optimizer.step()
        pairs = [(item, copy, item.grad) for item, copy in zip(weights, copies, strict=True)]
        given = sum(int((grad != 0).sum()) for *_, grad in pairs if grad is not None)
        lost = sum(int(((grad != 0) & (item == copy)).sum()) for item, copy, grad in pairs if grad is not None)
    if lost > MOST_LOST * given:
        kind = str(weights[0].dtype).removeprefix("torch.")
        return broken(f"{lost / given:.0%} of the {kind} weights with a gradient are as before after {UPDATES} updates")
    return None


def _trains(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    return any(item is parameter for group in optimizer.param_groups for item in group["params"])
