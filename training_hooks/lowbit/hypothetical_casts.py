"""What narrow formats would lose of gradients, weights and inputs of layers that are in full precision."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from loopscope.lowbit.casts import Cast, largest_magnitudes
from loopscope.state import trainable, whole
from torch import Tensor, nn

from .cast_losses import losses
from .overflow_ledger import Ledger

SUBJECTS = ("gradients", "weights", "activations")


def tensors_of(model: nn.Module, subject: str) -> dict[str, Tensor]:
    """Return the gradients or weights of the trained parameters by name, each a real and whole tensor."""
    found: dict[str, Tensor] = {}
    for name, parameter in trainable(model).items():
        tensor = parameter.grad if subject == "gradients" else parameter
        if tensor is not None and tensor.is_floating_point():
            found[name] = whole(tensor.detach())
    return found


class HypotheticalCasts:
    """Casts tensors in several ways, keeps what was lost and throws the results away.

    Rules with a history scale by the largest magnitudes of the same tensor when it was last looked at.

    Args:
        casts: the ways, each a format under a scaling rule.
        subjects: some of ``SUBJECTS``.
    """

    def __init__(self, casts: Sequence[Cast], subjects: Sequence[str]) -> None:
        self.casts = list(casts)
        self.subjects = list(subjects)
        self._delay = max(cast.scaling_rule.history for cast in casts)
        self._histories: dict[str, Tensor] = {}

    def ledger(self, subject: str, model: nn.Module) -> Ledger:
        """Return an empty ledger for the questions about a subject, whose roles are ``<subject>/<format>/<rule>``.

        Activations, which differ from rank to rank, are the inputs of the modules with a trained matrix of their own.
        """
        roles = [f"{subject}/{label(cast)}" for cast in self.casts]
        if subject == "activations":
            own = {name: module.parameters(recurse=False) for name, module in model.named_modules()}
            layers = [name for name, values in own.items() if any(v.ndim > 1 and v.requires_grad for v in values)]
            return Ledger(layers, roles, shared=True)
        real = [name for name, parameter in trainable(model).items() if parameter.is_floating_point()]
        return Ledger(real, roles)

    def ask(self, subject: str, tensors: Mapping[str, Tensor], ledger: Ledger) -> None:
        """Count what each cast would lose of each tensor."""
        dense = {name: each if each.layout is torch.strided else each.to_dense() for name, each in tensors.items()}
        past = [self._histories.get(f"{subject}/{name}") for name in dense]
        for name, found in zip(dense, losses(list(dense.values()), self.casts, past), strict=True):
            for cast, counts in zip(self.casts, found, strict=True):
                ledger.add(name, f"{subject}/{label(cast)}", counts)
        if self._delay:
            self._histories |= {
                f"{subject}/{name}": _appended(earlier, tensor, self._delay)
                for (name, tensor), earlier in zip(dense.items(), past, strict=True)
            }

    def state_dict(self) -> dict[str, Any]:
        """Return the largest magnitudes of the last steps, for the rules with a history."""
        return dict(self._histories)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned, leaving out histories of another length."""
        self._histories = {name: history for name, history in state.items() if len(history) == self._delay}

    def reset(self) -> None:
        """Forget the largest magnitudes of the last steps."""
        self._histories.clear()


def label(cast: Cast) -> str:
    """Return ``<format>/<rule>``."""
    return f"{cast.format}/{cast.rule}"


def _appended(earlier: Tensor | None, values: Tensor, length: int) -> Tensor:
    """Return the largest magnitudes of the last ``length`` tensors, this one's at the end; zeros are none."""
    before = values.new_zeros(length) if earlier is None else earlier.to(values.device)
    return torch.cat([before[1:], largest_magnitudes(values, None).to(before.dtype).reshape(1)])
