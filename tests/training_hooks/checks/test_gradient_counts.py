"""Zeros and dead rows of gradients against loops over the elements."""

import pytest
import torch
from loopscope.training_hooks.checks.gradient_counts import LayerWeights, count_gradients
from torch import Tensor, nn


def with_gradient(gradient: Tensor | None) -> nn.Parameter:
    shape = (4, 3) if gradient is None else gradient.shape
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = gradient
    return parameter


def test_counts_match_loops_over_elements() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(*shape, generator=generator) for shape in ((6, 4), (5, 2, 3, 3), (7,))]
    for gradient in gradients:
        gradient[torch.rand(gradient.shape, generator=generator) < 0.5] = 0
        gradient[1] = 0
    parameters = {f"p{index}": with_gradient(gradient) for index, gradient in enumerate(gradients)}
    counts, shares = count_gradients(parameters, {"p0", "p1"})
    for index, gradient in enumerate(gradients):
        assert counts[f"p{index}"] == sum(value != 0 for value in gradient.flatten().tolist())
    dead = [sum(not any(row.flatten().tolist()) for row in gradient) / len(gradient) for gradient in gradients[:2]]
    assert shares == pytest.approx({"p0": dead[0], "p1": dead[1]})
    assert dead[0] > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e-45])
def test_nonfinite_and_tiny_elements_are_not_zero(value: float) -> None:
    gradient = torch.zeros(2, 3)
    gradient[0, 0] = value
    assert count_gradients({"w": with_gradient(gradient)}, {"w"}) == ({"w": 1}, {"w": 0.5})


def test_missing_and_sparse_gradients_have_no_rows() -> None:
    parameters = {"none": with_gradient(None), "sparse": with_gradient(torch.eye(4, 3).to_sparse())}
    assert count_gradients(parameters, parameters.keys()) == ({"sparse": 3}, {})
    assert count_gradients({}, ()) == ({}, {})


class Mixed(nn.Module):
    """Layers of all kinds, with an embedding that shares the weight of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.linear, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)
        self.down, self.up = nn.Conv1d(2, 2, 1), nn.ConvTranspose1d(2, 2, 1)
        self.rnn = nn.LSTM(3, 3)


def test_layer_weights_leave_out_embeddings_and_biases() -> None:
    layers = LayerWeights.of(Mixed())
    assert layers.by_units == {"linear.weight", "down.weight"}
    recurrent = {"rnn.weight_ih_l0", "rnn.weight_hh_l0"}
    assert layers.weights == layers.by_units | {"up.weight"} | recurrent


def test_computed_weights_are_left_out() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    assert LayerWeights.of(model).weights == frozenset()
