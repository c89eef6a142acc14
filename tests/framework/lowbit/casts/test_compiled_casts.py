"""Compiled casts have the bits and counts of uncompiled ones in every mode, without side effects."""

import gc
import os
import random
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np
import pytest
import torch
from loopscope.lowbit.casts import SUMS, Cast, FormatRegistry, RuleRegistry, casts, compiled
from loopscope.lowbit.casts.compiled import SWITCH, Compiler
from loopscope.lowbit.casts.kernels import largest_per_block, limits_for
from torch import Tensor, nn
from torch._dynamo.utils import counters

pytestmark = pytest.mark.compile

EAGER = Compiler(patience=2**60)
INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
EARLIER = torch.tensor([0.5, 1.25, 0.0])
BLOCK = Cast("e2m1", "block")


@pytest.fixture(scope="module")
def eager_to_compile() -> Iterator[Compiler]:
    """Compile for every tensor, however small, at the first call."""
    patch = pytest.MonkeyPatch()
    compiler = Compiler(patience=-1)
    patch.setattr(casts, "COMPILER", compiler)
    patch.setattr(compiled, "SMALLEST", 1)
    yield compiler
    patch.undo()


@pytest.fixture
def compiler(eager_to_compile: Compiler) -> Compiler:
    return eager_to_compile


