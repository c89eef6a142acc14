"""Losses counted in pieces equal the counts of the cast."""

import pytest
import torch
from loopscope.lowbit.casts import SUMS, Cast, Counts, FormatRegistry, RuleRegistry, largest_magnitudes
from loopscope.training_hooks.lowbit import cast_losses
from loopscope.training_hooks.lowbit.cast_losses import losses

CASTS = [Cast(form, rule) for form in FormatRegistry.names() for rule in RuleRegistry.names()]
WHOLE = [SUMS.index(name) for name in SUMS if name not in ("excess_sum", "squared_error", "squared_norm")]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(37, 100, generator=generator)
    odd = gaussian.clone()
    odd[3, 4:8] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    return {
        "gaussian": gaussian,
        "tiny": gaussian * 1e-30,
        "huge": gaussian * 1e36,
        "largest": gaussian.clamp(-1, 1) * torch.finfo(torch.float32).max,
        "largest bfloat16": (gaussian.clamp(-1, 1) * torch.finfo(torch.bfloat16).max).bfloat16(),
        "heavy-tailed": torch.empty(37, 100).cauchy_(generator=generator),
        "subnormal": gaussian * 1e-42,
        "constant": torch.full((5, 33), 0.3),
        "zeros": torch.zeros(4, 32),
        "non-finite": odd,
        "nothing finite": torch.full((3, 3), torch.nan),
        "outlier": gaussian.index_put((torch.tensor([1]), torch.tensor([1])), torch.tensor(1e9)),
        "bfloat16": gaussian.bfloat16(),
        "float16": (gaussian * 3e4).half(),
        "transposed": gaussian.t(),
        "number": torch.tensor(3.0),
        "row": gaussian[0],
        "four dimensions": gaussian[:32].reshape(2, 4, 4, 100),
        "float64": gaussian.double(),
        "empty": torch.empty(0, 16),
    }


def assert_counted_alike(
    values: torch.Tensor, casts: list[Cast], earlier: torch.Tensor | None = None, rtol: float = 2e-6
) -> None:
    (of_values,) = losses([values], casts, [earlier])
    assert_alike(values, casts, of_values, earlier, rtol)


def assert_alike(
    values: torch.Tensor,
    casts: list[Cast],
    of_values: list[Counts],
    earlier: torch.Tensor | None = None,
    rtol: float = 2e-6,
) -> None:
    for cast, found in zip(casts, of_values, strict=True):
        counts = cast.with_counts(values, earlier=earlier)[1]
        assert found.sums[WHOLE].tolist() == counts.sums[WHOLE].tolist(), cast
        torch.testing.assert_close(found.sums, counts.sums, rtol=rtol, atol=0.0, msg=str(cast))
        torch.testing.assert_close(found.maxima, counts.maxima, rtol=1e-6, atol=0.0, msg=str(cast))


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("kind", tensors())
def test_losses_match_casts_of_all_formats(kind):
    """Every format and rule is compared with the counts of its cast, on tensors of every kind."""
    assert_counted_alike(tensors()[kind], CASTS)


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("kind", ["gaussian", "non-finite", "bfloat16", "transposed", "number"])
def test_piece_boundaries_do_not_change_the_result(kind, monkeypatch):
    monkeypatch.setattr(cast_losses, "PIECE", 200)
    assert_counted_alike(tensors()[kind], [Cast("e2m1", rule) for rule in RuleRegistry.names()])


def test_small_scales_and_block_sizes_match_casts():
    """Scale factors below one, soft rounding and blocks of 1, 7 and 1000 elements give the same counts as the cast."""
    casts = [Cast("e2m1", "block", block=size, q_scalar=scalar) for size in (1, 7, 1000) for scalar in (0.5, 0.01)]
    assert_counted_alike(tensors()["gaussian"], casts)
    assert_counted_alike(tensors()["gaussian"], [Cast("e4m3", "current", rounding="soft", q_scalar=0.3)])


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("q_scalar", [0.25, 3.0])
def test_scale_factors_match_casts_near_float32_limit(q_scalar):
    """Tensors that reach the largest float32 or bfloat16 value are scaled by 0.25 and by 3."""
    for kind in ("largest", "largest bfloat16"):
        assert_counted_alike(
            tensors()[kind], [Cast(cast.format, cast.rule, q_scalar=q_scalar) for cast in CASTS], rtol=1e-5
        )


def test_casts_keep_the_requested_order():
    """Casts with different rules return their counts in the given order; no tensors give an empty list."""
    casts = [Cast("e2m1", "row"), Cast("e2m1", "block"), Cast("e2m1", "nvfp4", rows=16), Cast("e4m3", "mx_even")]
    assert_counted_alike(tensors()["gaussian"], casts)
    assert losses([], casts) == []


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("piece", [cast_losses.PIECE, 1000])
def test_mixed_tensors_are_counted_separately(piece, monkeypatch):
    """In one call, every tensor matches its own cast, also with small pieces and with a history of magnitudes."""
    monkeypatch.setattr(cast_losses, "PIECE", piece)
    casts = [Cast("e2m1", rule) for rule in RuleRegistry.names()]
    many = [*tensors().values(), *tensors().values()]
    past = [
        torch.stack([torch.zeros(()), (largest_magnitudes(values, None) * index / 7).float()]) if index % 3 else None
        for index, values in enumerate(many)
    ]
    for values, found, earlier in zip(many, losses(many, casts, past), past, strict=True):
        assert_alike(values, casts, found, earlier)


@pytest.mark.parametrize("past", [0.0, 0.1, 100.0])
def test_delayed_scales_use_the_history(past):
    """The counts match the cast for histories of zero, small and large magnitudes."""
    earlier = torch.tensor([0.0, past, past / 2])
    assert_counted_alike(tensors()["gaussian"], [Cast("e4m3", "delayed"), Cast("e5m2", "delayed")], earlier)


@pytest.mark.longer
def test_counting_does_not_change_tensors():
    values = tensors()["non-finite"]
    before, version = values.clone(), values._version
    losses([values], CASTS)
    assert torch.equal(values.nan_to_num(7.0), before.nan_to_num(7.0))
    assert values._version == version
