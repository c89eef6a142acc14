"""What casts would do to a model that trains without them: the tensors that are asked about, and the answers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from loopscope import Remembered
from loopscope.hooks import Remembering
from loopscope.lowbit import has_own_weight, known_matrices
from loopscope.lowbit.casts import Cast, largest_magnitudes
from loopscope.state import trainable, unsharded
from torch import Tensor, nn

from .cast_losses import losses
from .overflow_ledger import Ledger, Page
from .product_errors import EXPONENTS, KEPT, LOWEST, PRODUCTS, exponents, operands, product_errors

OUTPUT = "output_gradients"


def linear_layers(model: nn.Module) -> dict[str, tuple[nn.Module, bool]]:
    """Return the modules whose output is one product with their weight, and whether that lies transposed (in, out)."""
    found = {name: each for name, each in known_matrices(model).items() if each.key in ("", "weight")}
    own = {name: each for name, each in found.items() if has_own_weight(each.owner)}
    return {name: (each.owner, each.key == "weight") for name, each in own.items() if each.weight.ndim == 2}


def with_computed_weights(model: nn.Module) -> list[str]:
    """Name the linear layers whose weights are computed from other parameters, by ``prune`` or ``weight_norm`` say."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return [name for name, layer in layers.items() if not has_own_weight(layer)]


def tensors_of(model: nn.Module, subject: str) -> dict[str, Tensor]:
    """Return the gradients or weights of the trained parameters by name, each a real and whole tensor."""
    found = {name: each.grad if subject == "gradients" else each for name, each in trainable(model).items()}
    return {
        name: unsharded(each.detach()) for name, each in found.items() if each is not None and each.is_floating_point()
    }


class HypotheticalCasts(Remembering):
    """Casts tensors in several ways, keeps what was lost and throws the results away.

    Rules with a history scale by the largest magnitudes of the same tensor when it was last looked at.
    """

    _histories = Remembered(dict[str, Tensor])
    """The largest magnitudes of the last steps, for the rules with a history; of a rank's rows they are its own."""
    _beside = Remembered(dict[str, Tensor], saved=False)
    _products = Remembered(list[list[Tensor]], saved=False)

    def __init__(self, casts: Sequence[Cast], subjects: Sequence[str]) -> None:
        self.casts, self.subjects = list(casts), list(subjects)
        self._delay = max(cast.scaling_rule.history for cast in casts)

    def roles(self, subject: str) -> list[str]:
        """Return what is asked about a subject: ``<subject>/<format>/<rule>``, of output gradients by product."""
        uses = [f"/{product}" for product in PRODUCTS[1:]] if subject == OUTPUT else [""]
        return [f"{subject}/{label(cast)}{use}" for use in uses for cast in self.casts]

    def ledger(self, subject: str, model: nn.Module) -> Ledger:
        """Return an empty ledger for the questions about a subject.

        Activations, which differ from rank to rank, are the inputs of the modules with a trained matrix of their own;
        output gradients, which do too, are those of linear layers.
        """
        roles = self.roles(subject)
        if subject == OUTPUT:
            return Ledger(list(linear_layers(model)) if trainable(model) else [], roles, shared=True)
        if subject == "activations":
            own = {name: module.parameters(recurse=False) for name, module in model.named_modules()}
            layers = [name for name, values in own.items() if any(v.ndim > 1 and v.requires_grad for v in values)]
            return Ledger(layers, roles, shared=True)
        real = [name for name, parameter in trainable(model).items() if parameter.is_floating_point()]
        return Ledger(real, roles)

    def clear(self) -> None:
        """Forget what was noted beside the counts in the step in progress."""
        self._beside.clear()
        self._products.clear()

    def ask(self, subject: str, tensors: Iterable[tuple[str, Tensor]], ledger: Ledger, use: str = "") -> None:
        """Count what each cast would lose of each tensor, in one ``use`` of it if it has several."""
        named = [(name, each if each.layout is torch.strided else each.to_dense()) for name, each in tensors]
        past = [self._histories.get(f"{subject}/{name}{use}") for name, _ in named]
        for (name, _), found in zip(named, losses([each for _, each in named], self.casts, past), strict=True):
            for cast, counts in zip(self.casts, found, strict=True):
                ledger.add(name, f"{subject}/{label(cast)}{use}", counts)
        for cast in self.casts:
            scales = [cast.scales(each, earlier).flatten() for (_, each), earlier in zip(named, past, strict=True)]
            if scales:
                self._note(f"{subject}/{label(cast)}{use}", exponents(torch.cat(scales)))
        if not self._delay:
            return
        for name, tensor in named:
            earlier = self._histories.get(f"{subject}/{name}{use}")
            before = tensor.new_zeros(self._delay) if earlier is None else earlier.to(tensor.device)  # zeros are none
            newest = largest_magnitudes(tensor, None).to(before.dtype).reshape(1)
            self._histories[f"{subject}/{name}{use}"] = torch.cat([before[1:], newest])

    def keep_products(self, x: Tensor, weight: Tensor, gradient: Tensor) -> None:
        """Keep what a layer multiplies until :meth:`compare_products`, or until it is much."""
        self._products.append(operands(x, weight, gradient))
        if sum(matrix.numel() for layer in self._products for matrix in layer) > KEPT:
            self.compare_products()

    def compare_products(self) -> None:
        """Note how far each cast would put the products of the layers that were kept off."""
        if self._products:
            for cast, table in zip(self.casts, product_errors(self._products, self.casts), strict=True):
                self._note(label(cast), table.flatten())
            self._products.clear()

    def _note(self, name: str, numbers: Tensor) -> None:
        self._beside[name] = self._beside[name] + numbers if name in self._beside else numbers

    def beside(self, subject: str) -> Tensor:
        """Return what was noted of a subject: the exponents of each role, and of output gradients the products."""
        shapes = {role: EXPONENTS for role in self.roles(subject)}
        shapes |= {label(cast): 3 * len(PRODUCTS) for cast in self.casts if subject == OUTPUT}
        noted = [self._beside.get(name, torch.zeros(size, dtype=torch.float64)) for name, size in shapes.items()]
        return torch.cat([each.to(noted[0].device) for each in noted])

    def values(self, subject: str, page: Page) -> dict[str, Any]:
        """Return what a page says beside its counts."""
        found: dict[str, Any] = {}
        roles = self.roles(subject)
        counts, products = np.split(page.beside, [len(roles) * EXPONENTS])
        for role, row in zip(roles, counts.reshape(len(roles), EXPONENTS), strict=True):
            used = np.flatnonzero(row).tolist()
            found[f"scale_exponents_of/{role}"] = {str(LOWEST + index): int(row[index]) for index in used}
        for cast, table in zip(self.casts, products.reshape(-1, len(PRODUCTS), 3), strict=False):
            for product, (error, cosine, number) in zip(PRODUCTS, table.tolist(), strict=True):
                role = f"{product}/{label(cast)}"
                found[f"product_error_of/{role}"] = error / number if number else math.nan
                found[f"product_cosine_of/{role}"] = cosine / number if number else math.nan
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned, leaving out histories of another length."""
        super().load_state_dict(state)
        self._histories = {name: history for name, history in self._histories.items() if len(history) == self._delay}


def label(cast: Cast) -> str:
    """Return ``<format>/<rule>``."""
    return f"{cast.format}/{cast.rule}"
