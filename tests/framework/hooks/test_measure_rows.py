"""Loss and gradient norm of single rows, compared with functional autograd and a closed form."""

import pytest
import torch
from loopscope.data import MicroBatches
from loopscope.errors import LoopscopeError
from loopscope.state import differing
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional

from tests.framework.hooks.context_call import context, mean_loss, noisy_model, plain_model


def per_row_reference(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return loss and gradient norm of every row by functional autograd, in one pass."""

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    parameters = {name: leaf.detach() for name, leaf in model.named_parameters()}
    gradients, losses = vmap(grad_and_value(loss), in_dims=(None, 0, 0))(parameters, *batch)
    return losses, sum(gradient.flatten(1).square().sum(1) for gradient in gradients.values()).sqrt()


@pytest.mark.parametrize("pieces", [1, 3])
def test_row_measurements_match_functional_autograd(pieces: int) -> None:
    ctx = context(plain_model().double(), accumulation_steps=pieces)
    for measured, expected in zip(ctx.measure_rows(), per_row_reference(ctx.model, ctx._state.loop.batch), strict=True):
        torch.testing.assert_close(measured, expected, rtol=1e-12, atol=0)


def test_linear_regression_matches_closed_form() -> None:
    inputs, targets = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    model = nn.Linear(4, 3, bias=False).double()
    ctx = context(model)
    ctx._open.probe._task.compute_loss = lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square().mean()
    losses, norms = ctx.measure_rows((inputs, targets))
    errors = (inputs @ model.weight[0] - targets).detach()
    torch.testing.assert_close(losses, errors.square(), rtol=1e-12, atol=0)
    torch.testing.assert_close(norms, 2 * errors.abs() * inputs.norm(dim=1), rtol=1e-12, atol=0)


def test_equal_rows_measure_equally_and_leave_no_trace() -> None:
    """Copies of one row get the same dropout mask and tracked statistics, and the state is unchanged."""
    ctx = context(noisy_model().double())
    before = ctx._state.digest()
    row = tuple(part[2:3] for part in ctx._state.loop.batch)
    measured = ctx.measure_rows(tuple(torch.cat([part] * 5) for part in row))
    for values in measured:
        assert values.dtype is torch.float64
        assert values.tolist() == [values[0].item()] * 5
    assert differing(before, ctx._state.digest()) == []
    assert all(module.training for module in ctx.model.modules())


def test_micro_batch_rows_keep_their_order() -> None:
    """A custom training loop gives the batch as micro-batches."""
    ctx = context(plain_model().double())
    batch = ctx._state.loop.batch
    parts = MicroBatches(tuple(part[rows] for part in batch) for rows in (slice(0, 3), slice(3, None)))
    for split, expected in zip(ctx.measure_rows(parts), ctx.measure_rows(batch), strict=True):
        assert torch.equal(split, expected)


def test_loss_without_gradient_has_zero_norm() -> None:
    """The loss does not depend on the parameters."""
    ctx = context(plain_model())
    ctx._open.probe._task.compute_loss = lambda model, batch: mean_loss(model, batch).detach() + 0 * model[0].bias.sum()
    assert ctx.measure_rows()[1].tolist() == [0.0] * 4


def test_several_processes_are_refused() -> None:
    ctx = context(plain_model())
    ctx._open.probe._task.ranks.are_many, ctx._open.probe._task.ranks.members = True, (0, 1)
    with pytest.raises(LoopscopeError, match="2 processes train together, but single rows can only be measured in one"):
        ctx.measure_rows()
