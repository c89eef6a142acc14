"""range_penalty: means by brute force, the penalty in the loss, and errors."""

from pathlib import Path

import pytest
import torch
from loopscope.errors import UnsuitableError, UsageError
from loopscope.hooks import HookPoint
from loopscope.lowbit import RangePenalty, penalised_matrices
from loopscope.training_hooks.lowbit import RangePenaltyReport
from loopscope.training_hooks.lowbit.range_penalty import mean_squares
from torch import Tensor, nn

from tests.sinks.emits import run_info
from tests.training_hooks.epoch_end import epoch_end


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def report(net: nn.Module, loss: Tensor | None = None, **options: float | str) -> dict[str, Tensor]:
    return dict(RangePenaltyReport(**options).compute(epoch_end(net, hook_point=HookPoint.POST_BACKWARD, loss=loss)))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_means_include_every_element(dtype: torch.dtype) -> None:
    net = model(dtype)
    values = [value for index in (0, 2) for value in net.get_parameter(f"{index}.weight").flatten().tolist()]
    square, inverse = mean_squares(list(penalised_matrices(net).values()))
    assert square.item() == pytest.approx(sum(value**2 for value in values) / 56, rel=1e-5)
    assert inverse.item() == pytest.approx(sum((value + 1e-6) ** -2 for value in values) / 56, rel=1e-5)


def test_penalty_and_data_loss_are_separated() -> None:
    """The hook reports the penalty in the loss, the remaining data loss and the share."""
    net = model()
    options = {"weight": 1e-6, "large": 3.0, "small": 0.5}
    penalty = RangePenalty(**options)(penalised_matrices(net)).detach()
    found = report(net, torch.tensor(2.0) + penalty, **options)
    assert found["penalty"].item() == pytest.approx(penalty.item(), rel=1e-5)
    assert found["data_loss"].item() == pytest.approx(2.0, rel=1e-5)
    assert found["share"].item() == pytest.approx(penalty.item() / (2 + penalty.item()), rel=1e-5)


def test_penalty_gradient_norm_matches_autograd() -> None:
    net = model()
    options = {"weight": 1e-6, "large": 3.0, "small": 0.5}
    RangePenalty(**options)(penalised_matrices(net)).backward()
    gradients = [parameter.grad.flatten() for parameter in net.parameters() if parameter.grad is not None]
    assert len(gradients) == 2
    found = report(net, torch.tensor(2.0), **options)["penalty_grad_norm"]
    assert found.item() == pytest.approx(torch.cat(gradients).norm().item(), rel=1e-5)


def test_gradient_near_pole_is_finite() -> None:
    """A weight next to the pole gives a very large but finite gradient norm."""
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.weight[0, 0] = 1e-9 - 1e-6
    near = net.weight[0, 0].double().item() + 1e-6
    found = report(net, torch.tensor(2.0), weight=1e-12)["penalty_grad_norm"]
    assert found.item() == pytest.approx(1e-12 / 4 * 2 * near**-3, rel=0.05)


def test_without_a_penalty_only_the_means_are_reported() -> None:
    assert report(model(), torch.tensor(2.0)).keys() == {"mean_square", "mean_inverse_square"}


def test_pattern_selects_trained_matrices() -> None:
    """Frozen matrices are excluded."""
    net = model()
    net.get_parameter("0.weight").requires_grad_(False)
    assert torch.equal(report(net)["mean_square"], report(net, pattern="2.*")["mean_square"])


def test_weight_at_pole_gives_infinite_mean() -> None:
    net = nn.Linear(2, 2)
    nn.init.constant_(net.weight, -1e-6)
    assert report(net)["mean_inverse_square"].item() == torch.inf


def test_unsuitable_models_and_options_are_refused(tmp_path: Path) -> None:
    """Models without matching matrices and invalid options raise an error."""
    with pytest.raises(UnsuitableError, match="needs trained matrices whose name matches"):
        RangePenaltyReport().start(run_info(tmp_path, model=nn.Conv2d(1, 1, 3)))
    with pytest.raises(UsageError, match="matches 'blocks"):
        RangePenaltyReport(pattern="blocks.*").start(run_info(tmp_path, model=model()))
    for option in ("weight", "large", "small"):
        with pytest.raises(UsageError, match=f"range_penalty.{option} is -1"):
            RangePenaltyReport(**{option: -1})
    with pytest.raises(UsageError, match=r"range_penalty.every_n_steps is 0"):
        RangePenaltyReport(every_n_steps=0)
