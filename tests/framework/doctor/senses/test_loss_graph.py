"""Facts that the graph of a loss shows, for losses whose properties are known."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loopscope.doctor.senses.loss_graph import describe_loss
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ROWS, CLASSES = 4, 5
TARGETS = torch.tensor([0, 3, 1, 2])
WEIGHTS = nn.Parameter(torch.linspace(-1, 1, ROWS * CLASSES).reshape(ROWS, CLASSES))
COUNT = torch.tensor(4)


def logits() -> Tensor:
    return WEIGHTS * 1.5


def cross_entropy(values: Tensor | None = None, **options: Any) -> Tensor:
    return F.cross_entropy(logits() if values is None else values, TARGETS, **options)


LOSSES: dict[str, tuple[Callable[[], Tensor], tuple[str, float, bool, int]]] = {
    "mean": (cross_entropy, ("mean", 1, False, CLASSES)),
    "sum": (lambda: cross_entropy(reduction="sum"), ("sum", 1, False, CLASSES)),
    "sum of none": (lambda: cross_entropy(reduction="none").sum(), ("sum", 1, False, CLASSES)),
    "mean of none": (lambda: cross_entropy(reduction="none").mean(), ("mean", 1, False, CLASSES)),
    "sum by count": (lambda: cross_entropy(reduction="sum") / COUNT, ("sum", 1, True, CLASSES)),
    "sum by number": (lambda: cross_entropy(reduction="sum") / 4, ("sum", 4, False, CLASSES)),
    "mean by float": (lambda: cross_entropy() / 8.0, ("mean", 8, False, CLASSES)),
    "mean times share": (lambda: 0.25 * cross_entropy(), ("mean", 4, False, CLASSES)),
    "mean twice divided": (lambda: cross_entropy() / 2 / 4, ("mean", 8, False, CLASSES)),
    "smoothing": (lambda: cross_entropy(label_smoothing=0.1), ("mean", 1, False, CLASSES)),
    "probabilities": (lambda: F.cross_entropy(logits(), torch.ones(ROWS, CLASSES)), ("mean", 1, False, CLASSES)),
    "nll": (lambda: F.nll_loss(F.log_softmax(logits(), -1), TARGETS), ("mean", 1, False, CLASSES)),
    "gather": (lambda: -F.log_softmax(logits(), -1).gather(1, TARGETS[:, None]).mean(), ("mean", 1, False, CLASSES)),
    "converted": (lambda: cross_entropy(logits().double()).float(), ("mean", 1, False, CLASSES)),
    "with penalty": (lambda: 0.1 * WEIGHTS.square().sum() + cross_entropy(), ("mean", 1, False, CLASSES)),
    "mean of losses": (lambda: torch.stack([cross_entropy(), cross_entropy()]).mean(), ("mean", 1, False, CLASSES)),
    "weighted sum of losses": (
        lambda: (torch.rand(3).exp() * torch.stack([cross_entropy()] * 3) + 0.5 * torch.ones(3)).sum(),
        ("", 1, False, CLASSES),
    ),
    "sum of losses": (lambda: torch.stack([cross_entropy(), cross_entropy()]).sum(), ("mean", 1, False, CLASSES)),
    "mean with weight": (lambda: WEIGHTS.sum() + 0.5 * cross_entropy(), ("mean", 1, False, CLASSES)),
    "sum by rows with penalty": (
        lambda: cross_entropy(reduction="sum") / ROWS - WEIGHTS.mean(),
        ("sum", ROWS, False, CLASSES),
    ),
    "mse": (lambda: F.mse_loss(logits(), torch.zeros(ROWS, CLASSES)), ("mean", 1, False, 0)),
    "bce": (lambda: F.binary_cross_entropy(logits().sigmoid(), torch.ones(ROWS, CLASSES)), ("mean", 1, False, 0)),
    "huber": (lambda: F.huber_loss(logits(), torch.zeros(ROWS, CLASSES), reduction="sum"), ("sum", 1, False, 0)),
    "kl": (lambda: F.kl_div(F.log_softmax(logits(), -1), torch.ones(ROWS, CLASSES)), ("mean", 1, False, 0)),
    "own": (lambda: logits().square().sum() / 2, ("sum", 2, False, 0)),
    "norm": (lambda: logits().norm(), ("", 1, False, 0)),
    "mean of rows": (lambda: logits().square().sum(1).mean(), ("mean", 1, False, 0)),
    "mean of means": (lambda: logits().mean((0, 1)) + 1, ("mean", 1, False, 0)),
    "pairs": (lambda: -F.log_softmax(logits() @ logits().T, 1).diagonal().mean(), ("mean", 1, False, 0)),
    "pairs of classes": (lambda: cross_entropy(logits() @ logits().T), ("mean", 1, False, ROWS)),
}
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "sum of a dimension": lambda x: x.sum(1),
    "sum of both": lambda x: x.sum((0, -1)),
    "mean": lambda x: x.mean(),
    "mean of a dimension": lambda x: x.mean(-1, keepdim=True),
    "logsumexp": lambda x: x.logsumexp(-1),
    "norm": lambda x: x.norm(dim=0),
    "variance": lambda x: x.var(unbiased=False),
    "deviation": lambda x: x.std((0,), unbiased=False),
    "largest": lambda x: x.amax(-1),
    "largest with index": lambda x: x.max(0).values,
    "product": lambda x: x.prod(),
    "cumulative": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(-1),
    "log-softmax": lambda x: x.log_softmax(0),
    "median": lambda x: x.median(),
    "sorted": lambda x: x.sort(-1).values,
    "einsum": lambda x: torch.einsum("...,...->...", x, x),
    "selected": lambda x: x.select(0, 0) if x.ndim else x,
    "stacked": lambda x: torch.stack([x, x], -1),
    "nan": lambda x: x.nansum(0),
}


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", LOSSES)
def test_graph_shows_reduction_divisor_and_classes(name: str) -> None:
    compute, expected = LOSSES[name]
    found = describe_loss(compute())
    assert (found.reduction, found.divisor, found.is_divided_by_tensor, found.class_count) == expected
    assert found.leftover_gradients == ()
    assert not found.is_doubly_normalised


@pytest.mark.parametrize("convert", [lambda x: x, lambda x: x.float(), lambda x: x.view(2, 2, -1).flatten(0, 1)])
def test_softmax_before_log_softmax_is_found(convert: Callable[[Tensor], Tensor]) -> None:
    assert describe_loss(cross_entropy(convert(logits().softmax(-1).double()))).is_doubly_normalised
    assert not describe_loss(cross_entropy(convert(logits().double()))).is_doubly_normalised


@pytest.mark.parametrize("normalise", [torch.sigmoid, F.logsigmoid, lambda x: x.softmax(1), lambda x: x.log_softmax(1)])
def test_sigmoid_before_bce_with_logits_is_found(normalise: Callable[[Tensor], Tensor]) -> None:
    targets = torch.ones(ROWS, CLASSES)
    assert describe_loss(F.binary_cross_entropy_with_logits(normalise(logits()), targets)).is_doubly_normalised
    assert not describe_loss(F.binary_cross_entropy_with_logits(logits(), targets)).is_doubly_normalised


TARGETS = torch.tensor([0, 1] * (ROWS // 2) + [0] * (ROWS % 2))


def through_layer(*shape: int) -> Tensor:
    """Return the output of a linear layer with bias, shape (..., CLASSES)."""
    return nn.Linear(5, CLASSES)(torch.randn(*shape, 5))


def ctc(values: Tensor) -> Tensor:
    """Return the CTC loss of outputs of shape (7, ROWS, CLASSES) for two labels in each row."""
    labels = torch.ones(ROWS, 2, dtype=torch.int64)
    return F.ctc_loss(values, labels, torch.full((ROWS,), 7), torch.full((ROWS,), 2))


WITHOUT_LOGARITHMS = {
    "logits": lambda: F.nll_loss(through_layer(ROWS), TARGETS),
    "probabilities": lambda: F.nll_loss(through_layer(ROWS).softmax(-1), TARGETS),
    "pixels": lambda: F.nll_loss(nn.Conv2d(2, CLASSES, 1)(torch.randn(1, 2, 3, 3)), torch.zeros(1, 3, 3).long()),
    "ctc": lambda: ctc(through_layer(ROWS, 7).transpose(0, 1)),
    "ctc of a view": lambda: ctc(nn.Linear(5, CLASSES)(torch.randn(ROWS, 7, 5).transpose(0, 1))),
}
WITH_LOGARITHMS = {
    "cross-entropy": lambda: F.cross_entropy(through_layer(ROWS), TARGETS),
    "log-softmax": lambda: F.nll_loss(through_layer(ROWS).log_softmax(-1), TARGETS),
    "logarithm": lambda: F.nll_loss(through_layer(ROWS).softmax(-1).log(), TARGETS),
    "ctc": lambda: ctc(through_layer(ROWS, 7).log_softmax(-1).transpose(0, 1)),
    "sum of logarithms": lambda: F.nll_loss(through_layer(ROWS).log_softmax(-1) + torch.randn(CLASSES), TARGETS),
}


@pytest.mark.parametrize("name", WITHOUT_LOGARITHMS)
def test_likelihoods_without_logarithms_are_found(name: str) -> None:
    assert describe_loss(WITHOUT_LOGARITHMS[name]()).lacks_log_softmax


@pytest.mark.parametrize("name", WITH_LOGARITHMS)
def test_likelihoods_of_logarithms_are_right(name: str) -> None:
    assert not describe_loss(WITH_LOGARITHMS[name]()).lacks_log_softmax


def test_path_has_names_and_a_limit() -> None:
    loss = cross_entropy() / 2
    assert describe_loss(loss).loss_operations[:3] == ("DivBackward0", "NllLossBackward0", "LogSoftmaxBackward0")
    for _ in range(20):
        loss = loss + 1
    assert describe_loss(loss).loss_operations == ("AddBackward0",) * 12


def test_classes_of_images_are_in_dimension_one() -> None:
    pixels = nn.Parameter(torch.zeros(2, 3, 4, 5))
    assert describe_loss(F.cross_entropy(pixels, torch.zeros(2, 4, 5, dtype=torch.int64))).class_count == 3


def test_float16_on_the_path_is_found() -> None:
    assert describe_loss(cross_entropy(logits().half().float())).is_float16
    assert not describe_loss(cross_entropy(logits().bfloat16().float())).is_float16


def test_factor_of_a_loss_scaler_is_skipped() -> None:
    loss = cross_entropy() / 4 * torch.tensor(65536.0)
    assert describe_loss(loss, is_scaled=True).divisor == 4
    assert describe_loss(loss).is_divided_by_tensor


def test_reading_runs_no_checkpointed_region_again() -> None:
    calls = []

    def region(values: Tensor) -> Tensor:
        calls.append(1)
        return cross_entropy(values * 2) / 4

    loss = checkpoint(region, logits(), use_reentrant=False)
    found = describe_loss(loss)
    assert (len(calls), found.reduction, found.class_count, found.divisor) == (1, "mean", CLASSES, 4.0)


def test_freed_graph_is_still_described() -> None:
    loss = cross_entropy() / 4
    loss.backward()
    found = describe_loss(loss)
    assert (found.reduction, found.class_count, found.is_divided_by_tensor) == ("mean", CLASSES, False)


class Doubled(torch.autograd.Function):
    """A custom function with one input."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@pytest.mark.parametrize("name", REDUCTIONS)
