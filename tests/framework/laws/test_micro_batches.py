"""The law on micro-batches in custom loops: wrong accumulation, and backward passes of separate losses."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import loopscope
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

MICRO, ROWS, FEATURES = 4, 8, 5
OPTIONS = {"laws": {"only": ["micro_batches_add_up"], "steps": [1, 2]}}
Loop = Callable[[nn.Module, torch.optim.Optimizer], None]


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, FEATURES)
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(ROWS, 1)


def accumulate(loss_of: Callable[[nn.Module], Tensor]) -> Loop:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        for _ in range(MICRO):
            loss_of(model).backward()
        optimizer.step()

    return loop


def mean_loss(model: nn.Module) -> Tensor:
    x, y = data()
    return F.mse_loss(model(x), y)


def masked_mean(model: nn.Module) -> Tensor:
    x, y = data()
    mask = (torch.rand(ROWS, 1) < 0.5).float()
    mask[0] = 1
    return ((model(x) - y).square() * mask).sum() / mask.sum() / MICRO


def preference(model: nn.Module) -> Tensor:
    """Return the loss of a reward model, and of DPO with the log-probabilities of a reference."""
    chosen, rejected, reference = torch.randn(ROWS, FEATURES), torch.randn(ROWS, FEATURES), torch.randn(ROWS, 1)
    return -F.logsigmoid(0.1 * (model(chosen) - model(rejected) - reference)).mean() / MICRO


class Scores(nn.Module):
    """A score for each row, by layers that are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, 1)
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = cast(Tensor, checkpoint(self.middle, hidden, use_reentrant=False))
        return cast(Tensor, self.last(0.5 * hidden)).squeeze(1)


