"""The law that an untrained model is not worse than a constant prediction."""

import torch
from torch import Tensor

from ..law import Law, LawRegistry, Outcome, broken, holds, not_checked
from ..recorded_step import Value
from ..trial import Trial

FACTOR = 1.5
"""The first loss may be this many times that of the best constant prediction; default initialisations reach 1.3."""
FITS = 100


@LawRegistry.register
class LossStartsAtChance(Law):
    """Compare the first loss with that of the best constant output, found by steps on the recorded loss."""

    name = "loss_starts_at_chance"
    statement = "the loss starts near that of a constant prediction"
    remedy = "look at initialisation (large logits), at mean and scale of the targets, and at a softmax before the loss"

    def __init__(self) -> None:
        self._is_late = False

    def check(self, trial: Trial) -> Outcome:
        """Try it at the first step only."""
        if self._is_late:
            return not_checked("")
        self._is_late = True
        step = trial.loss_step()
        if step.constants_of_calls() & set(step.constants_of_passes()):
            return not_checked("the targets are the inputs")
        floating = [value for value, item in step.outputs.items() if item.is_floating_point()]
        if len(step.passes) > 1 or len(floating) != 1 or step.loss in step.outputs:
            return not_checked("the loss is not computed from one output")
        output = step.outputs[floating[0]]
        if output.ndim < 1 or trial.layout.dimension or len(output) != trial.rows:
            return not_checked("the output has no entry per row")
        first = trial.evaluate(train=False).loss
        constant, is_bounded = self._best_constant(trial, floating[0], output)
        if not is_bounded:
            return not_checked("no constant output minimises the loss")
        targets = [item for item in step.constants_of_calls() if item in trial.layout.layouts]
        if any(not step.constants[index].is_floating_point() for index in targets):
            constant = max(constant, self._of_zeros(trial, floating[0], output))  # equal logits: ln C
        errors = torch.stack([self._half(trial, seed) for seed in range(8)])
        bar = float(errors.std())
        if float(first) > FACTOR * constant + 3 * bar and float(first) > constant + 0.1:
            return broken(
                f"the loss starts at {float(first):.4g}; a constant prediction has {constant:.4g} ± {bar:.1g}"
            )
        return holds(f"{float(first):.4g}, a constant prediction {constant:.4g}")

    def _best_constant(self, trial: Trial, value: Value, output: Tensor) -> tuple[float, bool]:
        """Return the loss of the best constant output, and whether it is a minimum."""
        step = trial.step
        width = output.shape[-1] if output.ndim > 1 else 1
        constant = torch.zeros(width, requires_grad=True, device=output.device)
        optimizer = torch.optim.LBFGS([constant], max_iter=FITS, line_search_fn="strong_wolfe")
        others = {key: item for key, item in step.outputs.items() if key != value}
        losses = []

        def closure() -> Tensor:
            full = constant.expand(output.shape).to(output.dtype)
            loss = step.replay(outputs={**others, value: full}).loss
            (constant.grad,) = torch.autograd.grad(loss, constant, allow_unused=True, materialize_grads=True)
            losses.append(float(loss.detach()))
            return loss.detach()

        with trial.branch(), torch.enable_grad():
            optimizer.step(closure)  # type: ignore[no-untyped-call]
        # Without a minimum, as for log-probabilities that are not normalised, the loss falls without end.
        slope = float(constant.grad.norm()) if constant.grad is not None else 0.0
        is_bounded = min(losses) > 0 and slope < 0.1 * abs(losses[0])
        return min(losses), is_bounded

    def _of_zeros(self, trial: Trial, value: Value, output: Tensor) -> float:
        with trial.branch(), torch.no_grad():
            return float(trial.step.replay(outputs={**trial.step.outputs, value: torch.zeros_like(output)}).loss)

    def _half(self, trial: Trial, seed: int) -> Tensor:
        """Return the loss with a random half of the rows twice."""
        order = torch.randperm(trial.rows, generator=torch.Generator().manual_seed(seed))
        half = order[: max(1, trial.rows // 2)]
        return trial.evaluate(trial.with_rows(half.repeat(2 + trial.rows % 2)[: trial.rows]), train=False).loss