def test_every_reduction_is_described_without_error(name: str) -> None:
    """The graph of a reduction of any other, and of its mean, is read, also where its nodes save several numbers."""
    for inner in REDUCTIONS.values():
        rows = inner(logits()).reshape(-1, 1)
        reduced = REDUCTIONS[name](rows)
        for loss in (reduced.sum(), reduced.mean(), -F.logsigmoid(reduced).mean()):
            assert describe_loss(loss).loss_operations


def test_unknown_operations_are_no_error() -> None:
    through = describe_loss(Doubled.apply(cross_entropy()))
    assert (through.loss_operations[0], through.reduction) == ("DoubledBackward", "mean")
    assert describe_loss(WEIGHTS.detach().sum().requires_grad_()).loss_operations == ()
    parameter = nn.Parameter(torch.ones(()))
    assert describe_loss(parameter).reduction == ""


COLUMN = nn.Parameter(torch.linspace(-1, 1, ROWS)[:, None])
VALUES = torch.linspace(0, 1, ROWS)
COMPARISONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "mse": (lambda outputs: F.mse_loss(outputs, VALUES), True),
    "smooth l1": (lambda outputs: F.smooth_l1_loss(outputs, VALUES), True),
    "own square": (lambda outputs: (outputs - VALUES).square().mean(), True),
    "own distance": (lambda outputs: (VALUES - outputs).abs().sum(), True),
    "rows against a column": (lambda outputs: (outputs.squeeze(1) - VALUES[:, None]).square().mean(), True),
    "product": (lambda outputs: -(outputs * VALUES).mean(), True),
    "clipped surrogate of a policy": (
        lambda outputs: (
            F.mse_loss(outputs, VALUES[:, None])
            - torch.min(outputs[:, 0].exp() * VALUES[:, None], outputs[:, 0].exp().clamp(0.8, 1.2)).mean()
        ),
        True,
    ),
    "pairs of one vector": (lambda outputs: (outputs[:, 0] - outputs[:, 0][:, None]).abs().mean(), False),
    "sums over a matrix": (lambda outputs: (outputs[:, 0] * torch.ones(ROWS, ROWS).tril()).mean(), False),
    "same columns": (lambda outputs: F.mse_loss(outputs, VALUES[:, None]), False),
    "same rows": (lambda outputs: F.mse_loss(outputs.squeeze(1), VALUES), False),
    "number": (lambda outputs: (outputs - 1).square().mean(), False),
    "pairs on purpose": (lambda outputs: (outputs[:, 0][:, None] - VALUES[None]).square().mean(), False),
    "weights of a single row": (lambda outputs: (outputs[:1] * VALUES).mean(), False),
    "quantiles": (lambda outputs: (outputs.expand(ROWS, 3) - VALUES[:, None]).abs().mean(), False),
    "product within the model": (lambda outputs: ((outputs @ outputs.T) * VALUES).mean(), False),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", COMPARISONS)
