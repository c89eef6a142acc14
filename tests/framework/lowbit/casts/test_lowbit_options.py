"""Options of casts: blocks of several rows, rows, scales in E8M0, histories and whole numbers, against brute force."""

import ml_dtypes
import numpy as np
import pytest
import torch
from loopscope.lowbit import RECIPES
from loopscope.lowbit.casts import Cast, FormatRegistry
from loopscope.lowbit.casts.formats import to_grid
from loopscope.lowbit.casts.scaling import to_e8m0
from torch import Tensor

from tests.framework.lowbit.casts import torchao_reference as torchao
from tests.framework.lowbit.casts.brute_force import decoded, ties
from tests.framework.lowbit.casts.test_lowbit_contracts import INPUTS, check_cast

CASTS = [
    Cast("e2m1", "nvfp4", rows=16),
    Cast("e4m3", "block", block=128, scale_dtype="e8m0"),
    Cast("e4m3", "block", block=128, rows=128, scale_dtype="e8m0"),
    Cast("e5m2", "block", block=8, rows=3, q_scalar=0.5),
    Cast("e4m3", "row", scale_dtype="e8m0"),
    Cast("int8", "row", margin=-1),
    Cast("int8", "mx_even", rows=2),
    Cast("int8", "metis_tensor", scale_dtype="e8m0", margin=3),
]
every_option = pytest.mark.parametrize("cast", CASTS, ids=str)
INT8 = FormatRegistry.get("int8")


def random_numbers(count: int, seed: int) -> Tensor:
    """Draw float32 numbers with every exponent of the format, and beyond it on both sides."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.empty(count).uniform_(-12, 9, generator=generator)
    return exponents.exp2() * (torch.randint(0, 2, (count,), generator=generator) * 2 - 1)


def by_numpy(values: Tensor) -> Tensor:
    return torch.from_numpy(np.clip(np.rint(values.double().numpy()), -127, 127)).float()


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("numbers-match-plain-formulas")
@every_option
def test_cast_options_match_brute_force(cast):
    """Blocks of rows, whole rows, scales in E8M0, margins and histories equal a plain loop in float64."""
    for values in INPUTS.values():
        check_cast(cast, values)
    for shape in [(), (0,), (3, 0), (0, 3), (1,), (40,), (3, 2, 19, 21), (130, 1)]:
        check_cast(cast, torch.randn(shape, generator=torch.Generator().manual_seed(6)))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        check_cast(cast, INPUTS["heavy-tailed"].to(dtype))


@pytest.mark.guarantee("numbers-match-plain-formulas")
@pytest.mark.parametrize("amax", ["max", "most_recent"])
@pytest.mark.parametrize("history", [1, 2, 5])
def test_delayed_scales_follow_length_rule_and_margin(amax, history):
    """Delayed scales follow the length, rule and margin of their history."""
    for earlier in ([4.0, 1.25, 0.5], [4.0, 1.25, 0.0], [0.0, 0.0, 0.0]):
        cast = Cast("e4m3", "delayed", history=history, amax=amax, margin=2)
        check_cast(cast, INPUTS["gaussian"], torch.tensor(earlier))
    found = Cast("e4m3", "delayed", history=2, amax=amax).scales(INPUTS["gaussian"], torch.tensor([4.0, 1.25, 0.5]))
    assert found.item() == pytest.approx({"max": 1.25, "most_recent": 0.5}[amax] / 448)


def test_blocks_of_several_rows_share_one_scale():
    values = torch.arange(1.0, 13).reshape(3, 4)
    found = Cast("e2m1", "block", block=2, rows=2).scales(values) * 6
    assert found.tolist() == [[6.0, 8.0], [10.0, 12.0]]
    assert Cast("e2m1", "row").scales(values).shape == (3, 1)
    assert Cast("e4m3", "block", block=128, rows=128).scales(torch.ones(2, 300, 129)).shape == (2, 3, 2)


@pytest.mark.parametrize("name", ["nvfp4", "fp8_block"])
def test_tiled_stochastic_rounding_draws_in_value_order(name):
    """Tiles use the same random draws per value as blocks of one value."""
    cast = Cast("e4m3", "block", "stochastic", block=2, rows=2)
    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    alike = torch.zeros(4, 6) + values.abs().max()
    source = [torch.Generator().manual_seed(3) for _ in range(2)]
    tiles = cast(torch.where(values > 0, alike, values), generator=source[0])
    whole = Cast("e4m3", "block", "stochastic", block=1)(torch.where(values > 0, alike, values), generator=source[1])
    assert torch.equal(tiles[values > 0], whole[values > 0])
    assert torch.equal(source[0].get_state(), source[1].get_state())
    assert RECIPES[name].forward_weight.rows in (16, 128)


def e8m0_by_numpy(scales: Tensor) -> np.ndarray:
    fractions, exponents = np.frexp(scales.double().numpy())
    return np.exp2(np.clip(exponents - (fractions == 0.5), -127, 127).astype(np.float64))


def check_e8m0(scales: Tensor) -> None:
    found = to_e8m0(scales)
    assert np.array_equal(found.double().numpy(), e8m0_by_numpy(scales))
    assert torch.equal(found.to(torch.float8_e8m0fnu).float(), found)
    assert np.array_equal(found.numpy().astype(ml_dtypes.float8_e8m0fnu).astype(np.float32), found.numpy())


def test_powers_of_two_round_up_to_e8m0():
    """Every power of two, its neighbors and subnormal numbers round up to the next E8M0 number."""
    powers = torch.arange(1, 255, dtype=torch.int32) << 23
    subnormal = torch.tensor([1, 2**21, 2**22 - 1, 2**22, 2**22 + 1, 2**23 - 1], dtype=torch.int32)
    check_e8m0(torch.cat([powers - 1, powers, powers + 1, subnormal]).view(torch.float32))
    assert to_e8m0(torch.zeros(1)).item() == 2.0**-127


@pytest.mark.parametrize("count", [100_000, pytest.param(20_000_000, marks=pytest.mark.slow)])
def test_random_scales_round_up_to_e8m0(count):
    bits = torch.randint(1, 0x7F800000, (count,), generator=torch.Generator().manual_seed(1))
    check_e8m0(bits.int().view(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_values_round_to_int8_like_numpy(dtype):
    """Every bit pattern of float16 and bfloat16 is checked, and NaN stays NaN."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    for wide in (values.float(), values.double()):
        found, numbers = to_grid(wide, INT8), ~wide.isnan()
        assert torch.equal(found[numbers].float(), by_numpy(wide[numbers]))
        assert found[~numbers].isnan().all()
    kept = Cast("int8", "delayed")(values, earlier=torch.tensor([127.0]))
    assert torch.equal(kept[numbers].float(), by_numpy(values.float()[numbers]))


