"""Hypothetical casts of the tensors of a model that trains without them, and their losses."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from loopscope import Remembered
from loopscope.hooks import Remembering
from loopscope.lowbit import castable_matrices, has_weight_parameter
from loopscope.lowbit.casts import Cast, largest_magnitudes
from loopscope.tensors import trainable, unsharded
from torch import Tensor, nn

from .cast_losses import losses
from .overflow_ledger import CountSums, StepCounts
from .product_errors import EXPONENTS, KEPT, LOWEST, PRODUCTS, exponents, operands, product_errors

OUTPUT = "output_gradients"


def linear_layers(model: nn.Module) -> dict[str, tuple[nn.Module, bool]]:
    """Return the modules whose output is one product with their weight, and whether that is stored as (in, out)."""
    matrices = {name: matrix for name, matrix in castable_matrices(model).items() if matrix.key in ("", "weight")}
    stored = {
        name: matrix
        for name, matrix in matrices.items()
        if has_weight_parameter(matrix.owner) and matrix.weight.is_floating_point()
    }
    return {name: (matrix.owner, matrix.key == "weight") for name, matrix in stored.items() if matrix.weight.ndim == 2}


def with_computed_weights(model: nn.Module) -> list[str]:
    """Return the names of linear layers with computed weights, for example by ``prune`` or ``weight_norm``."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return [name for name, layer in layers.items() if not has_weight_parameter(layer)]


def trained_tensors(model: nn.Module, subject: str) -> dict[str, Tensor]:
    """Return the gradients or weights of the trained parameters by name, real and unsharded."""
    tensors = {name: value.grad if subject == "gradients" else value for name, value in trainable(model).items()}
    return {
        name: unsharded(tensor.detach())
        for name, tensor in tensors.items()
        if tensor is not None and tensor.is_floating_point()
    }


