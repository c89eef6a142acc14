"""The law that an evaluation changes nothing, and that the training returns to train mode."""

from contextlib import suppress
from inspect import signature
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...errors import listed
from ..law import Law, Outcome, broken, holds
from ..trial import Trial


class EvaluationChangesNothing(Law):
    """Run a pass in eval mode, and compare weights and buffers before and after; no dropout may be active.

    The first evaluation of the script itself is compared in the same way, if the training reaches it.
    """

    name = "evaluation_changes_nothing"
    statement = "evaluation changes nothing, and train mode comes back"
    remedy = "call model.eval() before and model.train() after it, pass training=self.training, update no statistics"

    def check(self, trial: Trial) -> Outcome:
        """Evaluate the batch in eval mode."""
        step = trial.step
        with trial.branch(), torch.no_grad():
            for module in trial.model.modules():
                module.training = False
            tensors = dict(trial.model.state_dict(keep_vars=True))
            before = {name: item.detach().clone() for name, item in tensors.items() if isinstance(item, torch.Tensor)}
            step.streams.restore()
            with _ActiveDropout() as dropout:
                step.replay(needs_loss=False)
            changed = [name for name, item in before.items() if not torch.equal(item, tensors[name])]
        if changed:
            return broken(f"a pass in eval mode changes {listed(changed, 3)}")
        if dropout.name:
            return broken(f"a pass in eval mode calls {dropout.name} with active dropout")
        return holds()


class _ActiveDropout(TorchFunctionMode):
    """Notes a function that drops elements."""

    name = ""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        options = kwargs or {}
        with suppress(TypeError, ValueError):  # a function without a signature, or arguments that do not fit
            if name.endswith("dropout"):
                given = signature(func).bind(*args, **options)
                given.apply_defaults()
                if given.arguments.get("training", True) and given.arguments.get("p", 0.5):
                    self.name = name
            elif name == "scaled_dot_product_attention" and (args[4] if len(args) > 4 else options.get("dropout_p")):
                self.name = name
        return func(*args, **options)
