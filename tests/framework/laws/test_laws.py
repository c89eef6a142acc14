"""Each law on a small training that breaks it and on one that does not."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from loopscope.errors import UsageError
from loopscope.laws import Law, LawRegistry, Outcome, Trial, broken, holds
from loopscope.testing import check_training
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, TIME, FEATURES, CLASSES = 32, 6, 5, 3
Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Any], Tensor]


def _batch() -> Batch:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, 11, (ROWS, TIME + 1), generator=generator)
    mask = torch.arange(TIME)[None] < torch.tensor([6, 3, 4, 2, 6, 5, 3, 4] * 4)[:, None]
    return {
        "x": torch.randn(ROWS, FEATURES, generator=generator),
        "y": torch.randint(0, CLASSES, (ROWS,), generator=generator),
        "tokens": tokens[:, :-1],
        "next": tokens[:, 1:],
        "padded": tokens[:, :-1] * mask,
        "sequence": torch.randn(ROWS, TIME, FEATURES, generator=generator),
        "mask": mask,
    }


class Recurrent(nn.Module):
    """An LSTM whose last state is classified."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(FEATURES, 8, batch_first=batch_first), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Attention(nn.Module):
    """A layer of attention over tokens."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.table, self.head, self.is_causal = nn.Embedding(11, 8), nn.Linear(8, 11), is_causal

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        return self.head(F.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=self.is_causal))


class Pooled(nn.Module):
    """A mean over positions, with or without the mask."""

    def __init__(self, *, uses_mask: bool) -> None:
        super().__init__()
        self.head, self.uses_mask = nn.Linear(FEATURES, CLASSES), uses_mask

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if not self.uses_mask:
            return self.head(x.mean(1))
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class PooledTokens(nn.Module):
    """A mean over embeddings of tokens, with or without those of padding, which is symbol 0."""

    def __init__(self, *, uses_mask: bool) -> None:
        super().__init__()
        self.table, self.head, self.uses_mask = nn.Embedding(11, 8), nn.Linear(8, CLASSES), uses_mask

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 0 if self.uses_mask else tokens >= 0)[..., None]
        return self.head((self.table(tokens) * mask).sum(1) / mask.sum(1))


class Adapted(nn.Module):
    """A frozen layer with an adapter of two matrices."""

    def __init__(self, *, starts_at_zero: bool) -> None:
        super().__init__()
        self.base = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, FEATURES) * (0.0 if starts_at_zero else 1.0))
        self.up = nn.Parameter(torch.zeros(CLASSES, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Denoiser(nn.Module):
    """A network that returns its loss, and whose inner network gets a time."""

    class Network(nn.Module):
        """A linear layer, with or without the time."""

        def __init__(self, *, uses_time: bool) -> None:
            super().__init__()
            self.head, self.uses_time = nn.Linear(FEATURES, FEATURES), uses_time

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            return self.head(x) * (time if self.uses_time else 1.0)

    def __init__(self, *, uses_time: bool) -> None:
        super().__init__()
        self.network = self.Network(uses_time=uses_time)

    def forward(self, x: Tensor) -> Tensor:
        time, noise = torch.rand(len(x), 1), torch.randn_like(x)
        return F.mse_loss(self.network(x + time * noise, time), noise)


class Summed(nn.Module):
    """A sum of many values in float16 or float32, from which the mean is taken away later."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.head, self.dtype = nn.Linear(FEATURES, CLASSES), dtype

    def forward(self, x: Tensor) -> Tensor:
        return (10 * self.head(x).to(self.dtype) + 60_000).float() - 60_000


class Wave(nn.Module):
    """A convolution over a series with channels first, padded on both sides or on the left."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.layer, self.is_causal = nn.Conv1d(FEATURES, FEATURES, 3), is_causal

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.pad(x, (2, 0) if self.is_causal else (1, 1)))


class Nodes(nn.Module):
    """A layer over nodes, with or without the mean of all nodes."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.head, self.mixes = nn.Linear(FEATURES, CLASSES), mixes

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.head(x + x[edges[0]].mean(0) if self.mixes else x)


