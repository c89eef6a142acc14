"""Rows whose end is marked by their padding, and rows that belong together in pairs: right and broken trainings."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from loopscope.testing import check_training
from torch import Tensor, nn
from torch.nn import functional as F

PAD, SYMBOLS, LENGTH = 0, 12, 9
Batch = dict[str, Tensor]


class Classifier(nn.Module):
    """A causal or recurrent encoder, whose state is pooled at the last token, or over a row."""

    def __init__(self, pooling: str, *, is_masked: bool = True) -> None:
        super().__init__()
        self.pooling, self.is_masked = pooling, is_masked
        self.table, self.head = nn.Embedding(SYMBOLS, 8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.table(tokens)
        padded = attention_mask == 0 if self.is_masked else None
        hidden = hidden + self.attention(hidden, hidden, hidden, key_padding_mask=padded)[0]
        if self.pooling == "last token":  # as the classifiers of transformers, which look for padding themselves
            last = ((tokens != PAD) * torch.arange(tokens.shape[1])).argmax(1)
            return self.head(hidden[torch.arange(len(tokens)), last])
        if self.pooling == "tokens":
            kept = (tokens != PAD)[..., None]
            return self.head((hidden * kept).sum(1) / kept.sum(1))
        return self.head(hidden.amax(1) if self.pooling == "maximum" else hidden.mean(1))


def padded_batch(rows: int = 8) -> Batch:
    lengths = torch.randint(2, LENGTH - 1, (rows, 1))
    lengths[0] = LENGTH
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"x": torch.randint(1, SYMBOLS, (rows, LENGTH)) * mask, "mask": mask, "y": torch.arange(rows) % 3}


def classified(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["mask"]), batch["y"])


@pytest.mark.parametrize("pooling", ["last token", "tokens"])
def test_models_may_find_ends_by_padding(pooling: str) -> None:
    torch.manual_seed(0)
    check_training(Classifier(pooling), classified, padded_batch(), laws=["padding_does_not_matter"])


@pytest.mark.parametrize(
    ("pooling", "is_masked"), [("last token", False), ("tokens", False), ("mean", True), ("maximum", True)]
)
def test_padding_that_marks_ends_may_matter(pooling: str, is_masked: bool) -> None:
    torch.manual_seed(0)
    model = Classifier(pooling, is_masked=is_masked)
    with pytest.raises(AssertionError, match="padding_does_not_matter"):
        check_training(model, classified, padded_batch(), laws=["padding_does_not_matter"])


def in_blocks(model: nn.Module, batch: Batch) -> Tensor:
    chosen, rejected = model(batch["x"]).squeeze(1).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def side_by_side(model: nn.Module, batch: Batch) -> Tensor:
    chosen, rejected = model(batch["x"]).reshape(-1, 2).T
    return -F.logsigmoid(chosen - rejected).mean()


@pytest.mark.parametrize("loss", [in_blocks, side_by_side])
@pytest.mark.parametrize("rows", [4, 8])
def test_pairs_of_rows_break_no_law(loss: Callable[[nn.Module, Batch], Tensor], rows: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    check_training(model, loss, {"x": torch.randn(rows, 5)}, laws=["order_does_not_matter", "halves_make_a_whole"])


class Placed(nn.Module):
    """A layer with a bias for each place in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.places = nn.Linear(5, 1), nn.Parameter(torch.randn(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.places


def fitted(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["target"])


def test_places_matter_in_few_rows() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 5), "target": torch.randn(4, 1)}
    with pytest.raises(AssertionError, match="order_does_not_matter"):
        check_training(Placed(), fitted, batch, laws=["order_does_not_matter"])


class Towers(nn.Module):
    """Two towers that return a loss over the similarities of all pairs of rows, or that of a root of a mean."""

    def __init__(self, *, pairs: bool) -> None:
        super().__init__()
        self.one, self.other, self.pairs = nn.Linear(5, 8, bias=False), nn.Linear(5, 8, bias=False), pairs

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        first, second = self.one(x), self.other(y)
        if self.pairs:
            return F.cross_entropy(first @ second.T, torch.arange(len(x)))
        return (first - second).square().mean().sqrt()


@pytest.mark.parametrize("pairs", [True, False])
def test_returned_losses_of_pairs_are_right(pairs: bool) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 5), "y": torch.randn(8, 5)}
    with nullcontext() if pairs else pytest.raises(AssertionError, match="no mean of the halves"):
        check_training(Towers(pairs=pairs), lambda model, given: model(**given), batch, laws=["halves_make_a_whole"])


class Predictor(nn.Module):
    """Predicts the next token, and returns logits and loss, as causal models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(SYMBOLS, 8), nn.Linear(8, SYMBOLS)

    def forward(self, tokens: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.table(tokens) * attention_mask.cumsum(1)[..., None])
        return {"logits": logits, "loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


@pytest.mark.parametrize("ignored", [True, False])
def test_scored_padding_matters_in_models_with_a_loss(ignored: bool) -> None:
    torch.manual_seed(0)
    batch = padded_batch()
    batch["labels"] = batch["x"].masked_fill((batch["mask"] == 0) & ignored, -100)

    def loss(model: nn.Module, given: Batch) -> Tensor:
        return model(given["x"], attention_mask=given["mask"], labels=given["labels"])["loss"]

    expected = pytest.raises(AssertionError, match="the loss of outputs at padded positions changes")
    with nullcontext() if ignored else expected:
        check_training(Predictor(), loss, batch, laws=["padding_does_not_matter"])
