"""Hooks that cannot measure sparse gradients or complex parameters refuse them by name, or leave them out."""

from contextlib import suppress
from pathlib import Path

import loopscope
import pytest
import torch
from loopscope import training_hooks  # noqa: F401 - fills the registry
from loopscope.errors import UnsuitableError
from loopscope.hooks import HookRegistry
from torch import Tensor, nn
from torch.nn import functional

DEBUG = ("hypothesis_test", "step_history", "what_if")
NAMES = sorted(hook.name for hook in HookRegistry if not hook.always and hook.name not in DEBUG)


class SparseEmbedding(nn.Module):
    """Gives sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8, sparse=True)
        self.out = nn.Linear(8, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embedding(tokens))


class ComplexLayer(nn.Module):
    """Has complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(9, 8, dtype=torch.complex64)
        self.out = nn.Linear(8, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.inner(functional.one_hot(tokens, 9).to(torch.complex64)).abs())


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def attached(kind: type[nn.Module], name: str, folder: Path) -> None:
    """Train two steps with a hook; an error that ends the training between them is a ``HookError``."""
    model, tokens = kind(), torch.randint(9, (4, 4))
    is_sparse = kind is SparseEmbedding
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if is_sparse else torch.optim.AdamW(model.parameters())
    torch.save({key: value + 0.1 for key, value in model.state_dict().items()}, folder / "reference.pt")
    data = [(part, part) for part in tokens.split(2)]
    options = {"loss": loss, "loader": data, "reference": folder / "reference.pt", "out": folder / "run"}
    with loopscope.attach(model, optimizer, hooks=[name], display="none", **options) as scope:
        for batch in scope.batches(data):
            scope.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.some_rows(8)
@pytest.mark.parametrize("kind", [SparseEmbedding, ComplexLayer])
@pytest.mark.parametrize("name", NAMES)
def test_no_hook_ends_with_a_raw_error(tmp_path, name, kind):
    """A hook measures the training to its end, or refuses it by name before the first step."""
    with suppress(UnsuitableError):
        attached(kind, name, tmp_path)


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (SparseEmbedding, "gradient_projection", "reads dense gradients, but layer 'embedding'"),
        (SparseEmbedding, "sharpness", "reads dense gradients, but layer 'embedding'"),
        (ComplexLayer, "adam_dynamics", "measures real parameters, but parameter 'inner.weight'"),
        (ComplexLayer, "sharpness", "measures real parameters, but parameter 'inner.weight'"),
    ],
)
def test_refusals_name_hook_and_parameter(tmp_path, kind, name, words):
    with pytest.raises(UnsuitableError, match=f"Hook '{name}' {words}"):
        attached(kind, name, tmp_path)