class Normalised(nn.Module):
    """A running mean of the inputs, in a buffer or in an attribute."""

    def __init__(self, *, in_buffer: bool) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)
        if in_buffer:
            self.register_buffer("mean", torch.zeros(FEATURES))
        else:
            self.mean = torch.zeros(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0), 0.5)
        return self.head(x - self.mean)


class Listed(nn.Module):
    """Layers in a list of Python, or in a ModuleList."""

    def __init__(self, *, is_module: bool) -> None:
        super().__init__()
        layers = [nn.Linear(FEATURES, FEATURES)]
        self.layers = nn.ModuleList(layers) if is_module else layers
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


class Positioned(nn.Module):
    """A code that is added to each row by its position in the batch, or to none."""

    def __init__(self, *, by_row: bool) -> None:
        super().__init__()
        self.head, self.by_row = nn.Linear(FEATURES, CLASSES), by_row

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + torch.arange(len(x))[:, None] if self.by_row else x)


class Waves(nn.Module):
    """Sines of 300 positions, computed in a type of numbers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.head, self.dtype = nn.Linear(FEATURES, CLASSES), dtype

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(300).to(self.dtype), torch.tensor([1.0, 0.1], dtype=self.dtype))
        return self.head(x + angles.float().sin().mean())


class Dropped(nn.Module):
    """Dropout that is also on in eval mode, or not."""

    def __init__(self, *, follows_mode: bool) -> None:
        super().__init__()
        self.head, self.follows_mode = nn.Linear(FEATURES, CLASSES), follows_mode

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(x, 0.1, training=self.training or not self.follows_mode))


class Scaled(nn.Module):
    """A linear layer whose outputs, or inputs, are multiplied."""

    def __init__(self, *, inputs: float = 1.0, outputs: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.head, self.scales = nn.Linear(FEATURES, CLASSES, dtype=dtype), (inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x * self.scales[0]).to(self.head.weight.dtype)).float() * self.scales[1]


class Variational(Scaled):
    """A layer whose outputs get noise, also in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        return outputs + 0.1 * torch.randn_like(outputs)


def _classified(name: str = "x") -> Loss:
    return lambda model, batch: F.cross_entropy(model(batch[name]), batch["y"])


def _next_token(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["next"].flatten())


def _masked(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["sequence"], batch["mask"]), batch["y"])


def _tagged(ignored: int) -> Loss:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["padded"]).flatten(0, 1), batch["padded"].flatten(), ignore_index=ignored)

    return loss


