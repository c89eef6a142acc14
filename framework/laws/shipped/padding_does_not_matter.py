"""The law that the content of padded positions changes nothing."""

from contextlib import suppress

import torch
from torch import Tensor

from ..law import Law, Outcome, broken, holds, not_checked
from ..padding import Padded, marks_ends, scores_padding, sees_embedded_padding, sees_padding
from ..rows import is_mask
from ..trial import TIMES_NOISE, Trial, distance

SCORED = "the loss of outputs at padded positions"


class PaddingDoesNotMatter(Law):
    """Put other content into masked positions, and compare the outputs of all other positions, and the loss."""

    name = "padding_does_not_matter"
    statement = "padded positions do not matter"
    remedy = "pass a mask to attention and pooling, with the polarity that they expect, and ignore padding in the loss"

    def check(self, trial: Trial) -> Outcome:
        """Find the mask and compare."""
        found = self._padded(trial)
        if found is None:
            return self._without_mask(trial)
        index, padded = found
        tokens = trial.inputs[index]
        changed = tokens.clone()
        other = _other_content(tokens, padded)
        changed[padded] = other[padded]
        if torch.equal(changed, tokens):
            return not_checked("no position is padded")
        outcome = self._compared(trial, tokens, padded, {index: changed})
        is_of_positions = outcome.evidence.startswith(SCORED)
        if outcome.verdict == "broken" and not is_of_positions and marks_ends(tokens, padded):
            with suppress(Exception):  # of a model whose sequences have a fixed length
                return outcome if sees_padding(trial, Padded(index, padded)) else holds()
        return outcome

    def _compared(self, trial: Trial, tokens: Tensor, padded: Tensor, changed: dict[int, Tensor]) -> Outcome:
        """Compare outputs and loss with those of other content in padded positions."""
        before, after = (
            trial.evaluate(value, train=False, needs_loss=not trial.step.problem) for value in (None, changed)
        )
        for one, two in zip(before.outputs, after.outputs, strict=True):
            if one.shape[:2] == tokens.shape[:2] and one.is_floating_point():
                kept = ~padded
                if not torch.equal(one[kept], two[kept]):
                    size = float((one[kept].double() - two[kept].double()).abs().max())
                    return self._judged(trial, size, f"an output at a valid position changes by {size:.1e}", one, kept)
            elif one.ndim and len(one) == trial.rows and one.is_floating_point() and not torch.equal(one, two):
                size = float((one.double() - two.double()).abs().max())
                return self._judged(trial, size, f"an output changes by {size:.1e}", one, None)
        if not trial.step.problem and (difference := distance(before.loss, after.loss)):
            noise = trial.loss_noise(before.loss)
            if difference > TIMES_NOISE * noise:
                has_positions = any(one.shape[:2] == tokens.shape[:2] for one in before.outputs)
                what = SCORED if has_positions else "the loss"
                return broken(f"{what} changes by {difference:.1e} with the content of padded positions")
        return holds()

    def _without_mask(self, trial: Trial) -> Outcome:
        """Take padding away from rows that end with one content, and look whether the loss scores it."""
        outcome = not_checked("no mask or lengths of padded sequences are among the inputs")
        for padded in Padded.of(trial):
            if scores_padding(trial, padded):
                return broken("the loss compares outputs at padded positions with padded targets")
            try:
                sentence = sees_padding(trial, padded)
            except Exception:  # of a model whose sequences have a fixed length
                sentence = sees_embedded_padding(trial, padded)
            if sentence:
                return broken(sentence)
            outcome = holds()
        return outcome

    def _judged(self, trial: Trial, size: float, sentence: str, output: Tensor, kept: Tensor | None) -> Outcome:
        """Return a violation unless the noise of rounding explains it, as for kernels that skip masked blocks."""
        position = next(
            place
            for place, item in enumerate(trial.evaluate(train=False, needs_loss=False).outputs)
            if item.shape == output.shape
        )

        def largest(seed: int) -> float:
            moved = trial.evaluate(move=seed, train=False, needs_loss=False).outputs[position]
            difference = (moved.double() - output.double()).abs()
            return float((difference if kept is None else difference[kept]).max())

        noise = max(largest(seed) for seed in range(3))
        return broken(sentence) if size > TIMES_NOISE * noise else holds()

    def _padded(self, trial: Trial) -> tuple[int, Tensor] | None:
        """Return the padded sequence and its padded positions, by a mask or by lengths among the inputs."""
        names = trial.names
        sequences = [
            (index, tensor)
            for index, tensor in trial.inputs.items()
            if tensor.ndim >= 2
            and tensor.shape[1] > 2
            and len(tensor) == trial.rows
            and not is_mask(tensor)
            and "label" not in names.get(index, "")
        ]
        if not sequences:
            return None
        index, tokens = sequences[0]
        for other, tensor in trial.inputs.items():
            name = names.get(other, "").lower()
            if (
                tensor.shape == tokens.shape[:2]
                and is_mask(tensor)
                and bool((tensor == 0).any())
                and bool((tensor != 0).any())
            ):
                return index, _polarised(tensor != 0, tokens, name)
            if (
                "len" in name
                and tensor.ndim == 1
                and len(tensor) == trial.rows
                and int(tensor.max()) <= tokens.shape[1]
            ):
                positions = torch.arange(tokens.shape[1], device=tokens.device)
                return index, positions[None] >= tensor.to(tokens.device)[:, None]
        return None


def _polarised(mask: Tensor, tokens: Tensor, name: str) -> Tensor:
    """Return the padded positions: those that all have one content, otherwise by the name of the mask."""
    flat = tokens.reshape(*tokens.shape[:2], -1)
    uniform = [len(torch.unique(flat[group], dim=0)) == 1 for group in (mask, ~mask)]
    if uniform[0] != uniform[1]:
        return mask if uniform[0] else ~mask
    return mask if "pad" in name else ~mask


def _other_content(tokens: Tensor, padded: Tensor) -> Tensor:
    """Return content of valid positions, for each position: that of the next row or of the first valid one."""
    valid = tokens[~padded]
    picks = torch.arange(tokens[..., 0].numel() if tokens.ndim > 2 else tokens.numel(), device=tokens.device) % len(
        valid
    )
    return valid[picks].reshape(tokens.shape)
