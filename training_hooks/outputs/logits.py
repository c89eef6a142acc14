"""The logits in a model's output, and measures of their rows, which are computed in blocks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from loopscope.tensors import unsharded
from torch import Tensor

BLOCK_ELEMENTS = {"cpu": 2**18}
"""Number of logits in a block by type of device; a block of 1 MB stays in the cache of a CPU."""
MORE_ELEMENTS = 2**24  # of other devices, for which small kernels are slow
LOWEST = -1000.0  # exp of it is 0 in float32 and float64


def find_logits(output: Any) -> tuple[Tensor | None, bool]:
    """Return the logits in a model's output, or ``None``, and whether the output calls them logits.

    They are the output itself, its entry ``logits``, or the first tensor in a tuple that has at least two dimensions.
    """
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(named, Tensor):
        return (named.detach() if _has_classes(named) else None), True
    if isinstance(output, Tensor):
        return (output.detach() if _has_classes(output) else None), False
    if isinstance(output, (tuple, list)):
        tensors = [item for item in output if isinstance(item, Tensor) and _has_classes(item)]
        return (tensors[0].detach() if tensors else None), False
    return None, False


def _has_classes(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.ndim >= 2 and tensor.shape[-1] >= 2 and not tensor.is_nested


def row_blocks(logits: Tensor, elements: int | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows of logits, shape (…, classes), in blocks of float32 or float64, each with its place.

    The place is that of the block's rows among all rows, flattened. Only one block is converted or copied at a time.

    Args:
        logits: the logits, of any layout.
        elements: number of logits in a block; by default as the device needs it.
    """
    elements = elements or BLOCK_ELEMENTS.get(logits.device.type, MORE_ELEMENTS)
    yield from _blocks(logits, 0, max(1, elements // logits.shape[-1]))


def _blocks(logits: Tensor, first: int, rows: int) -> Iterator[tuple[slice, Tensor]]:
    classes = logits.shape[-1]
    try:
        flat = logits.view(-1, classes)
    except RuntimeError:  # other dimensions lie between the rows, so all rows together would be a copy
        part_rows = logits[0].numel() // classes
        for index, part in enumerate(logits):
            yield from _blocks(part, first + index * part_rows, rows)
        return
    for start in range(0, len(flat), rows):
        block = unsharded(flat[start : start + rows])
        place = slice(first + start, first + start + len(block))
        yield place, block if block.dtype == torch.float64 else block.float()


@dataclass(frozen=True)
class RowMeasures:
    """Measures of R rows of logits, each of shape (R,)."""

    top_logit: Tensor
    choice: Tensor
    """The class with the largest logit."""
    log_sum: Tensor
    """ln Σ_c exp(x_c − max x)."""
    entropy: Tensor
    """−Σ_c p_c ln p_c, p the softmax of the row."""

    @classmethod
    def of(cls, block: Tensor) -> "RowMeasures":
        """Return the measures of a block of shape (R, classes)."""
        top_logit, choice = block.max(-1)
        # Logits of −∞ are excluded classes: p ln p is 0 there, and the floor avoids 0·∞.
        shifted = block.sub(top_logit[:, None]).clamp_(min=LOWEST)
        exponentials = shifted.exp()
        total = exponentials.sum(-1)
        log_sum = total.log()
        # p_c = e_c / Z', ln p_c = (x_c − max) − ln Z', so the entropy is ln Z' − Σ e_c·(x_c − max) / Z'.
        # Rounding may take it below 0.
        entropy = (log_sum - shifted.mul_(exponentials).sum(-1) / total).clamp(min=0)
        return cls(top_logit, choice, log_sum, entropy)

    @property
    def log_z(self) -> Tensor:
        """The logarithm of Z = Σ_c exp x_c."""
        return self.top_logit + self.log_sum

    @property
    def confidence(self) -> Tensor:
        """The largest probability, that of the choice."""
        return self.log_sum.neg().exp()

    def losses(self, block: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each row with its target; rows with a negative target have a meaningless value.

        Without the large parts of ln Z and x_target, which would cancel: ln Σ exp(x − max) − (x_target − max).
        """
        target_logits = block.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
        return self.log_sum - (target_logits - self.top_logit)