def answers(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the scores of chosen and rejected answers, which are one batch."""
    chosen, rejected = model(torch.randn(2 * ROWS, FEATURES)).chunk(2)
    return chosen, rejected


def rewards(model: nn.Module) -> Tensor:
    chosen, rejected = answers(model)
    return -F.logsigmoid(chosen - rejected).mean() / MICRO


def rewards_with_margins(model: nn.Module) -> Tensor:
    margins = torch.rand(ROWS)
    chosen, rejected = answers(model)
    return -F.logsigmoid(chosen - rejected - margins).mean() / MICRO


def rewards_with_metrics(model: nn.Module) -> Tensor:
    """Read numbers before a call with a float, which the loss does not need."""
    chosen, rejected = answers(model)
    loss = -F.logsigmoid(0.5 * (chosen - rejected)).mean() / MICRO
    metrics = {"accuracy": (chosen > rejected).float().mean().item()}
    metrics["scaled"] = (0.1 * chosen.detach()).mean().item()
    return loss


def rewards_with_reference() -> Callable[[nn.Module], Tensor]:
    """Subtract what a second model computes, which is in train mode, and whose parameters need gradients."""
    reference = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def loss_of(model: nn.Module) -> Tensor:
        x = torch.randn(2 * ROWS, FEATURES)
        scores = model(x)
        with torch.no_grad():
            one, other = reference(x).squeeze(1).chunk(2)
        chosen, rejected = scores.chunk(2)
        return -F.logsigmoid(chosen - rejected - (one - other)).mean() / MICRO

    return loss_of


def weighted_rewards(model: nn.Module) -> Tensor:
    weights = torch.rand(ROWS)
    chosen, rejected = answers(model)
    return -(F.logsigmoid(chosen - rejected) * weights).sum() / weights.sum() / MICRO


def zero_grad_within(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(MICRO):
        optimizer.zero_grad()
        (mean_loss(model) / MICRO).backward()
    optimizer.step()


def real_and_generated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    for target in (torch.ones(ROWS, 1), torch.zeros(ROWS, 1)):
        F.binary_cross_entropy_with_logits(model(torch.randn(ROWS, FEATURES)), target).backward()
    optimizer.step()


def two_losses_of_a_batch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x, y = data()
    optimizer.zero_grad()
    for target in (y, 2 * y):
        F.mse_loss(model(x), target).backward()
    optimizer.step()


def epochs(*counts: int) -> Loop:
    """Return a loop whose updates have other numbers of micro-batches, one after the other."""
    remaining = list(counts)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        for _ in range(remaining.pop(0)):
            (mean_loss(model) / MICRO).backward()
        optimizer.step()

    return loop


class Tokens(nn.Module):
    """Scores of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


def texts(*, divides_once: bool) -> Loop:
    """Return a loop over micro-batches of texts, each padded to its own length, whose tokens count alike or not."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        lengths = [torch.tensor([3, 4, 5, 5 + extra, 3, 2]) for extra in (1, 4, 8)]
        micro_batches = [torch.randint(1, 12, (6, int(item.max()))) for item in lengths]
        for tokens, length in zip(micro_batches, lengths, strict=True):
            tokens[torch.arange(tokens.shape[1]) >= length[:, None]] = 0
            targets = tokens.clone()
            losses = F.cross_entropy(model(tokens).transpose(1, 2), targets, ignore_index=0, reduction="sum")
            count = sum(int(item.sum()) for item in lengths) if divides_once else 3 * int(length.sum())
            (losses / count).backward()
        optimizer.step()

    return loop


def check(loop: Loop, folder: Path, model: nn.Module | None = None) -> tuple[str, str]:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scope = loopscope.attach(model, optimizer, out=folder / "run", display="none", hooks=["laws"], hook_options=OPTIONS)
    with scope:
        for _ in range(4):
            loop(model, optimizer)
        (result,) = scope.check()
    return result["verdict"], result.get("evidence", "")


@pytest.mark.longer
@pytest.mark.parametrize(
    ("loop", "evidence"),
    [
        (accumulate(mean_loss), "4 times"),
        (accumulate(masked_mean), "differ from the batch's"),
        (zero_grad_within, "last 1 of 4"),
        (epochs(MICRO, MICRO, MICRO, 1), "an update of 1 micro-batches"),
        (epochs(MICRO, MICRO, MICRO + 1, MICRO), "an update of 5 micro-batches"),
    ],
    ids=["undivided", "mean of means", "zero_grad within", "short group", "remaining gradients"],
)
def test_wrong_accumulation_is_broken(loop: Loop, evidence: str, tmp_path: Path) -> None:
    outcome = check(loop, tmp_path)
    assert outcome[0] == "broken"
    assert evidence in outcome[1]


@pytest.mark.longer
@pytest.mark.parametrize(
    "loop",
    [
        accumulate(lambda model: mean_loss(model) / MICRO),
        accumulate(lambda model: mean_loss(model) / MICRO * 1024.0),
        accumulate(lambda model: F.mse_loss(model(data()[0]), torch.ones(ROWS, 1), reduction="sum")),
        accumulate(preference),
    ],
    ids=["divided", "scaled", "sum", "preference"],
)
def test_right_accumulation_holds(loop: Loop, tmp_path: Path) -> None:
    assert check(loop, tmp_path)[0] == "holds"


@pytest.mark.longer
@pytest.mark.parametrize("loop", [real_and_generated, two_losses_of_a_batch])
def test_separate_losses_are_no_micro_batches(loop: Loop, tmp_path: Path) -> None:
    assert check(loop, tmp_path)[0] == "not checked"


@pytest.mark.longer
@pytest.mark.parametrize(("divides_once", "verdict"), [(True, "holds"), (False, "broken")])
def test_tokens_of_shorter_micro_batches_count_alike(divides_once: bool, verdict: str, tmp_path: Path) -> None:
    assert check(texts(divides_once=divides_once), tmp_path, Tokens())[0] == verdict


@pytest.mark.longer
@pytest.mark.parametrize(
    "loss",
    [rewards, rewards_with_margins, rewards_with_metrics, rewards_with_reference()],
    ids=["pairs", "margins", "metrics", "reference"],
)
def test_pairs_in_one_batch_add_up(loss: Callable[[nn.Module], Tensor], tmp_path: Path) -> None:
    """As in the trainers of trl for rewards and preferences, which repeat layers in the backward pass."""
    assert check(accumulate(loss), tmp_path, Scores())[0] == "holds"


@pytest.mark.longer
def test_weighted_means_of_pairs_do_not_add_up(tmp_path: Path) -> None:
    outcome = check(accumulate(weighted_rewards), tmp_path, Scores())
    assert outcome[0] == "broken"
    assert "differ from the batch's" in outcome[1]
