"""Loops whose batches have no tensors, or are not reported: the checks read the arguments of the forward pass."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.integrations import Scope
from torch import Tensor, nn
from torch.nn import functional

STEPS = 8


class Decoder(nn.Module):
    """A language model of one attention layer without a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.projection, self.head = nn.Embedding(20, 16), nn.Linear(16, 48), nn.Linear(16, 20)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of shape (rows, length, 20)."""
        query, key, value = self.projection(self.embedding(ids)).chunk(3, -1)
        return self.head(functional.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0])


def rows() -> tuple[Tensor, Tensor]:
    """Return inputs and their next tokens."""
    tokens = torch.randint(20, (4, 9))
    return tokens[:, :-1], tokens[:, 1:]


def batches(scope: Scope, kind: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches as loops of this kind take them."""
    if kind == "tensors":
        yield from scope.batches([rows() for _ in range(STEPS)])
    elif kind == "range":
        yield from (rows() for _ in scope.batches(range(STEPS)))
    else:
        yield from (rows() for _ in range(STEPS))


def train(folder: Path, kind: str, call: Any = lambda model, inputs: model(inputs), accumulate: int = 1) -> Scope:
    """Train a decoder without a mask, and return the closed scope."""
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    options: dict[str, Any] = {"loop": "step", "accumulate": accumulate, "out": folder, "display": "none"}
    with loopscope.attach(model, optimizer, with_hooks="health", **options) as scope:
        for index, (inputs, targets) in enumerate(batches(scope, kind), 1):
            scope.backward(functional.cross_entropy(call(model, inputs).flatten(0, 1), targets.flatten()))
            if index % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return scope


@pytest.mark.some_rows(2)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["tensors", "range", "none"])
def test_missing_mask_is_found(kind: str, accumulate: int, tmp_path: Path) -> None:
    scope = train(tmp_path / "run", kind, accumulate=accumulate)
    diagnosis = scope.diagnose()
    assert "causal-mask-missing" in [finding.id for finding in diagnosis]
    assert scope.last_metrics()["training_checks/target_shift"] == 1
    assert scope._attached.driver.loop.step == STEPS // accumulate
    assert not [sentence for sentence in diagnosis.missing if "inputs, targets and masks" in sentence]


def by_name(model: nn.Module, inputs: Tensor) -> Tensor:
    """Call the model with a keyword argument."""
    output: Tensor = model(ids=inputs)
    return output


def by_forward(model: nn.Module, inputs: Tensor) -> Tensor:
    """Call the method, which no hook of modules sees."""
    output: Tensor = model.forward(inputs)
    return output


def after_evaluation(model: nn.Module, inputs: Tensor) -> Tensor:
    """Evaluate with gradients on before the training pass."""
    model.eval()
    model(torch.zeros(2, 3, dtype=torch.long))
    model.train()
    return by_name(model, inputs)


@pytest.mark.parametrize("call", [by_name, after_evaluation])
@pytest.mark.parametrize("kind", ["range", "none"])
def test_keywords_and_evaluations_are_understood(kind: str, call: Any, tmp_path: Path) -> None:
    scope = train(tmp_path / "run", kind, call)
    assert scope.last_metrics()["training_checks/target_shift"] == 1


@pytest.mark.parametrize("kind", ["range", "none"])
def test_unseen_passes_are_named(kind: str, tmp_path: Path) -> None:
    sentence = "Not checked: inputs, targets and masks, since the batches have no tensors on the CPU."
    assert sentence in train(tmp_path / "run", kind, by_forward).diagnose().missing


@pytest.mark.parametrize("kind", ["range", "none"])
def test_no_hook_remains_after_the_end(kind: str, tmp_path: Path) -> None:
    train(tmp_path / "run", kind)
    assert not torch.nn.modules.module._global_forward_pre_hooks
