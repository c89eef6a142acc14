"""Measures of gradients and curvature keep their values when everything is multiplied by a power of two."""

import re
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from loopscope.lowbit.casts import Cast
from loopscope.tensors import cosine_of, reductions, row_norms
from loopscope.training_hooks.circuits.token_gradient import agreement, concentration
from loopscope.training_hooks.clipping.embedding_provenance import metrics_of
from loopscope.training_hooks.clipping.tied_embeddings import all_sums
from loopscope.training_hooks.counterfactual.counterfactual import inner_products, ordering_split, split_errors
from loopscope.training_hooks.curvature.hessian import preconditioned_curvature
from loopscope.training_hooks.curvature.lanczos import lanczos, residuals
from loopscope.training_hooks.gradients.batch_dynamics import accumulation_efficiency, autocorrelation
from loopscope.training_hooks.gradients.consecutive import agreement as consecutive_agreement
from loopscope.training_hooks.gradients.gradient_history import row_products, spectrum
from loopscope.training_hooks.gradients.gradient_noise_scale import part_norms, signal_and_noise
from loopscope.training_hooks.gradients.gradient_projection import descent_metrics, progress_metrics
from loopscope.training_hooks.lowbit.product_errors import product_errors
from loopscope.training_hooks.measures import FlatLayout, effective_rank
from loopscope.training_hooks.updates.adam_dynamics import inner_product, square_norm
from loopscope.training_hooks.updates.watched_elements import ElementBuffer, ElementSelection, norms
from torch import Tensor, nn

EXPONENTS = (-122, -90, -66, 66, 100, 120)
Measures = dict[str, Tensor]


def counterfactual(v: Tensor) -> Measures:
    gram = inner_products([{"w": row} for row in v[:4]])
    measures = ordering_split(gram) | split_errors(gram)
    return {name: value for name, value in measures.items() if not name.endswith("_norm")}


def history(v: Tensor) -> Measures:
    gram = row_products(v[-2:], v), row_products(v, v)
    values = spectrum(gram[1], 1e-7)[0].sqrt()
    return {
        "new": gram[0] / gram[0].abs().max(),
        "lag": autocorrelation(gram[1], 1),
        "efficiency": accumulation_efficiency(gram[1], 5),
        "rank": effective_rank(values),
    }


def layout(count: int) -> FlatLayout:
    return FlatLayout({"a": nn.Parameter(torch.zeros(count // 2)), "b": nn.Parameter(torch.zeros(count - count // 2))})


def consecutive(v: Tensor) -> Measures:
    return consecutive_agreement(layout(v.shape[1]), v[0], v[1].clone(), ["a", "b"])


def projection(v: Tensor) -> Measures:
    measures = progress_metrics(layout(v.shape[1]), v[0], v[1], v[2])
    return {name: value for name, value in measures.items() if name != "distance"}


def descent(v: Tensor) -> Measures:
    measures = descent_metrics(layout(v.shape[1]), v[0], v[1])
    return measures | {"gradient_projection": measures["gradient_projection"] / v[0].abs().max()}


def length(v: Tensor) -> Measures:
    return {"length": layout(v.shape[1]).norm(v[0]) / v[0].abs().max()}


def noise(v: Tensor) -> Measures:
    signal, size = signal_and_noise(part_norms([{"w": row} for row in v], [2] * len(v)), 2, 2 * len(v))
    return {"scale": size / signal}


def adam(v: Tensor) -> Measures:
    return {"cosine": cosine_of(inner_product(v[0], v[1]), square_norm(v[0]), square_norm(v[1]))}


def tokens(v: Tensor) -> Measures:
    sizes = row_norms(v)
    measures = concentration(sizes, 2) | agreement(v, sizes)
    return {name: value for name, value in measures.items() if not name.endswith("_norm")}


def tied(v: Tensor) -> Measures:
    measures = metrics_of(all_sums(v[0], v[1]), v.shape[1], 1.0, tied=True)
    return {name: measures[name] for name in ("cosine", "output_to_embedding_ratio")}


def watched(v: Tensor) -> Measures:
    shape = v[0].shape
    buffer = ElementBuffer(["w"], [ElementSelection(shape, v.dtype, None, v.shape[1], v.shape[1])], v.device)
    before, scale = buffer.keep([v[0]]), v[0].abs().max().double()
    changes = buffer.compare([v[1]], [v[1]], [0.0])[0]
    return {"kept": before / scale, "change": changes / scale, "norms": norms([v[0].repeat(9)]) / scale}


def eigenvalues(v: Tensor) -> Measures:
    size = v.abs().max()
    matrix = ((v[:, :8] / size).T @ (v[:, :8] / size)) / len(v)

    def product(x: Tensor) -> Tensor:
        return (matrix @ x) * size  # as large as v; some CPUs take subnormal elements of a matrix for zeros

    found = lanczos(product, torch.ones(8), 8)
    values, vectors = found.largest(2)
    errors = residuals(lambda x: product(x) + size * torch.eye(8)[0], values, vectors)
    return {"values": values / size, "errors": errors / size}


def preconditioned(v: Tensor) -> Measures:
    size = v.abs().max()
    return {"curvature": preconditioned_curvature({"w": v[0] / size}, {"w": v[1]}, {"w": v[2].abs()})}


def products(v: Tensor) -> Measures:
    operands = [v, v * 1.5, v, v, v, v]
    return {"errors": product_errors([operands], [Cast("e4m3", rule="tensor")])}


MEASURES: list[Callable[[Tensor], Measures]] = [
    counterfactual, history, consecutive, projection, descent, length, noise, adam, tokens, tied, watched, eigenvalues,
    preconditioned, products,
]  # fmt: skip


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.__name__)
def test_measures_do_not_depend_on_scale(measure, exponent):
    vectors = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)) / 8
    vectors[:, 0] += 2
    expected, found = measure(vectors), measure(vectors * 2.0**exponent)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-4, atol=1e-6)


SCALED = [consecutive, projection, descent, length, watched, eigenvalues, preconditioned, products]
"""Measures that keep their values on devices without float64, too."""


def without_float64(measure: Callable[[Tensor], Measures], vectors: Tensor) -> Measures:
    """Take the branch for devices whose widest dtype is float32, as MPS, on the CPU."""
    with (
        patch.object(reductions, "is_readable", lambda tensor: False),
        patch.object(reductions, "widest", lambda device: torch.float32),
    ):
        return measure(vectors)


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("measure", SCALED, ids=lambda measure: measure.__name__)
def test_scaled_measures_need_no_float64(measure, exponent):
    vectors = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)) / 8
    vectors[:, 0] += 2
    expected, found = measure(vectors), without_float64(measure, vectors * 2.0**exponent)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("measure", [counterfactual, history, adam, tokens, tied, consecutive, projection, descent])
def test_cosines_without_float64_stay_in_range(measure, exponent):
    """Where sums of squares leave the range of float32 they are NaN."""
    generator = torch.Generator().manual_seed(0)
    nearly_parallel = torch.ones(6, 64) + 1e-6 * torch.randn(6, 64, generator=generator)
    for vectors in (nearly_parallel, torch.randn(6, 64, generator=generator)):
        found = without_float64(measure, vectors * 2.0**exponent)
        cosines = [value for name, value in found.items() if re.search("cosine|coherence|lag", name)]
        assert cosines
        assert all(-1 <= value <= 1 or value.isnan() for value in cosines)
