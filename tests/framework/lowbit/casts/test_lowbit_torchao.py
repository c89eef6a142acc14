"""Formats, microscaling and NVFP4 against torchao's code on the CPU, with the differences by definition."""

import pytest
import torch
from loopscope.lowbit.casts import Cast, FormatRegistry
from loopscope.lowbit.casts.formats import to_grid
from torch import Tensor

from tests.framework.lowbit.casts import torchao_reference as torchao

try:
    torchao.load("kernels")
except ImportError as error:  # each version of torchao supports only a few versions of torch
    pytest.skip(f"this torchao does not work with torch {torch.__version__}: {error}", allow_module_level=True)
MODES = ["FLOOR", "CEIL", "RCEIL", "EVEN"]
every_format = pytest.mark.parametrize("name", torchao.ELEMENTS)
every_mode = pytest.mark.parametrize("mode", MODES)


def blocks(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw Gaussian rows of 256 whose magnitudes differ by up to 2^60."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-30, 31, (rows, 1), generator=generator)
    return (torch.randn(rows, 256, generator=generator) * sizes.float().exp2()).to(dtype)


def check_rounding(name: str, count: int, seed: int) -> None:
    maximum = FormatRegistry.get(name).maximum
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * (maximum / 3)
    values[::2] *= torch.rand(values[::2].shape, generator=torch.Generator().manual_seed(seed)).pow(8)
    values.clamp_(-maximum, maximum)
    assert torch.equal(to_grid(values, FormatRegistry.get(name)), torchao.rounded(values, name))


def check_microscaling(values: Tensor, name: str, mode: str) -> None:
    cast = Cast(name, f"mx_{mode.lower()}")
    scales, numbers = torchao.microscaled(values, name, mode)
    assert torch.equal(cast.scales(values).double(), scales)
    expected = numbers.double() * scales.repeat_interleave(32, -1)
    assert torch.equal(cast(values), expected.to(values.dtype))


@every_format
def test_random_numbers_round_as_in_torchao(name):
    check_rounding(name, 100_000, seed=1)


@pytest.mark.slow
@every_format
@pytest.mark.parametrize("seed", range(4))
def test_millions_of_random_numbers_round_as_in_torchao(name, seed):
    check_rounding(name, 4_000_000, seed)


@every_format
@every_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_microscaling_matches_torchao(name, mode, dtype):
    check_microscaling(blocks(100, seed=3, dtype=dtype), name, mode)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "RCEIL") for name in torchao.ELEMENTS), *(("e2m1", mode) for mode in MODES if mode != "RCEIL")],
)
def test_microscaling_of_millions_matches_torchao(name, mode):
    check_microscaling(blocks(8192, seed=4), name, mode)


@every_format
@every_mode
def test_subnormal_scales_differ_from_torchao(name, mode):
    """Torchao divides by 2^-126 where it stores 2^-127, since its compiled code flushes subnormal numbers."""
    values = torch.full((1, 32), 2.0**-127)
    cast = Cast(name, f"mx_{mode.lower()}")
    scales, numbers = torchao.microscaled(values, name, mode)
    assert cast.scales(values).item() == scales.item() == 2.0**-127
    assert torch.equal(cast(values), values)
    assert (numbers * 2.0**-127 != values).all()


def test_nan_spoils_its_block_only_in_torchao():
    """Here the other values of the block keep their ordinary results."""
    values = torch.ones(1, 32)
    values[0, 0] = torch.nan
    assert torchao.microscaled(values, "e4m3", "FLOOR")[0].item() == 2.0**128
    assert Cast("e4m3", "mx_floor")(values)[0, 1:].tolist() == [1.0] * 31


def quotient_near_a_tie(values: Tensor, scales: Tensor) -> Tensor:
    """Return where division and multiplication by the reciprocal may round to different sides of a tie of e2m1."""
    quotients = values.double().abs() / scales.double().repeat_interleave(16, -1)
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    return ((quotients.unsqueeze(-1) - middles).abs() < 1e-6).any(-1)


@pytest.mark.parametrize("rows", [64, pytest.param(16384, marks=pytest.mark.slow)])
def test_nvfp4_matches_torchao_except_near_ties(rows):
    """Torchao multiplies by reciprocals, so only quotients close to a tie may differ."""
    values = torch.randn(rows, 256, generator=torch.Generator().manual_seed(5))
    of_tensor = values.abs().max() / (6 * 448)
    block_scales, numbers = torchao.nvfp4(values, of_tensor)
    scales = Cast("e2m1", "nvfp4").scales(values)
    assert torch.equal(scales, block_scales * of_tensor)
    differ = Cast("e2m1", "nvfp4")(values) != numbers * scales.repeat_interleave(16, -1)
    assert not (differ & ~quotient_near_a_tie(values, scales)).any()
    assert differ.sum() < 1e-6 * values.numel() + 1


def test_small_nvfp4_scales_differ_from_torchao():
    """Torchao raises block scales to 2^-6, the smallest normal E4M3 number; casts here use subnormals."""
    values = torch.cat([torch.full((1, 16), 1.0), torch.full((1, 16), 1e-5)], dim=-1)
    of_tensor = values.max() / (6 * 448)
    assert torchao.nvfp4(values, of_tensor)[0][0, 1].item() == 2.0**-6
    assert (Cast("e2m1", "nvfp4").scales(values) / of_tensor)[0, 1].item() == 2.0**-8