def test_pairs_of_outputs_and_targets_are_found(name: str) -> None:
    compute, expected = COMPARISONS[name]
    assert describe_loss(compute(COLUMN * 2)).is_broadcast is expected


CAUSAL = torch.ones(6, 6).tril().bool()
PREFIX = CAUSAL | (torch.arange(6) < 3)
NOT_PADDED = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()[:, None]
MASKS: dict[str, tuple[Tensor | None, bool]] = {
    "none": (None, True),
    "padding": (NOT_PADDED, True),
    "causal": (CAUSAL, False),
    "causal and padding": (CAUSAL & NOT_PADDED, False),
    "prefix": (PREFIX, False),
}
"""The pairs of queries and keys that are not masked, and whether the last position but one sees the last one."""


def attention(way: str, mask: Tensor | None, states: Tensor) -> Tensor:
    """Return the outputs of one head of attention, shape (batch, tokens, channels), in different formulations."""
    if way == "fused":
        rows = states[:, None]
        return F.scaled_dot_product_attention(
            rows, rows, rows, attn_mask=None if mask is None else mask.expand(2, 6, 6)[:, None]
        )[:, 0]
    scores = states @ states.transpose(1, 2) / 2
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if way == "fill" else torch.where(mask, scores, -1e9)
    return F.dropout(scores.softmax(-1), 0.1) @ states


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("way", ["fused", "fill", "where"])
def test_attention_that_looks_ahead_is_counted(way: str, mask: str) -> None:
    allowed, expected = MASKS[mask]
    outputs = attention(way, allowed, torch.randn(2, 6, 4, requires_grad=True))
    found = describe_loss(outputs.square().mean())
    assert (found.attention_count, found.look_ahead_count) == (1, int(expected))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"attn_mask": ~CAUSAL}, False),
        ({"attn_mask": torch.zeros(6, 6).masked_fill(~CAUSAL, -torch.inf)}, False),
        ({"key_padding_mask": ~NOT_PADDED[:, 0]}, True),
        ({"attn_mask": ~CAUSAL, "key_padding_mask": ~NOT_PADDED[:, 0], "need_weights": False}, False),
        ({"key_padding_mask": ~NOT_PADDED[:, 0], "need_weights": False}, True),
    ],
)
def test_masks_of_attention_layers_are_read(options: dict[str, Any], expected: bool) -> None:
    """Masks that are added to scores outside of the fused operation leave no trace, and count as causal."""
    states = torch.randn(2, 6, 4, requires_grad=True)
    layer = nn.MultiheadAttention(4, 1, batch_first=True)
    found = describe_loss(layer(states, states, states, **options)[0].square().mean())
    is_added = "need_weights" not in options and bool(options)
    assert found.look_ahead_count == int(expected and not is_added)


