"""Norms and products are right over the whole range of float32, on the CPU and by the way of other devices."""

from unittest.mock import patch

import pytest
import torch
from loopscope.tensors import (
    cosine,
    dot,
    flat_products,
    joined_length,
    joint_norm,
    length_of,
    norm,
    norm_of_each,
    norms,
    pieces,
    reductions,
    row_norms,
    scale_of,
    total_of,
)
from torch import Tensor

from tests.training_hooks.device_waits import DeviceWaits

EXPONENTS = (-126, -100, -80, -64, -35, 0, 50, 63, 66, 100, 127)
REDUCTIONS = {
    "norm": (lambda a, b: norm({"a": a, "b": b}), lambda a, b: torch.cat([a, b]).norm()),
    "joint_norm": (lambda a, b: joint_norm([a, b]), lambda a, b: torch.cat([a, b]).norm()),
    "norms": (lambda a, b: norms([a, b]), lambda a, b: torch.stack([a.norm(), b.norm()])),
    "norm_of_each": (lambda a, b: norm_of_each({"a": a, "b": b})["b"], lambda a, b: b.norm()),
    "row_norms": (lambda a, b: row_norms(torch.stack([a, b])), lambda a, b: torch.stack([a.norm(), b.norm()])),
    "total_of": (lambda a, b: total_of(a), lambda a, b: a.norm()),
    "dot": (lambda a, b: dot({"a": a}, {"a": b}), lambda a, b: a @ b),
    "flat_products": (lambda a, b: reductions.flat_products([(a, b)])[0], lambda a, b: a @ b),
    "cosine": (lambda a, b: cosine({"a": a}, {"a": b}), lambda a, b: a @ b / (a.norm() * b.norm())),
}


def at_scale(exponent: int) -> tuple[Tensor, Tensor]:
    """Return two vectors with elements between a half and one, times a power of two."""
    generator = torch.Generator().manual_seed(0)
    halves = torch.rand(2, 500, generator=generator, dtype=torch.float64) / 2 + 0.5
    a, b = (halves * 2.0 ** (exponent + 1 if exponent < 0 else exponent)).float()
    return a, b


@pytest.mark.parametrize("is_readable", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_are_right_at_every_scale(name, exponent, is_readable):
    """The results are those in float64, which has no range to leave here."""
    reduce, exact = REDUCTIONS[name]
    a, b = at_scale(exponent)
    with patch.object(reductions, "is_readable", lambda tensor: is_readable):
        found = reduce(a, b)
    torch.testing.assert_close(found.double(), exact(a.double(), b.double()), rtol=1e-5, atol=0)


@pytest.mark.parametrize("exponent", [-126, -80, 0, 66, 126])
@pytest.mark.parametrize("name", ["norm", "joint_norm", "norms", "total_of", "dot", "row_norms", "cosine"])
def test_reductions_without_float64_are_scaled(name, exponent):
    """On a device whose widest dtype is float32, as MPS, the results are right unless they leave its range."""
    reduce, exact = REDUCTIONS[name]
    a, b = at_scale(exponent)
    with (
        patch.object(reductions, "is_readable", lambda tensor: False),
        patch.object(reductions, "widest", lambda device: torch.float32),
    ):
        found = reduce(a, b)
    expected = exact(a.double(), b.double()).float()
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-44)


def test_device_sums_do_not_wait():
    a, b = at_scale(0)
    with patch.object(reductions, "is_readable", lambda tensor: False), DeviceWaits() as waits:
        for reduce, _ in REDUCTIONS.values():
            reduce(a, b)
    assert waits.count == 0


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_special_values_stay(value):
    a, ones = torch.tensor([value, 1.0 if value else 0.0]), torch.ones(2)
    assert torch.equal(norm({"a": a}).isfinite(), torch.tensor(value == 0))
    assert torch.equal(dot({"a": a}, {"a": ones}).isfinite(), torch.tensor(value == 0))
    assert scale_of(a) == 1


@pytest.mark.parametrize("kind", ["sparse", "complex", "mixed", "bfloat16", "float16"])
def test_other_tensors_equal_dense_real_ones(kind):
    """Sparse tensors count with their zeros, complex ones by the real part of a·b*."""
    a, b = (values[:12] for values in at_scale(3))
    if kind == "sparse":
        index = torch.tensor([[0, 3, 3]])
        a = torch.sparse_coo_tensor(index, a[:3], (12,), check_invariants=True)
        assert dot({"a": a}, {"a": b}).item() == pytest.approx((a.to_dense() @ b).item())
        assert norm({"a": a}).item() == pytest.approx(a.to_dense().norm().item())
        return
    if kind in ("complex", "mixed"):
        a = torch.complex(a, b)
        b = torch.complex(b, -b) if kind == "complex" else b
    else:
        a, b = a.to(getattr(torch, kind)), b.to(getattr(torch, kind))
    wide = [x.to(torch.complex128) for x in (a, b)]
    assert dot({"a": a}, {"a": b}).item() == pytest.approx((wide[0] * wide[1].conj()).sum().real.item(), rel=1e-5)
    assert norm({"a": a}).item() == pytest.approx(wide[0].norm().real.item(), rel=1e-6)


@pytest.mark.parametrize("count", [7, reductions.PART, reductions.PART + 1, 70_001, 2_000_000])
@pytest.mark.parametrize("kind", ["equal", "rounded", "normal"])
def test_long_float32_sums_keep_their_digits(count: int, kind: str) -> None:
    """Sums of equal or rounded numbers lose the most digits in some BLAS libraries."""
    values = torch.full((count,), 0.1) if kind == "equal" else torch.randn(count)
    values = values.bfloat16().float() if kind == "rounded" else values
    square = values.double().square().sum().item()
    assert flat_products([(values, values)]).item() == pytest.approx(square, rel=1e-6)
    lengths = [length_of(piece) for (piece,) in pieces(values)]
    assert float(joined_length(lengths)) == pytest.approx(square**0.5, rel=1e-6)
