"""Loops whose batches have no tensors, or are not reported: the checks read the arguments of the forward pass."""

import copy
import pickle
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


class Half(nn.Module):
    """A linear layer, whose batches are halved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the outputs for half of each row."""
        return self.layer(rows / 2)


def test_copies_and_other_models_run_their_own_weights(tmp_path: Path) -> None:
    """The pass is noticed in the class of the model, which copies and other models share."""
    model, other = Half(), Half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copied = copy.deepcopy(model)
    rows = torch.randn(3, 4)
    with loopscope.attach(model, optimizer, hooks=[], loop="step", out=tmp_path / "run", display="none") as scope:
        names = set(vars(model))
        model(rows).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        replica = Half.__new__(Half)
        replica.__dict__ = {**vars(model), "_modules": {"layer": nn.Linear(4, 1)}}  # as nn.DataParallel makes it
        stored = pickle.loads(pickle.dumps(model))
        assert set(vars(model)) == names == set(vars(Half()))
        for item in (other, copied, replica, stored, copy.deepcopy(model)):
            assert torch.equal(item(rows), item.layer(rows / 2))
        assert scope._attached.driver.loop.step == 1
    assert Half._compiled_call_impl is None


def test_scopes_of_one_class_see_their_own_passes(tmp_path: Path) -> None:
    models = [Half(), Half()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scopes = [
        loopscope.attach(model, optimizer, hooks=[], loop="step", out=tmp_path / str(index), display="none")
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True))
    ]
    for index in (0, 1, 1, 0, 1):
        models[index](torch.randn(3, 4)).sum().backward()
        optimizers[index].step()
        optimizers[index].zero_grad()
    assert [scope._attached.driver.loop.step for scope in scopes] == [2, 3]
    scopes[0].close()
    assert Half._compiled_call_impl is not None
    models[1](torch.randn(3, 4)).sum().backward()
    optimizers[1].step()
    scopes[1].close()
    assert Half._compiled_call_impl is None
    assert scopes[1]._attached.driver.loop.step == 4


@pytest.mark.compile
def test_compiled_functions_have_the_same_graph(tmp_path: Path) -> None:
    """The compiler follows a call of the model as without the scope."""
    model = Half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    def step(rows: Tensor) -> Tensor:
        return model(rows).sum()

    torch.compile(step, backend=backend, fullgraph=True)(torch.randn(3, 4))
    with loopscope.attach(model, optimizer, hooks=[], loop="step", out=tmp_path / "run", display="none"):
        torch._dynamo.reset()
        compiled = torch.compile(step, backend=backend, fullgraph=True)
        for _ in range(3):
            compiled(torch.randn(3, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
        compiled_model = torch.compile(model, backend=backend, fullgraph=True)
        compiled_model(torch.randn(3, 4))
    assert len(graphs) == 3
    assert graphs[0] == graphs[1]
    torch._dynamo.reset()