def test_causal_operations_look_at_no_later_position() -> None:
    rows = torch.randn(2, 1, 6, 4, requires_grad=True)
    found = describe_loss(F.scaled_dot_product_attention(rows, rows, rows, is_causal=True).square().mean())
    assert (found.attention_count, found.look_ahead_count) == (1, 0)


def test_checkpointed_attention_is_read_or_left_out() -> None:
    """Sizes and masks are in tensors that checkpointing packs; without a mask the nodes alone show enough."""
    states = torch.randn(2, 6, 4, requires_grad=True)
    for way, mask, count in (("fill", None, 1), ("fill", CAUSAL, 0), ("fused", None, 0)):
        found = describe_loss(checkpoint(attention, way, mask, states, use_reentrant=False).square().mean())
        assert found.look_ahead_count == count


def test_cross_attention_needs_no_mask() -> None:
    queries, keys = torch.randn(2, 1, 3, 4, requires_grad=True), torch.randn(2, 1, 6, 4)
    found = describe_loss(F.scaled_dot_product_attention(queries, keys, keys).square().mean())
    assert found.attention_count == 0


TALL = nn.Parameter(torch.linspace(-1, 1, ROWS * 3).reshape(ROWS, 3))
SQUARE = nn.Parameter(torch.eye(ROWS))
LABELS = torch.tensor([0, 2, 1, 2])
NORMALISED: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "rows": (lambda: F.nll_loss(F.log_softmax(TALL * 2, dim=0), LABELS), True),
    "rows by gather": (lambda: -F.log_softmax(TALL * 2, dim=-2).gather(1, LABELS[:, None]).mean(), True),
    "classes": (lambda: F.nll_loss(F.log_softmax(TALL * 2, dim=1), LABELS), False),
    "cross-entropy": (lambda: F.cross_entropy(TALL * 2, LABELS), False),
    "pairs": (lambda: F.nll_loss(F.log_softmax(SQUARE * 2, dim=0), torch.arange(ROWS)), False),
    "one row": (lambda: F.cross_entropy(TALL[0] * 2, LABELS[0]), False),
}


