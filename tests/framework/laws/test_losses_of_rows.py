"""Losses of rows of different lengths, losses that are divided twice, and targets beyond the range of the outputs."""

from collections.abc import Callable

import pytest
import torch
from loopscope.testing import check_training
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

pytestmark = pytest.mark.longer
ROWS, TIME, FEATURES, TAGS = 32, 9, 5, 3
Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


def data() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, TIME + 1, (ROWS,), generator=generator)
    lengths[3] = TIME
    mask = torch.arange(TIME) < lengths[:, None]
    x = torch.randn(ROWS, FEATURES, generator=generator)
    return {
        "x": x,
        "y": torch.randint(0, TAGS, (ROWS,), generator=generator),
        "value": (x.sum(1, keepdim=True) - x.sum(1).mean()) / x.sum(1).std(),
        "tokens": torch.randint(1, 11, (ROWS, TIME), generator=generator) * mask,
        "tags": torch.randint(0, TAGS, (ROWS, TIME), generator=generator) * mask,
        "lengths": lengths,
    }


class Tagger(nn.Module):
    """A recurrent network over packed rows, whose outputs end with the longest row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(11, 8), nn.GRU(8, TAGS, batch_first=True)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


def network(*last: nn.Module, width: int = 1) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, width), *last)


def tagged(divisor: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """Return the loss of a tagger that divides the sum over tokens by a function of mask and lengths."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        outputs = model(batch["tokens"], batch["lengths"])
        mask = torch.arange(TIME) < batch["lengths"][:, None]
        each = F.cross_entropy(outputs.transpose(1, 2), batch["tags"], reduction="none") * mask
        return each.sum() / divisor(mask, batch["lengths"])

    return loss


def fitted(loss: Callable[[Tensor, Tensor], Tensor], *, scale: float = 1.0, offset: float = 0.0) -> Loss:
    return lambda model, batch: loss(model(batch["x"]), scale * batch["value"] + offset)


def by_hand(outputs: Tensor, target: Tensor) -> Tensor:
    return ((target - outputs) ** 2).mean()


def density(outputs: Tensor, target: Tensor) -> Tensor:
    """Return the loss of a policy, whose actions are drawn around its mean."""
    return -(Normal(outputs, 1.0).log_prob(target)).mean()


def positives(times: int) -> Loss:
    """Return a loss over some rows that is divided by their number some times."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        is_positive = batch["value"] > 0
        errors = F.smooth_l1_loss(model(batch["x"]), batch["value"], reduction="none") * is_positive
        total = errors.sum()
        for _ in range(times):
            total = total / is_positive.sum()
        return total

    return loss


def check(law: str, make: Callable[[], nn.Module], loss: Loss) -> None:
    torch.manual_seed(0)
    check_training(make(), loss, data(), laws=[law])


HALVES, CHANCE, LEARNED = "halves_make_a_whole", "loss_starts_at_chance", "one_batch_can_be_learned"


@pytest.mark.parametrize(
    ("law", "make", "loss", "evidence"),
    [
        (HALVES, Tagger, tagged(lambda _, lengths: ROWS * lengths.max()), "no mean of the halves"),
        (CHANCE, network(), fitted(lambda one, other: F.mse_loss(one, other) / ROWS), "divided by 32 once more"),
        (CHANCE, network(), fitted(lambda one, other: (one - other).abs().sum() / ROWS / ROWS), "divided by 32"),
        (CHANCE, network(), positives(2), "halved if the batch has each row twice"),
        (LEARNED, network(nn.Sigmoid()), fitted(F.mse_loss), "outputs of a sigmoid are between 0 and 1"),
        (LEARNED, network(nn.Tanh()), fitted(by_hand, scale=3), "outputs of a tanh are between -1 and 1"),
        (LEARNED, network(nn.Softplus()), fitted(F.smooth_l1_loss), "outputs of a softplus are above 0"),
    ],
    ids=["longest", "mean by rows", "sum by rows twice", "positives twice", "sigmoid", "tanh", "softplus"],
)
def test_wrong_losses_break_a_law(law: str, make: Callable[[], nn.Module], loss: Loss, evidence: str) -> None:
    with pytest.raises(AssertionError, match=evidence):
        check(law, make, loss)


@pytest.mark.parametrize(
    ("law", "make", "loss"),
    [
        (HALVES, Tagger, tagged(lambda mask, _: mask.sum())),
        (CHANCE, network(), fitted(lambda one, other: F.mse_loss(one, other) / 10)),
        (CHANCE, network(width=ROWS), fitted(lambda one, other: F.mse_loss(one, other.expand(ROWS, ROWS)) / ROWS)),
        (CHANCE, network(), fitted(lambda one, other: F.mse_loss(one, other, reduction="sum") / ROWS)),
        (CHANCE, network(), positives(1)),
        (LEARNED, network(nn.Sigmoid()), fitted(F.mse_loss, scale=0.2, offset=0.5)),
        (LEARNED, network(nn.Softplus()), fitted(by_hand, offset=2)),
        (LEARNED, network(nn.Tanh()), fitted(density)),
    ],
    ids=["tokens", "weight", "as many features", "sum", "positives", "sigmoid", "softplus", "policy"],
)
def test_right_losses_break_no_law_of_rows(law: str, make: Callable[[], nn.Module], loss: Loss) -> None:
    check(law, make, loss)
