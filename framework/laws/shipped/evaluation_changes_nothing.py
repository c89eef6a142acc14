"""The law that an evaluation changes nothing, and that the training returns to train mode."""

import torch

from ...doctor.senses import ActiveDropout, DropoutCalls
from ...errors import listed
from ..law import Law, Outcome, broken, holds, not_checked
from ..recording import is_function
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
        if is_function(trial.model):
            return not_checked("the model is no module with an eval mode")
        dropout = ActiveDropout(set(), set())
        with trial.eval_pass(), torch.no_grad():
            tensors = dict(trial.model.state_dict(keep_vars=True))
            before = {name: item.detach().clone() for name, item in tensors.items() if isinstance(item, torch.Tensor)}
            with DropoutCalls(dropout, {*map(id, trial.model.modules())}):
                trial.step.replay(needs_loss=False)
            changed = [name for name, item in before.items() if not torch.equal(item, tensors[name])]
        if changed:
            return broken(f"a pass in eval mode changes {listed(changed, 3)}")
        if names := sorted(dropout.functions | dropout.unregistered):
            return broken(f"a pass in eval mode calls {listed(names, 3)} with active dropout")
        return holds()