@pytest.mark.parametrize("name", NORMALISED)
def test_softmax_over_rows_is_found(name: str) -> None:
    compute, expected = NORMALISED[name]
    assert describe_loss(compute()).is_normalised_over_rows is expected


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda: F.cross_entropy(TALL.relu(), LABELS), True),
        (lambda: F.cross_entropy(TALL.relu()[:, :2].float(), LABELS % 2), True),
        (lambda: F.binary_cross_entropy_with_logits(TALL.relu(), torch.ones(ROWS, 3)), True),
        (lambda: F.cross_entropy(TALL.relu() @ SQUARE[:3], LABELS), False),
        (lambda: F.cross_entropy(TALL.tanh(), LABELS), False),
        (lambda: F.mse_loss(TALL.relu(), torch.ones(ROWS, 3)), False),
    ],
)
def test_relu_on_logits_is_found(compute: Callable[[], Tensor], expected: bool) -> None:
    assert describe_loss(compute()).is_rectified is expected


@pytest.mark.parametrize("ignored", [False, True])
def test_entropy_is_the_loss_of_frequencies(ignored: bool) -> None:
    """On average over batches, it is the loss of the logarithms of the classes' frequencies."""
    generator = torch.Generator().manual_seed(0)
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    estimates, losses = [], []
    for _ in range(300):
        targets = torch.multinomial(shares, 60, replacement=True, generator=generator)
        if ignored:
            targets[::7] = -100
        loss = F.cross_entropy(shares.log().expand(60, 4).clone().requires_grad_(), targets)
        estimates.append(describe_loss(loss).constant_loss)
        losses.append(loss.item())
    assert sum(estimates) / 300 == pytest.approx(sum(losses) / 300, rel=0.01)


def test_few_or_weighted_targets_have_no_entropy() -> None:
    outputs, targets = torch.randn(20, 4, requires_grad=True), torch.arange(20) % 4
    assert describe_loss(F.cross_entropy(outputs, targets)).constant_loss is None
    many = outputs.repeat(9, 1), targets.repeat(9)
    assert describe_loss(F.cross_entropy(*many)).constant_loss == pytest.approx(math.log(4) + 3 / 360)
    assert describe_loss(F.cross_entropy(*many, weight=torch.ones(4))).constant_loss is None


def test_first_targets_are_those_of_the_loss() -> None:
    assert describe_loss(cross_entropy()).first_targets == tuple(TARGETS.tolist())
    assert describe_loss(logits().square().sum()).first_targets == ()


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (cross_entropy, False),
        (lambda: cross_entropy(label_smoothing=0.1), False),
        (lambda: cross_entropy() / 4, False),
        (lambda: cross_entropy() + WEIGHTS.square().mean(), True),
        (lambda: cross_entropy() + 0.1 * F.mse_loss(logits(), torch.zeros(ROWS, CLASSES)), True),
        (lambda: cross_entropy() - F.kl_div(F.log_softmax(logits() / 4, -1), torch.ones(ROWS, CLASSES)), True),
        (lambda: cross_entropy(30 * WEIGHTS.tanh()), True),
        (lambda: cross_entropy(WEIGHTS.tanh() / 0.05), True),
        (lambda: logits().square().sum() + logits().mean(), False),
    ],
)
@pytest.mark.filterwarnings("ignore:reduction")
def test_modified_cross_entropies_are_found(compute: Callable[[], Tensor], expected: bool) -> None:
    assert describe_loss(compute()).is_modified is expected


