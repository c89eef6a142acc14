"""Facts about losses that compare outputs with the distributions of a teacher, against sums over single rows."""

from collections.abc import Callable

import pytest
import torch
from loopscope.doctor.senses.loss_graph import describe_loss
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence
from torch.nn import functional

ROWS, CLASSES = 6, 5
WEIGHTS = nn.Parameter(torch.linspace(-2, 3, ROWS * CLASSES).sin().reshape(ROWS, CLASSES))
OUTPUTS = WEIGHTS + 0.1 * WEIGHTS.square()
TEACHER = torch.linspace(1, 9, ROWS * CLASSES).cos().reshape(ROWS, CLASSES)


def logarithms() -> Tensor:
    return functional.log_softmax(OUTPUTS * 1.5, -1)


def divergence(outputs: Tensor, targets: Tensor, *, log_target: bool = False, reduction: str = "batchmean") -> Tensor:
    return functional.kl_div(outputs, targets, reduction=reduction, log_target=log_target)


FORMS: dict[str, Callable[[], Tensor]] = {
    "probabilities": lambda: divergence(logarithms(), TEACHER.softmax(-1)),
    "logarithms": lambda: divergence(logarithms(), TEACHER.log_softmax(-1), log_target=True, reduction="sum"),
    "of each element": lambda: divergence(logarithms(), TEACHER.softmax(-1), reduction="none").sum(-1).mean() * 4.0,
    "converted": lambda: divergence(logarithms().double(), TEACHER.double().softmax(-1)) / 3,
    "by hand": lambda: (TEACHER.softmax(-1) * (TEACHER.log_softmax(-1) - logarithms())).sum(-1).mean(),
    "classes first": lambda: divergence(functional.log_softmax(OUTPUTS.T * 1.5, 0), TEACHER.T.softmax(0)),
    "with padding": lambda: divergence(
        functional.log_softmax(torch.cat([OUTPUTS, OUTPUTS]) * 1.5, -1),
        torch.cat([TEACHER.softmax(-1), torch.zeros(ROWS, CLASSES)]),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_divergences_show_outputs_and_targets(form: str) -> None:
    """The loss of the outputs, that of the mean of the targets, and the spread of both."""
    found, outputs, targets = (
        describe_loss(FORMS[form]()),
        Categorical(logits=OUTPUTS * 1.5),
        Categorical(logits=TEACHER),
    )
    mean = Categorical(probs=targets.probs.mean(0))
    assert found.target_sum == pytest.approx(1)
    assert found.term_loss == pytest.approx(kl_divergence(targets, outputs).mean().item(), rel=1e-5)
    assert found.constant_loss == pytest.approx(kl_divergence(targets, mean).mean().item(), rel=1e-5)
    of_outputs = kl_divergence(outputs, Categorical(probs=outputs.probs.mean(0))).mean().item()
    assert found.output_variation == pytest.approx(of_outputs / (found.constant_loss or 0), rel=1e-4)
    assert not found.has_terms


@pytest.mark.parametrize(
    ("targets", "log_target"),
    [(TEACHER.softmax(-1) * 3, False), (TEACHER.softmax(-1), True), (TEACHER.log_softmax(-1), False)],
)
def test_targets_of_another_kind_have_another_sum(targets: Tensor, log_target: bool) -> None:
    """Weights, probabilities in place of their logarithms, and the reverse: nothing else is derived from them."""
    found = describe_loss(divergence(logarithms(), targets, log_target=log_target))
    expected = (targets.exp() if log_target else targets).sum(-1).mean().item()
    assert found.target_sum == pytest.approx(expected)
    assert abs(expected - 1) > 0.5
    assert (found.constant_loss, found.term_loss, found.output_variation) == (None, None, None)


OTHERS: dict[str, Callable[[], Tensor]] = {
    "chosen by a mask": lambda: -(logarithms() * (TEACHER > 0)).sum(-1).mean(),
    "weighted by a mask": lambda: (
        divergence(logarithms(), TEACHER.softmax(-1), reduction="none") * (TEACHER > 0)
    ).sum(),
    "advantages": lambda: -(logarithms()[:, 0] * TEACHER[:, 0]).mean(),
    "entropy": lambda: (logarithms().exp() * logarithms()).sum(-1).mean(),
}


@pytest.mark.parametrize("form", OTHERS)
def test_other_products_of_logarithms_are_no_divergences(form: str) -> None:
    found = describe_loss(OTHERS[form]())
    assert (found.target_sum, found.constant_loss, found.output_variation) == (None, None, None)