def gaussian(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def hostile() -> Tensor:
    """Return numbers of all magnitudes, NaNs with several bit patterns, inf, -0 and subnormal numbers."""
    values = gaussian(64, 64) / gaussian(64, 64).t()
    values[3], values[4], values[5, ::3], values[6, ::5] = 0.0, torch.inf, torch.nan, -torch.inf
    values[7], values[8], values[9], values[10] = -0.0, 1e-42, 3.3e38, values[10] * 1e-30
    values[11, 5], values[11, 6] = -torch.nan, torch.tensor(0x7FA12345, dtype=torch.int32).view(torch.float32)
    return values


def wide() -> Tensor:
    """Return finite numbers of many magnitudes, blocks of zeros, and numbers at the ends of the grid."""
    values = gaussian(64, 96) * torch.logspace(-7, 3, 64).unsqueeze(1) / gaussian(64, 96)
    values[3], values[4, ::3], values[5] = 0.0, -0.0, torch.tensor([6.0, -3.0, 0.25, 0.75]).repeat(24)
    values[6, :32] = 1e-25
    return values


INPUTS = {
    "gaussian": gaussian(64, 64),
    "wide": wide(),
    "hostile": hostile(),
    "hostile in few places": torch.where(gaussian(64, 96) > 3.5, torch.nan, wide()),
    "ragged": gaussian(6, 41),
    "transposed": gaussian(32, 9).t(),
}


def uncompiled(monkeypatch: pytest.MonkeyPatch, cast: Cast, values: Tensor, **options: Any) -> list[Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(casts, "COMPILER", EAGER)
        return everything(cast, values, **options)


def everything(cast: Cast, values: Tensor, **options: Any) -> list[Tensor]:
    """Return the scales, the cast, the cast with counts, and the counts."""
    seeded = [torch.Generator().manual_seed(7) for _ in range(2)]
    rounded, counts = cast.with_counts(values, generator=seeded[0], **options)
    return [
        cast.scales(values, **options),
        cast(values, generator=seeded[1], **options),
        rounded,
        counts.sums,
        counts.maxima,
    ]


def check_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Compare tensors bit for bit and whole numbers exactly; sums of real numbers to six digits.

    An error of 1e-15 of the largest magnitude may be lost: float32 does not hold its square.
    """
    for one, other in zip(found[:3], expected[:3], strict=True):
        integers = INTEGERS[other.dtype]
        assert torch.equal(one.contiguous().view(integers), other.contiguous().view(integers))
    assert torch.equal(found[3][:7], expected[3][:7])
    negligible = torch.tensor([0.0, 1e-30, 0.0], dtype=torch.float64) * expected[3][9]
    assert (found[3][7:] - expected[3][7:]).abs().le(1e-6 * expected[3][7:] + negligible).all()
    torch.testing.assert_close(found[4], expected[4], rtol=1e-6, atol=0)


def compare(monkeypatch: pytest.MonkeyPatch, cast: Cast, values: Tensor, **options: Any) -> None:
    assert casts.COMPILER.attempt(largest_per_block, values.reshape(-1)) is not None
    check_same(everything(cast, values, **options), uncompiled(monkeypatch, cast, values, **options))


@pytest.mark.slow
@pytest.mark.guarantee("numbers-match-plain-formulas")
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("values", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize(
    "cast",
    [
        pytest.param(BLOCK, id="block"),
        pytest.param(Cast("e4m3", "delayed", "stochastic"), id="delayed", marks=pytest.mark.slow),
    ],
)
def test_compiled_casts_match_eager_ones(cast, values, monkeypatch):
    """Values and counts of block and delayed casts have the same bits compiled and uncompiled."""
    compare(monkeypatch, cast, values, earlier=EARLIER if cast.scaling_rule.history else None)


TILES = Cast("e4m3", "block", "stochastic", block=8, rows=4, scale_dtype="e8m0", margin=-1)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "values",
    [
        pytest.param(INPUTS["wide"], id="wide", marks=pytest.mark.slow),
        pytest.param(INPUTS["hostile"], id="hostile", marks=pytest.mark.slow),
    ],
)
def test_compiled_tile_casts_match_eager_ones(values, monkeypatch):
    """Values and counts have the same bits compiled and uncompiled."""
    compare(monkeypatch, TILES, values)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize(
    "cast",
    [
        Cast("e2m1", "nvfp4", rows=16),
        Cast("e4m3", "block", block=128, rows=128, scale_dtype="e8m0"),
        Cast("e4m3", "row", scale_dtype="e8m0"),
        Cast("int8", "row", "stochastic"),
        Cast("int8", "tensor", "soft", q_scalar=0.25),
        Cast("e2m1", "block", block=5000),
    ],
    ids=str,
)
def test_compiled_cast_options_match_eager_ones(cast, dtype, monkeypatch):
    """Row, tile, scale and rounding options give the same bits and counts in every dtype."""
    for values in (*INPUTS.values(), gaussian(3, 6000)):
        compare(monkeypatch, cast, values.to(dtype))


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_successive_compiled_casts_are_independent(monkeypatch):
    """Casts to different formats, compiled one after another, match their uncompiled results."""
    values = gaussian(40, 64)
    for name in ("e2m1", "e4m3", "e5m2"):
        cast = Cast(name, "mx_even")
        with monkeypatch.context() as patch:
            patch.setattr(casts, "COMPILER", EAGER)
            expected = cast(values)
        assert torch.equal(cast(values), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("rule", RuleRegistry.names())
@pytest.mark.parametrize("name", FormatRegistry.names())
def test_compiled_formats_and_rules_match_eager_ones(name, rule, monkeypatch):
    """Every format and scaling rule gives the same bits and counts compiled and uncompiled."""
    for values in INPUTS.values():
        compare(monkeypatch, Cast(name, rule), values)
    if RuleRegistry.get(rule).history:
        compare(monkeypatch, Cast(name, rule), hostile(), earlier=EARLIER)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("rounding", get_args(casts.Rounding))
@pytest.mark.parametrize("name", FormatRegistry.names())
def test_compiled_roundings_and_dtypes_match_eager_ones(name, rounding, dtype, monkeypatch):
    """Every format, rounding and dtype gives the same bits and counts compiled and uncompiled."""
    for values in INPUTS.values():
        compare(monkeypatch, Cast(name, "block", rounding, q_scalar=0.25), values.to(dtype))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("rule", "rounding"),
    [
        pytest.param("current", "nearest", marks=pytest.mark.slow),
        pytest.param("nvfp4", "stochastic", marks=pytest.mark.slow),
    ],
)
def test_finite_values_are_counted_while_cast(rule, rounding, monkeypatch):
    """The compiled loop that casts the values also counts them, but not if a value is infinite."""
    check_counted_in_one(Cast("e2m1", rule, rounding, q_scalar=0.75), [gaussian(64, 64), wide()], monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("dtype", "rounding"), [*zip(INTEGERS, get_args(casts.Rounding), strict=True)])
@pytest.mark.parametrize("rule", RuleRegistry.names())
def test_every_rule_and_dtype_counts_while_casting(rule, rounding, dtype, monkeypatch):
    """The compiled loop that casts the values also counts them, for every rule, rounding and dtype."""
    values = [gaussian(64, 64), gaussian(4, 8, 128)]
    # float16 does not reach as far; rows of 96 values, blocks of the rule "row", fill no chunk well
    values += [wide()] * (dtype != torch.float16 and rule != "row")
    for q_scalar in (1.0, 0.75):
        cast = Cast("e2m1", rule, rounding, q_scalar=q_scalar)
        check_counted_in_one(cast, [each.to(dtype) for each in values], monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_undeclared_overflows_are_counted(monkeypatch):
    """Overflows are counted even if the scaling rule declares that it never overflows."""
    monkeypatch.setattr(RuleRegistry.get("mx_floor"), "overflows", False)
    cast = Cast("e2m1", "mx_floor")
    assert everything(cast, gaussian(64, 64))[3][SUMS.index("total_overflow_elements")] > 0
    compare(monkeypatch, cast, gaussian(64, 64))


def check_counted_in_one(cast: Cast, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(Cast, "_counted_in_one", spying(Cast._counted_in_one, found))
        for values in inputs:
            compare(monkeypatch, cast, values)
        assert [result is not None for result in found] == [True, False] * len(inputs)  # compiled, uncompiled
        found.clear()
        compare(monkeypatch, cast, torch.where(gaussian(64, 64) > 3, torch.inf, gaussian(64, 64)).to(inputs[0].dtype))
        assert found == [None, None]


def spying(function: Callable[..., Any], found: list[Any]) -> Callable[..., Any]:
    def spied(*given: Any) -> Any:
        found.append(function(*given))
        return found[-1]

    return spied


@pytest.mark.parametrize("number_format", FormatRegistry.names())
def test_limit_comparison_is_exact(number_format):
    """Comparisons with a scaled limit match float64 at the limit and at its neighbors."""
    maximum = FormatRegistry.get(number_format).maximum
    scales = torch.cat([torch.rand(20_000, generator=torch.Generator().manual_seed(0)) + 0.5, torch.ones(1)])
    scales = scales * torch.logspace(-25, 25, len(scales))
    for limit in (maximum, maximum / 2):
        exact = scales.double() * limit
        near = exact.float()
        for magnitude in (near, near.nextafter(near * 2), near.nextafter(near * 0), near / 2, near * 2, near * 0):
            assert torch.equal(magnitude > limits_for(scales, limit), magnitude.double() > exact)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-25, 1e25])
@pytest.mark.usefixtures("compiler")
def test_sums_of_squares_stay_in_range(size, monkeypatch):
    """Sums of squares of tiny and huge values neither underflow nor overflow."""
    values = gaussian(40, 64) * size
    found = everything(BLOCK, values)[3][-2:]
    assert found.gt(0).all()
    torch.testing.assert_close(found, uncompiled(monkeypatch, BLOCK, values)[3][-2:], rtol=1e-6, atol=0)


@pytest.mark.slow
def test_new_row_counts_do_not_recompile(compiler):
    BLOCK(gaussian(40, 64))
    before, made = counters["stats"]["unique_graphs"], len(compiler._compiled)
    for shape in ((2, 16), (3, 160), (1024, 64), (7, 41)):
        BLOCK(gaussian(*shape))
    assert (counters["stats"]["unique_graphs"], len(compiler._compiled)) == (before, made)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_first_call_tensors_are_released():
    """The compiler keeps no reference to the tensors that it compiled with."""
    compiler, values = Compiler(patience=-1), gaussian(4096, 16)
    before = weakref.ref(values)
    compiler.run(largest_per_block, values)
    del values
    gc.collect()
    assert before() is None


@pytest.mark.slow
def test_parameters_and_tensors_share_one_graph(compiler):
    """Parameters, tensors and the tensor of the first call use the same graph, also under no_grad."""
    cast, values = Cast("e2m1", "block", q_scalar=0.75), gaussian(512, 128)
    cast(values)
    before = counters["stats"]["unique_graphs"]
    cast(nn.Parameter(values + 1).detach())
    with torch.no_grad():
        cast(nn.Parameter(values + 1))
    cast(values)
    assert counters["stats"]["unique_graphs"] == before


@pytest.mark.slow
def test_recompile_limit_falls_back_to_eager(compiler, monkeypatch):
    """A graph that raises FailOnRecompileLimitHit is replaced by the uncompiled function."""
    values = gaussian(512, 128)
    expected = compiler.run(largest_per_block, values)

    def refused(*given):
        raise torch._dynamo.exc.FailOnRecompileLimitHit("too many")

    monkeypatch.setattr(compiler, "_compiled", dict.fromkeys(compiler._compiled, refused))
    assert torch.equal(compiler.run(largest_per_block, values), expected)


@pytest.mark.slow
def test_compiling_draws_no_random_numbers(monkeypatch):
    """Compiling and calling a cast advance no global generator and raise no warnings."""
    monkeypatch.setattr(casts, "COMPILER", Compiler(patience=-1))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        everything(Cast("e2m1", "current", "stochastic"), gaussian(40, 64))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])


class Rounded(torch.autograd.Function):
    """Casts its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return BLOCK(gradient)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_gradients_are_cast_compiled_inside_backward(monkeypatch):
    x, gradient = gaussian(40, 64).requires_grad_(), gaussian(40, 64) * 3
    with torch.autocast("cpu", torch.bfloat16):
        Rounded.apply(x).backward(gradient)
    assert torch.equal(x.grad, uncompiled(monkeypatch, BLOCK, gradient)[1])


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_bits_are_independent_of_torch_modes(monkeypatch):
    """Inference mode, autocast, deterministic algorithms and thread counts change no bit."""
    expected = uncompiled(monkeypatch, BLOCK, gaussian(40, 64))[1]
    threads = torch.get_num_threads()
    try:
        for context in (torch.inference_mode(), torch.autocast("cpu"), torch.enable_grad(), torch.device("cpu")):
            with context:
                assert torch.equal(BLOCK(gaussian(40, 64)), expected)
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(2 if threads == 1 else 1)
        assert torch.equal(BLOCK(gaussian(40, 64)), expected)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_casts_inside_compiled_functions_match(monkeypatch):
    """A cast within torch.compile has the bits of the uncompiled cast."""
    values = gaussian(40, 64)
    doubled = torch.compile(lambda x: BLOCK(x + x))(values)
    assert torch.equal(doubled, uncompiled(monkeypatch, BLOCK, values + values)[1])


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_concurrent_casts_compile_once(monkeypatch):
    """Four threads share one compiled graph and get the same bits."""
    compiler = Compiler(patience=-1)
    monkeypatch.setattr(casts, "COMPILER", compiler)
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(BLOCK(gaussian(40, 64)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(compiler._compiled) == 1
    assert all(torch.equal(one, uncompiled(monkeypatch, BLOCK, gaussian(40, 64))[1]) for one in found)


WITHOUT_A_COMPILER = """
import torch
from loopscope.lowbit.casts import casts
casts.COMPILER.patience = -1
values = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
rounded = casts.Cast("e2m1", "block")(values)
assert set(casts.COMPILER._compiled.values()) == {None}
print(rounded.sum().item())
"""


@pytest.mark.slow
@pytest.mark.process
def test_without_a_compiler_casts_run_uncompiled_and_silent(tmp_path):
    environment = os.environ | {"CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", WITHOUT_A_COMPILER]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.stderr == ""
    assert float(found.stdout) == Cast("e2m1", "block")(gaussian(512, 256)).sum().item()


def test_unsuitable_tensors_run_uncompiled(compiler, monkeypatch):
    good = gaussian(64)
    assert compiler.attempt(largest_per_block, good) is not None
    for other in (good[:1], good[:0], good.double(), good.to("meta"), good.clone().requires_grad_(), Marked(good)):
        assert compiler.attempt(largest_per_block, other) is None
    monkeypatch.setattr(compiled, "SMALLEST", 65)
    assert compiler.attempt(largest_per_block, good) is None
    monkeypatch.setattr(compiled, "SMALLEST", 1)
    monkeypatch.setenv(SWITCH, "0")
    assert compiler.attempt(largest_per_block, good) is None


class Marked(Tensor):
    """A tensor of another class."""


@pytest.mark.usefixtures("compiler")
def test_differentiated_cast_runs_uncompiled():
    """Gradients flow through a cast of a tensor that requires them."""
    values = gaussian(4, 64).requires_grad_()
    BLOCK(values).sum().backward()
    assert values.grad is not None


@pytest.mark.usefixtures("compiler")
@pytest.mark.xfail(torch.__version__ < "2.13", raises=RuntimeError, reason="torch 2.9 cannot vectorise view(dtype)")
def test_vmapped_cast_runs_uncompiled():
    """The cast under torch.func.vmap matches the cast of each slice."""
    stacked = torch.func.vmap(BLOCK)(gaussian(4, 8, 64))
    assert torch.equal(stacked, torch.stack([BLOCK(part) for part in gaussian(4, 8, 64)]))


@pytest.mark.slow
def test_vmapped_function_compiles_for_plain_tensors(compiler: Compiler):
    """A function that was first called under vmap is still compiled for plain tensors."""
    torch.func.vmap(lambda blocks: compiler.run(largest_per_block, blocks))(gaussian(4, 64, 48))
    assert compiler.attempt(largest_per_block, gaussian(64, 48)) is not None


@pytest.mark.usefixtures("compiler")
def test_small_workloads_are_not_compiled():
    """A function is compiled only after it has processed enough elements."""
    patient = Compiler(patience=200)
    found = [patient.attempt(largest_per_block, gaussian(64)) is None for _ in range(5)]
    assert found == [True, True, True, False, False]