NUMBERS = torch.tensor([[-2.0, 0.5], [0.0, 3.0], [1.0, -1.0], [5.0, 0.25]])
OUTPUTS = nn.Parameter(torch.linspace(-1, 1, 8).reshape(4, 2))


@pytest.mark.parametrize(
    ("loss", "has_terms"),
    [
        (lambda: F.mse_loss(OUTPUTS * 2, NUMBERS), False),
        (lambda: 2 * F.mse_loss(OUTPUTS * 2, NUMBERS), False),
        (lambda: F.mse_loss(OUTPUTS * 2, NUMBERS, reduction="sum"), False),
        (lambda: F.mse_loss(OUTPUTS * 2, NUMBERS) + OUTPUTS.square().sum(), True),
    ],
    ids=["mean", "scaled", "summed", "with penalty"],
)
def test_quantiles_and_variance_of_targets(loss: Callable[[], Tensor], has_terms: bool) -> None:
    """The loss of predicting the mean of each output, and that of the outputs, without factors and other terms."""
    found = describe_loss(loss())
    ordered = NUMBERS.flatten().sort().values
    assert found.target_quantiles == tuple(ordered[[0, 1, 6, 7]].tolist())
    assert found.constant_loss == pytest.approx(F.mse_loss(NUMBERS.mean(0).expand(4, 2), NUMBERS).item())
    assert found.term_loss == pytest.approx(F.mse_loss(OUTPUTS * 2, NUMBERS).item())
    assert found.has_terms is has_terms


@pytest.mark.parametrize("weights", [{"weight": torch.tensor([1.0, 2.0])}, {"pos_weight": torch.tensor([5.0, 5.0])}])
def test_weighted_losses_have_no_constant(weights: dict[str, Tensor]) -> None:
    """The best constant of a weighted loss is another one, and weights of a loss are part of it."""
    bits = (NUMBERS > 0).float()
    plain = describe_loss(F.binary_cross_entropy_with_logits(OUTPUTS * 2, bits))
    assert plain.constant_loss is not None
    found = describe_loss(F.binary_cross_entropy_with_logits(OUTPUTS * 2, bits, **weights))
    assert found.constant_loss is None
    assert found.output_variation == plain.output_variation


def test_few_masks_have_one_constant() -> None:
    """A constant for each of 400 pixels would fit eight masks with 2 % of ones far better than new ones."""
    masks = (torch.rand(8, 20, 20, generator=torch.Generator().manual_seed(0)) < 0.02).float()
    outputs = torch.zeros_like(masks).requires_grad_()
    share = float(masks.mean())
    entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
    found = describe_loss(F.binary_cross_entropy_with_logits(outputs * 2, masks))
    assert found.constant_loss == pytest.approx(entropy)


def test_absolute_errors_have_no_mean_to_beat() -> None:
    found = describe_loss(F.smooth_l1_loss(OUTPUTS * 2, NUMBERS))
    assert found.target_quantiles
    assert found.constant_loss is None


KINDS = torch.tensor([0, 1, 2, 1]).repeat(30)
BITS = F.one_hot(KINDS, 3).float()


@pytest.mark.parametrize(
    ("loss", "constant"),
    [
        (lambda outputs: F.cross_entropy(outputs, KINDS), lambda: (BITS.mean(0) + 1e-9).log().expand(120, 3)),
        (
            lambda outputs: F.binary_cross_entropy_with_logits(outputs, BITS),
            lambda: BITS.mean(0).logit().expand(120, 3),
        ),
        (lambda outputs: F.mse_loss(outputs, BITS), lambda: BITS.mean(0).expand(120, 3)),
    ],
    ids=["classes", "labels", "numbers"],
)
def test_constant_outputs_do_not_vary(loss: Callable[[Tensor], Tensor], constant: Callable[[], Tensor]) -> None:
    """The best constant has the constant loss and the variation 0, right outputs have the variation of targets."""
    found = describe_loss(3 * loss(constant().clone().requires_grad_()))
    assert found.term_loss == pytest.approx(found.constant_loss, rel=0.02)
    assert found.output_variation == pytest.approx(0, abs=1e-6)
    right = BITS if loss(BITS) < 1e-6 else 40 * (BITS - 0.5)
    assert describe_loss(loss(right.clone().requires_grad_())).output_variation == pytest.approx(1, abs=1e-5)