def _pooled_nodes(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of rows of four nodes each, in one ring, whose outputs the script sums."""
    nodes, rows = batch["x"].repeat(4, 1), torch.arange(ROWS).repeat_interleave(4)
    edges = torch.stack([torch.arange(4 * ROWS), torch.arange(4 * ROWS).roll(1)])
    return F.cross_entropy(torch.zeros(ROWS, CLASSES).index_add(0, rows, model(nodes, edges)), batch["y"])


def _next_value(model: nn.Module, batch: Batch) -> Tensor:
    series = batch["sequence"].transpose(1, 2)
    return F.mse_loss(model(series[..., :-1]), series[..., 1:])


def _table(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["x"])[:, :1] - batch["x"].sum(1)).square().mean()


def _survival(model: nn.Module, batch: Batch) -> Tensor:
    """Return the partial likelihood of rows that are sorted by their times."""
    risks = model(batch["x"])[:, 0]
    return -(risks - risks.logcumsumexp(0)).mean()


def _two_views(model: nn.Module, batch: Batch) -> Tensor:
    """Return a loss of pairs of rows: the views of one picture are in the two halves of the batch."""
    first, second = model(torch.cat([batch["x"], batch["x"].flip(1)])).chunk(2)
    return (first - second).square().mean() + first.square().mean()


def _bound(model: nn.Module, batch: Batch) -> Tensor:
    """Return an error of outputs, and a divergence that is divided by the rows of the batch."""
    outputs = model(batch["x"])
    return F.mse_loss(outputs[:, 0], batch["x"].sum(1)) + outputs.square().sum() / len(outputs)


def _summed_bound(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(batch["x"])
    return F.mse_loss(outputs[:, 0], batch["x"].sum(1)) + outputs.square().sum()


def _running_sum(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["x"]).cumsum(0) - batch["x"][:, :CLASSES]).square().mean()


def _joined_targets(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of labels of different lengths that are in one vector."""
    outputs = model(batch["sequence"]).log_softmax(-1).transpose(0, 1)
    lengths = 1 + torch.arange(ROWS).square() % 3
    joined = 1 + torch.arange(int(lengths.sum())) % (CLASSES - 1)
    return F.ctc_loss(outputs, joined, torch.full((ROWS,), TIME), lengths)


def _rows_of_an_epoch(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of some rows, whose targets are taken from those of all rows after the pass."""
    return F.cross_entropy(model(batch["x"][:8]), batch["y"][:8])


def _missing_labels(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sum of two means, each over the rows that have its label."""
    errors, has = model(batch["x"])[:, :2].square(), batch["x"][:, :2] > 0
    means = [torch.where(has[:, task], errors[:, task], 0.0).sum() / has[:, task].sum() for task in range(2)]
    return torch.stack(means).sum()


def _distance(model: nn.Module, batch: Batch) -> Tensor:
    """Return a loss of differences of outputs, in which the bias of the last layer cancels."""
    return (model(batch["x"]) - model(batch["x"].flip(1))).square().mean()


def _between_0_and_1(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"]), 0.5 + 0.03 * batch["x"][:, :CLASSES])


def _rare_class(model: nn.Module, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["x"]), (batch["x"][:, :CLASSES] > 2).float())


RIGHT = [
    ("order_does_not_matter", _survival),
    ("halves_make_a_whole", _survival),
    ("order_does_not_matter", _two_views),
    ("halves_make_a_whole", _two_views),
    ("order_does_not_matter", _joined_targets),
    ("halves_make_a_whole", _joined_targets),
    ("halves_make_a_whole", _missing_labels),
    ("halves_make_a_whole", _rows_of_an_epoch),
    ("every_parameter_learns", _distance),
    ("loss_starts_at_chance", _between_0_and_1),
    ("loss_starts_at_chance", _rare_class),
]
"""Laws, and losses of right trainings that come close to breaking them."""


def _relative(model: nn.Module, batch: Batch) -> Tensor:
    errors = (model(batch["x"])[:, 0] - batch["x"].sum(1)).square()
    return (errors / errors.max()).mean()


def _square(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"])[:, 0], batch["x"].sum(1))


class Similar(nn.Module):
    """Similarities of the rows of two views, whose features are normalised within a row or within the batch."""

    def __init__(self, dimension: int, *, is_softmax: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(FEATURES, 8)
        self.dimension, self.is_softmax = dimension, is_softmax

    def forward(self, x: Tensor) -> Tensor:
        views = self.first(x), self.second(x.flip(1))
        one, other = (F.normalize(view, dim=self.dimension) for view in views)
        table = 10 * one @ other.T
        return table.log_softmax(1) if self.is_softmax else table


def _own_row(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), torch.arange(ROWS))


def _before_a_norm() -> nn.Module:
    """Return a model with a bias whose gradient is 0 but for rounding, since a normalisation subtracts it."""
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))


@dataclass(frozen=True)
class Pair:
    """A training that breaks a law, and one that does not."""

    law: str
    broken: tuple[Callable[[], nn.Module], Loss]
    healthy: tuple[Callable[[], nn.Module], Loss]


PAIRS = [
    Pair("rows_do_not_mix", (lambda: Recurrent(batch_first=False), _classified("sequence")),
         (lambda: Recurrent(batch_first=True), _classified("sequence"))),
    Pair("future_is_not_seen", (lambda: Attention(is_causal=False), _next_token),
         (lambda: Attention(is_causal=True), _next_token)),
    Pair("padding_does_not_matter", (lambda: Pooled(uses_mask=False), _masked),
         (lambda: Pooled(uses_mask=True), _masked)),
    Pair("same_pass_same_bits", (lambda: Normalised(in_buffer=False), _classified()),
         (lambda: Normalised(in_buffer=True), _classified())),
    Pair("checkpoint_is_complete", (lambda: Normalised(in_buffer=False), _classified()),
         (lambda: Normalised(in_buffer=True), _classified())),
    Pair("every_parameter_learns", (lambda: Listed(is_module=False), _classified()),
         (lambda: Listed(is_module=True), _classified())),
    Pair("order_does_not_matter", (lambda: Positioned(by_row=True), _classified()),
         (lambda: Positioned(by_row=False), _classified())),
    Pair("evaluation_changes_nothing", (lambda: Dropped(follows_mode=False), _classified()),
         (lambda: Dropped(follows_mode=True), _classified())),
    Pair("input_matters", (lambda: Scaled(inputs=0.0), _classified()), (Scaled, _classified())),
    Pair("halves_make_a_whole", (Scaled, _relative), (Scaled, _square)),
    Pair("loss_starts_at_chance", (lambda: Scaled(outputs=300.0), _classified()), (Scaled, _classified())),
    Pair("one_batch_can_be_learned", (lambda: Scaled(inputs=0.0), _classified()), (Scaled, _square)),
    Pair("padding_does_not_matter", (lambda: PooledTokens(uses_mask=False), _classified("padded")),
         (lambda: PooledTokens(uses_mask=True), _classified("padded"))),
    Pair("padding_does_not_matter", (lambda: nn.Embedding(11, 11), _tagged(-100)),
         (lambda: nn.Embedding(11, 11), _tagged(0))),
    Pair("loss_starts_at_chance",
         (Scaled, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")),
         (Scaled, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum") / ROWS)),
    Pair("loss_starts_at_chance",
         (Scaled, lambda model, batch: F.cross_entropy(model(batch["x"]).softmax(1), batch["y"])),
         (Scaled, lambda model, batch: F.nll_loss(model(batch["x"]).softmax(1).log(), batch["y"]))),
    Pair("loss_starts_at_chance",
         (lambda: nn.Linear(FEATURES, 1), lambda model, batch: F.l1_loss(model(batch["x"]), 2000 + batch["x"][:, :1])),
         (lambda: nn.Linear(FEATURES, 1), lambda model, batch: F.l1_loss(model(batch["x"]), batch["x"][:, :1]))),
    Pair("every_parameter_learns", (lambda: Adapted(starts_at_zero=True), _classified()),
         (lambda: Adapted(starts_at_zero=False), _classified())),
    Pair("input_matters", (lambda: Denoiser(uses_time=False), lambda model, batch: model(batch["x"])),
         (lambda: Denoiser(uses_time=True), lambda model, batch: model(batch["x"]))),
    Pair("future_is_not_seen", (lambda: Wave(is_causal=False), _next_value),
         (lambda: Wave(is_causal=True), _next_value)),
    Pair("halves_make_a_whole", (Scaled, _table), (Scaled, _square)),
    Pair("halves_make_a_whole", (Variational, _summed_bound), (Variational, _bound)),
    Pair("order_does_not_matter", (Scaled, _running_sum), (Scaled, _survival)),
    Pair("rows_do_not_mix", (lambda: Nodes(mixes=True), _pooled_nodes), (lambda: Nodes(mixes=False), _pooled_nodes)),
    Pair("rows_do_not_mix", (lambda: Similar(0), _own_row), (lambda: Similar(1), _own_row)),
    Pair("rows_do_not_mix", (lambda: Similar(0, is_softmax=True), _own_row),
         (lambda: Similar(1, is_softmax=True), _own_row)),
    Pair("every_parameter_learns", (lambda: Listed(is_module=False), _classified()), (_before_a_norm, _classified())),
    Pair("precision_is_enough", (partial(Waves, torch.bfloat16), _classified()),
         (partial(Waves, torch.float32), _classified())),
    Pair("precision_is_enough", (lambda: Summed(torch.float16), _classified()),
         (lambda: Summed(torch.float32), _classified())),
    Pair("precision_is_enough", (lambda: Scaled(inputs=1e5, dtype=torch.float16), _classified()),
         (Scaled, _classified())),
]  # fmt: skip


@pytest.mark.longer
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.law)
def test_law_is_broken_and_holds(pair: Pair) -> None:
    torch.manual_seed(0)
    with pytest.raises(AssertionError, match=pair.law):
        check_training(pair.broken[0](), pair.broken[1], _batch(), laws=[pair.law])
    torch.manual_seed(0)
    check_training(pair.healthy[0](), pair.healthy[1], _batch(), laws=[pair.law])


@pytest.mark.longer
@pytest.mark.parametrize(("law", "loss"), RIGHT, ids=[loss.__name__ for _, loss in RIGHT])
def test_right_losses_break_no_law(law: str, loss: Loss) -> None:
    torch.manual_seed(0)
    check_training(Scaled(), loss, _batch(), laws=[law])


def test_every_law_without_ranks_has_a_pair() -> None:
    elsewhere = {"ranks_agree", "micro_batches_add_up", "schedule_lasts"}
    check_training(Scaled(), _classified(), _batch(), laws=["input_matters"])  # registers the laws
    assert {law.name for law in LawRegistry if law.__module__.startswith("loopscope.")} == elsewhere | {
        pair.law for pair in PAIRS
    }


@pytest.mark.parametrize("is_lost", [True, False])
def test_updates_below_the_precision_of_weights(is_lost: bool) -> None:
    torch.manual_seed(0)
    model = Scaled(dtype=torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), 1e-6 if is_lost else 1e-2)
    with pytest.raises(AssertionError, match="as before after") if is_lost else nullcontext():
        check_training(model, _classified(), _batch(), optimizer=optimizer, laws=["precision_is_enough"])


@pytest.mark.longer
def test_tries_of_other_laws_are_no_training() -> None:
    """Tries restore the parameters in place, as often as a training changes them."""
    torch.manual_seed(0)
    names = ["checkpoint_is_complete", "halves_make_a_whole", "input_matters", "loss_starts_at_chance"]
    with pytest.raises(AssertionError, match="loss_starts_at_chance"):
        check_training(Scaled(outputs=300.0), _classified(), _batch(), laws=names)


def test_check_leaves_training_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, CLASSES))
    optimizer = torch.optim.Adam(model.parameters())
    before = {name: item.clone() for name, item in model.state_dict().items()}
    state = torch.get_rng_state()
    check_training(model, _classified(), _batch(), optimizer=optimizer)
    assert all(torch.equal(item, before[name]) for name, item in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert not optimizer.state
    assert all(item.grad is None for item in model.parameters())
    assert not torch.nn.modules.module._has_any_global_hook()


def test_targets_are_taken_by_numbers_of_rows() -> None:
    """A table of all targets, of which the loss takes those of the batch after the pass, has no rows of the batch."""
    torch.manual_seed(0)
    table, targets = torch.randn(400, 10), torch.randint(0, 3, (400,))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(table[batch["numbers"]]), targets[batch["numbers"]])

    names = ["halves_make_a_whole", "order_does_not_matter"]
    check_training(nn.Linear(10, 3), loss, {"numbers": torch.randint(0, 400, (40,))}, laws=names)


def test_pictures_of_zeros_and_ones_are_inputs() -> None:
    torch.manual_seed(0)
    pictures = torch.randint(0, 2, (16, 20)).float()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    check_training(nn.Linear(20, 3), loss, {"x": pictures, "y": torch.arange(16) % 3}, laws=["input_matters"])


def test_unknown_law_is_refused() -> None:
    with pytest.raises(UsageError, match="rows_do_not_mix"):
        check_training(Scaled(), _classified(), _batch(), laws=["rows_do_not_mx"])


def test_own_law_is_tried() -> None:
    class SmallOutputs(Law):
        """Compare the outputs with 10."""

        name = "small_outputs"
        statement = "outputs are below 10"
        remedy = "scale the outputs"

        def check(self, trial: Trial) -> Outcome:
            """Look at the outputs."""
            largest = float(trial.evaluate(needs_loss=False).outputs[0].max())
            return holds() if largest < 10 else broken(f"an output is {largest:.1f}")

    LawRegistry.register(SmallOutputs)
    try:
        with pytest.raises(AssertionError, match="outputs are below 10: an output is"):
            check_training(Scaled(outputs=1000.0), _classified(), _batch(), laws=["small_outputs"])
    finally:
        LawRegistry.unregister("small_outputs")