def test_int8_ties_round_to_even():
    middles = torch.tensor(ties(decoded(INT8)))
    assert torch.equal(to_grid(middles, INT8), by_numpy(middles))
    assert (to_grid(middles, INT8) % 2 == 0).all()


@pytest.mark.parametrize("count", [100_000, pytest.param(20_000_000, marks=pytest.mark.slow)])
def test_random_values_round_to_int8_like_numpy(count):
    values = random_numbers(count, seed=1)
    assert torch.equal(to_grid(values, INT8), by_numpy(values))


def rows(seed: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, 256, generator=generator) * torch.empty(count, 1).uniform_(-9, 9, generator=generator).exp2()
    )


def load_torchao(module: str) -> object:
    try:
        return torchao.load(module, "torchao")
    except ImportError as error:
        return pytest.skip(f"this torchao does not work with torch {torch.__version__}: {error}")


@pytest.mark.parametrize("count", [400, pytest.param(80_000, marks=pytest.mark.slow)])
def test_fp8_rowwise_matches_torchao(count):
    utils, config = load_torchao("float8.float8_utils"), load_torchao("float8.config")
    values = rows(2, count)
    by_row = {"scaling_granularity": config.ScalingGranularity.AXISWISE, "axiswise_dim": -1}
    inverse = utils.tensor_to_scale(values, torch.float8_e4m3fn, round_scales_to_power_of_2=True, **by_row)
    cast = RECIPES["fp8_rowwise"].forward_input
    assert torch.equal(cast.scales(values), 1 / inverse)
    assert torch.equal(cast(values), utils.to_fp8_saturated(values * inverse, torch.float8_e4m3fn).float() / inverse)


def test_int8_matches_torchao_except_near_ties():
    """Torchao multiplies by reciprocals, so only quotients close to a tie may differ."""
    values, cast = rows(3, 400), RECIPES["int8"].forward_input
    numbers, scales = load_torchao("prototype.quantized_training.int8").quantize_int8_rowwise(values)
    found = cast.scales(values)
    torch.testing.assert_close(found[:, 0], scales, rtol=2e-7, atol=0)
    differ = (cast(values) / found).round() != numbers
    near_a_tie = ((values.double() / scales.double()[:, None]).abs() % 1 - 0.5).abs() < 1e-4
    assert not (differ & ~near_a_tie).any()