def test_targets_that_are_not_finite_or_not_probabilities() -> None:
    logs = torch.tensor([[0.5, -1.0], [2.0, 0.0]]).log()
    assert describe_loss(F.smooth_l1_loss(OUTPUTS[:2] * 2, logs)).nonfinite_targets == 0.5
    masks = torch.tensor([[0.0, 255.0], [0.0, 1.0]])
    found = describe_loss(F.binary_cross_entropy_with_logits(OUTPUTS[:2] * 2, masks))
    assert (found.invalid_targets, found.target_quantiles[-1]) == (0.25, 255)
    assert describe_loss(F.binary_cross_entropy_with_logits(OUTPUTS[:2] * 2, (masks > 0).float())).invalid_targets == 0


@pytest.mark.parametrize(("shift", "expected"), [(0, True), (1, False)])
def test_embeddings_of_the_targets_are_found(shift: int, expected: bool) -> None:
    """A decoder that reads what it should predict, and one that reads the tokens before."""
    embedding, targets = nn.Embedding(7, 4), torch.tensor([[3, 1, 4, 1, 5], [6, 2, 6, 5, 3]])
    outputs = embedding(targets.roll(shift, dims=1)) @ embedding.weight.T
    assert describe_loss(F.cross_entropy(outputs.flatten(0, 1), targets.flatten())).reads_targets is expected


@pytest.mark.parametrize(
    ("activation", "share"),
    [
        (torch.relu, 2 / 8),
        (torch.sigmoid, 4 / 8),
        (torch.tanh, 3 / 8),
        (lambda outputs: outputs.sigmoid().view(2, 4).view(4, 2), 4 / 8),
        (lambda outputs: 10 * outputs.sigmoid(), None),
        (lambda outputs: outputs, None),
    ],
    ids=["relu", "sigmoid", "tanh", "sigmoid and views", "scaled sigmoid", "linear"],
)
def test_targets_outside_of_the_last_activation(activation: Callable[[Tensor], Tensor], share: float | None) -> None:
    assert describe_loss(F.mse_loss(activation(OUTPUTS * 2), NUMBERS)).unreachable_fraction == share


def test_sums_of_targets_that_are_numbers() -> None:
    several = torch.tensor([[1.0, 1.0, 0.0, 0.0, 1.0]] * ROWS)
    assert describe_loss(F.cross_entropy(logits(), several)).target_sum == 3
    assert describe_loss(F.cross_entropy(logits(), several.softmax(1))).target_sum == pytest.approx(1)
    assert describe_loss(cross_entropy()).target_sum is None


def test_divergence_of_probabilities_lacks_their_logarithm() -> None:
    soft = torch.full((ROWS, CLASSES), 1 / CLASSES)
    assert describe_loss(4 * F.kl_div(logits().softmax(1), soft, reduction="batchmean")).lacks_log_softmax
    assert not describe_loss(4 * F.kl_div(logits().log_softmax(1), soft, reduction="batchmean")).lacks_log_softmax


@pytest.mark.parametrize("hard", [cross_entropy, lambda: (logits() - 1).square().mean()])
def test_divergence_of_probabilities_is_found_among_terms(hard: Callable[[], Tensor]) -> None:
    """As in distillation, where the other term is a loss of the classes."""
    soft = torch.full((ROWS, CLASSES), 1 / CLASSES)
    assert describe_loss(hard() / 2 + 4 * F.kl_div(logits().softmax(1), soft, reduction="sum")).lacks_log_softmax
    assert not describe_loss(
        hard() / 2 + 4 * F.kl_div(logits().log_softmax(1), soft, reduction="sum")
    ).lacks_log_softmax


def test_weight_after_division_by_rows_is_no_sum() -> None:
    found = describe_loss(10 * (F.mse_loss(OUTPUTS * 2, NUMBERS, reduction="sum") / 64))
    assert (found.reduction, found.divisor, found.divisions) == ("sum", pytest.approx(6.4), (64,))
    assert found.weights == (10,)


def test_squares_of_probabilities_are_no_divergence() -> None:
    target = torch.ones(ROWS, CLASSES)
    assert not describe_loss((target - 2 * logits().softmax(1)).pow(2).mean()).lacks_log_softmax
    assert not describe_loss(1 - (target * logits().softmax(1)).sum()).lacks_log_softmax


def test_large_targets_are_sampled() -> None:
    """A million targets of a batch take no longer than those of a small one; noise around a bound is reachable."""
    outputs = nn.Parameter(torch.zeros(2, 2**19))
    targets = torch.rand(2, 2**19) - 0.005
    found = describe_loss(F.mse_loss(outputs.sigmoid(), targets))
    assert found.unreachable_fraction == 0
    assert found.constant_loss == pytest.approx(F.mse_loss(targets, targets.mean(0).expand(2, -1)).item(), rel=0.1)