class HypotheticalCasts(Remembering):
    """Casts tensors in several ways, records the losses and discards the results.

    Rules with a history scale by the largest magnitudes that the same tensor had in earlier measurements.
    """

    _histories = Remembered(dict[str, Tensor])
    """The largest magnitudes of the last measured steps, for rules with a history; separate on each rank if its rows
    are."""
    _extra = Remembered(dict[str, Tensor], saved=False)
    """Numbers of the current step that accompany its counts."""
    _products = Remembered(list[list[Tensor]], saved=False)

    def __init__(self, casts: Sequence[Cast], subjects: Sequence[str]) -> None:
        self.casts, self.subjects = list(casts), list(subjects)
        self._delay = max(cast.scaling_rule.history for cast in casts)

    def roles(self, subject: str) -> list[str]:
        """Return the roles of a subject: ``<subject>/<format>/<rule>``, for output gradients also by product."""
        uses = [f"/{product}" for product in PRODUCTS[1:]] if subject == OUTPUT else [""]
        return [f"{subject}/{label(cast)}{use}" for use in uses for cast in self.casts]

    def sums_of_counts(self, subject: str, model: nn.Module) -> CountSums:
        """Return empty sums of counts for the casts of a subject.

        Activations are the inputs of the modules that own a trained matrix, output gradients those of linear layers.
        Both differ from rank to rank, so their count_sums are summed over ranks.
        """
        roles = self.roles(subject)
        if subject == OUTPUT:
            return CountSums(list(linear_layers(model)) if trainable(model) else [], roles, shared=True)
        if subject == "activations":
            parameters = {name: module.parameters(recurse=False) for name, module in model.named_modules()}
            layers = [
                name for name, values in parameters.items() if any(v.ndim > 1 and v.requires_grad for v in values)
            ]
            return CountSums(layers, roles, shared=True)
        real = [name for name, parameter in trainable(model).items() if parameter.is_floating_point()]
        return CountSums(real, roles)

    def clear(self) -> None:
        """Clear the extra numbers and the operands of the current step."""
        self._extra.clear()
        self._products.clear()

    def count_losses(
        self, subject: str, tensors: Iterable[tuple[str, Tensor]], sums_of_counts: CountSums, use: str = ""
    ) -> None:
        """Count the loss of each cast on each tensor, for one ``use`` of the tensor if it has several."""
        named = [(name, value if value.layout is torch.strided else value.to_dense()) for name, value in tensors]
        histories = [self._histories.get(f"{subject}/{name}{use}") for name, _ in named]
        counts_by_tensor = losses([value for _, value in named], self.casts, histories)
        for (name, _), counts_by_cast in zip(named, counts_by_tensor, strict=True):
            for cast, counts in zip(self.casts, counts_by_cast, strict=True):
                sums_of_counts.add(name, f"{subject}/{label(cast)}{use}", counts)
        for cast in self.casts:
            scales = [
                cast.scales(value, history).flatten() for (_, value), history in zip(named, histories, strict=True)
            ]
            if scales:
                self._add_extra(f"{subject}/{label(cast)}{use}", exponents(torch.cat(scales)))
        if not self._delay:
            return
        for name, tensor in named:
            saved = self._histories.get(f"{subject}/{name}{use}")
            # A zero in a history stands for a missing entry.
            history = tensor.new_zeros(self._delay) if saved is None else saved.to(tensor.device)
            newest = largest_magnitudes(tensor, None).to(history.dtype).reshape(1)
            self._histories[f"{subject}/{name}{use}"] = torch.cat([history[1:], newest])

    def keep_products(self, x: Tensor, weight: Tensor, gradient: Tensor) -> None:
        """Keep the operands of a layer for :meth:`compare_products`, which runs at once above ``KEPT`` values."""
        self._products.append(operands(x, weight, gradient))
        if sum(matrix.numel() for layer in self._products for matrix in layer) > KEPT:
            self.compare_products()

    def compare_products(self) -> None:
        """Add the errors of the kept layers' products under each cast to the extra numbers."""
        if self._products:
            for cast, table in zip(self.casts, product_errors(self._products, self.casts), strict=True):
                self._add_extra(label(cast), table.flatten())
            self._products.clear()

    def _add_extra(self, name: str, numbers: Tensor) -> None:
        self._extra[name] = self._extra[name] + numbers if name in self._extra else numbers

    def extra_numbers(self, subject: str) -> Tensor:
        """Return the exponent counts of each role of a subject, followed by the product errors for output gradients."""
        sizes = {role: EXPONENTS for role in self.roles(subject)}
        sizes |= {label(cast): 3 * len(PRODUCTS) for cast in self.casts if subject == OUTPUT}
        parts = [self._extra.get(name, torch.zeros(size, dtype=torch.float64)) for name, size in sizes.items()]
        return torch.cat([part.to(parts[0].device) for part in parts])

    def values(self, subject: str, step_count: StepCounts) -> dict[str, Any]:
        """Return the metrics from the extra numbers of a step."""
        metrics: dict[str, Any] = {}
        roles = self.roles(subject)
        counts, products = np.split(step_count.extra, [len(roles) * EXPONENTS])
        for role, row in zip(roles, counts.reshape(len(roles), EXPONENTS), strict=True):
            used = np.flatnonzero(row).tolist()
            metrics[f"scale_exponents_of/{role}"] = {str(LOWEST + index): int(row[index]) for index in used}
        for cast, table in zip(self.casts, products.reshape(-1, len(PRODUCTS), 3), strict=False):
            for product, (error, cosine, number) in zip(PRODUCTS, table.tolist(), strict=True):
                role = f"{product}/{label(cast)}"
                metrics[f"product_error_of/{role}"] = error / number if number else math.nan
                metrics[f"product_cosine_of/{role}"] = cosine / number if number else math.nan
        return metrics

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from :meth:`state_dict`; drops histories of another length."""
        super().load_state_dict(state)
        self._histories = {name: history for name, history in self._histories.items() if len(history) == self._delay}


def label(cast: Cast) -> str:
    """Return ``<format>/<rule>``."""
    return f"{cast.format}/{cast.rule}"
