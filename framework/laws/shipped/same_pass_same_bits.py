"""The law that a pass, repeated with the same random numbers, gives the same bits."""

import torch
from torch import Tensor

from ...errors import listed
from ..law import Law, Outcome, broken, holds
from ..trial import Trial


class SamePassSameBits(Law):
    """Repeat a pass from one state of the training, and repeat it without a roll-back of the model in between.

    A difference by state in registered buffers, such as those of spectral normalisation, is declared: checkpoints
    contain it.
    """

    name = "same_pass_same_bits"
    statement = "the same pass twice gives the same bits"
    remedy = "draw from torch's generators, keep no state between passes, and use deterministic kernels"

    def check(self, trial: Trial) -> Outcome:
        """Compare the outputs of passes bit for bit."""
        one, other = (trial.evaluate(needs_loss=False).outputs for _ in range(2))
        if difference := _largest(one, other):
            return broken(f"two passes from one state differ by up to {difference:.1e}")
        one, other = self._in_a_row(trial, restores_buffers=False)
        if not (difference := _largest(one, other)):
            return holds()
        one, other = self._in_a_row(trial, restores_buffers=True)
        buffers = [name for name, _ in trial.model.named_buffers()]
        if not _largest(one, other):
            return holds(f"apart from state in buffers: {listed(buffers, 3)}")
        return broken(f"a pass leaves state that is in no buffer: the next one differs by up to {difference:.1e}")

    def _in_a_row(self, trial: Trial, *, restores_buffers: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs of two passes, one after the other."""
        results = []
        with trial.branch(), torch.no_grad():
            buffers = {item: item.detach().clone() for item in trial.model.buffers()}
            for _ in range(2):
                trial.step.streams.restore()
                replay = trial.step.replay(needs_loss=False)
                results.append([item.detach().clone() for item in replay.outputs])
                for item, copy in buffers.items() if restores_buffers else ():
                    item.copy_(copy)
        return results[0], results[1]


def _largest(first: list[Tensor], second: list[Tensor]) -> float:
    """Return the largest difference of outputs; the smallest float if only their bits differ, and 0 if none does."""
    pairs = [
        (one, other)
        for one, other in zip(first, second, strict=True)
        if not torch.equal(one.nan_to_num(), other.nan_to_num())
    ]
    differences = [float((one.double() - other.double()).abs().max()) for one, other in pairs]
    return max([*differences, 1e-300 if pairs else 0.0])