@pytest.mark.parametrize(("dim", "length", "expected"), [(0, 6, True), (1, 6, False), (0, ROWS, False)])
def test_attention_over_rows_is_found(dim: int, length: int, expected: bool) -> None:
    """A softmax whose first dimension is that of the rows; with as many positions as rows it is unknown."""
    scores = nn.Parameter(torch.randn(ROWS, length))
    outputs = (scores.softmax(dim)[..., None] * torch.randn(ROWS, length, CLASSES)).sum(1)
    assert describe_loss(F.cross_entropy(outputs, TARGETS)).is_normalised_over_rows is expected


ROWS_OF_VIEWS = torch.ones(ROWS, 8, requires_grad=True)
CLASS_WEIGHTS = torch.ones(CLASSES, 8, requires_grad=True)


def encoded() -> Tensor:
    return F.normalize(torch.tanh(ROWS_OF_VIEWS @ torch.ones(8, 8, requires_grad=True)), dim=1)


PAIRS: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "all pairs": (lambda: encoded() @ encoded().T / 0.1, True),
    "trained temperature": (lambda: encoded() @ encoded().T * torch.ones((), requires_grad=True).exp(), True),
    "pair and queue": (
        lambda: torch.cat([(encoded() * encoded()).sum(1, True), encoded() @ torch.ones(8, 9)], 1),
        True,
    ),
    "classifier": (lambda: F.linear(encoded(), CLASS_WEIGHTS), False),
    "biased classifier": (lambda: F.linear(encoded(), CLASS_WEIGHTS, torch.ones(CLASSES)), False),
    "cosines of classes": (lambda: 16 * F.linear(encoded(), F.normalize(CLASS_WEIGHTS)), False),
    "heads": (lambda: torch.cat([F.linear(encoded(), CLASS_WEIGHTS)] * 2, 1), False),
}


@pytest.mark.parametrize("name", PAIRS)
def test_contrastive_losses_compare_outputs(name: str) -> None:
    make, expected = PAIRS[name]
    assert describe_loss(F.cross_entropy(make(), torch.zeros(ROWS, dtype=torch.long))).compares_outputs is expected


KEYS = F.normalize(torch.arange(1.0, 73.0).reshape(9, 8).sin(), dim=1)
COSINES: dict[str, tuple[Callable[[], Tensor], float | None]] = {
    "all pairs": (lambda: encoded() @ encoded().T, 1.0),
    "pairs with a temperature": (lambda: encoded() @ encoded().T / 0.1, 10.0),
    "pairs without themselves": (
        lambda: (encoded() @ encoded().T)[~torch.eye(ROWS, dtype=torch.bool)].view(ROWS, -1) / 0.5,
        2.0,
    ),
    "pair and queue": (lambda: torch.cat([(encoded() * encoded()).sum(1, True), encoded() @ KEYS.T], 1), 1.0),
    "keys without a gradient": (lambda: encoded() @ KEYS.T, 1.0),
    "cosine similarity": (lambda: F.cosine_similarity(ROWS_OF_VIEWS[:, None], CLASS_WEIGHTS, dim=-1), 1.0),
    "classes with a factor": (lambda: 16 * F.linear(encoded(), F.normalize(CLASS_WEIGHTS)), 16.0),
    "trained temperature": (lambda: encoded() @ encoded().T * torch.ones((), requires_grad=True).exp(), None),
    "classes of other lengths": (lambda: F.linear(encoded(), CLASS_WEIGHTS), None),
    "rows of other lengths": (lambda: F.linear(ROWS_OF_VIEWS, F.normalize(CLASS_WEIGHTS)), None),
    "classifier": (lambda: F.linear(ROWS_OF_VIEWS, CLASS_WEIGHTS), None),
}


@pytest.mark.parametrize("name", COSINES)
def test_scale_of_cosines_is_that_of_logits(name: str) -> None:
    make, expected = COSINES[name]
    scale = describe_loss(F.cross_entropy(make(), torch.zeros(ROWS, dtype=torch.long))).cosine_scale
    assert scale == (expected if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)], True),
        ([nn.BatchNorm1d(6), nn.Linear(6, 2)], True),
        ([nn.LayerNorm(6), nn.Linear(6, 2)], True),
        ([nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)], False),
        ([nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)], False),
    ],
)
def test_normalisation_of_inputs_is_found(layers: list[nn.Module], expected: bool) -> None:
    assert describe_loss(nn.Sequential(*layers)(torch.randn(ROWS, 6)).square().mean()).normalises_inputs is expected
