"""Losses with two models, of which one gives targets to the other."""

import pytest
import torch
from loopscope.training_hooks.policies.trained_references import TrainedReferences
from torch import Tensor, nn
from torch.nn import functional as F

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(16, 4, generator=GENERATOR)
CLASSES = torch.randint(5, (16,), generator=GENERATOR)


class Pair:
    """Two models and a loss of both."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(4, 5)

    def picked(self, model: nn.Module, inputs: Tensor = INPUTS) -> Tensor:
        rows: Tensor = model(inputs).log_softmax(-1)
        return rows.gather(-1, CLASSES[:, None]).squeeze(-1)

    def distillation(self) -> Tensor:
        return F.kl_div(self.first(INPUTS).log_softmax(-1), self.second(INPUTS).softmax(-1), reduction="batchmean")

    def of_logarithms(self) -> Tensor:
        wanted = self.second(INPUTS).log_softmax(-1)
        divergence = F.kl_div(self.first(INPUTS).log_softmax(-1), wanted, log_target=True, reduction="batchmean")
        return divergence + F.cross_entropy(self.first(INPUTS), CLASSES)

    def ratio(self) -> Tensor:
        difference = self.picked(self.second) - self.picked(self.first)
        return (difference.exp() - difference - 1).mean() - self.picked(self.first).mean()

    def preference(self) -> Tensor:
        margins = [self.picked(model) - self.picked(model, -INPUTS) for model in (self.first, self.second)]
        return -F.logsigmoid(0.1 * (margins[0] - margins[1])).mean()

    def mutual_learning(self) -> Tensor:
        """Both models learn from the classes, too."""
        return self.distillation() + F.cross_entropy(self.second(INPUTS), CLASSES)

    def learned_prior(self) -> Tensor:
        """A posterior, which reconstructs, and its prior."""
        rows, prior = self.first(INPUTS).log_softmax(-1), self.second(INPUTS).log_softmax(-1)
        return (rows.exp() * (rows - prior)).sum(-1).mean() - self.picked(self.first).mean()

    def classifier_of_two(self) -> Tensor:
        """The log-likelihood ratio of two models that are trained to tell two classes apart."""
        return F.softplus(self.picked(self.first) - self.picked(self.second)).mean()


def measured(name: str, *, trains: bool = True) -> list[float]:
    """Return the measures of three steps; without ``trains``, the optimizer has the first model only."""
    pair, references, found = Pair(), TrainedReferences(), []
    parameters = [*pair.first.parameters(), *(pair.second.parameters() if trains else ())]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = getattr(pair, name)()
        found += references.measures_of(loss).values()
        loss.backward()
        optimizer.step()
    return found


@pytest.mark.parametrize("name", ["distillation", "of_logarithms", "ratio", "preference"])
@pytest.mark.parametrize("trains", [True, False])
def test_trained_reference_is_found(name: str, trains: bool) -> None:
    """A gradient that no optimizer uses does no harm."""
    assert measured(name, trains=trains) == [float(trains)] * 2


@pytest.mark.parametrize("name", ["mutual_learning", "learned_prior", "classifier_of_two"])
def test_models_that_both_learn_are_right(name: str) -> None:
    assert measured(name) == []
