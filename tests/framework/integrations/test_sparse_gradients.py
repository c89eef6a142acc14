"""Sparse gradients in a custom loop, with and without a scaler: served, or hooks refused by name."""

import loopscope
import pytest
import torch
from loopscope.errors import UsageError
from torch import nn


class Bag(nn.Module):
    """An embedding bag."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(50, 4, sparse=True, mode="sum"), nn.Linear(4, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.out(self.bag(rows))


MODELS = {
    "embedding": lambda: nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Flatten(), nn.Linear(20, 3)),
    "bag": Bag,
    "only_sparse": lambda: nn.Sequential(nn.Embedding(50, 4, sparse=True)),
}
OPTIMIZERS = {"sgd": lambda p: torch.optim.SGD(p, 0.1), "adagrad": lambda p: torch.optim.Adagrad(p, 0.1)}


def trained(folder, model: str, optimizer: str, *, scaled: bool, **options) -> list[torch.Tensor]:
    torch.manual_seed(0)
    network = MODELS[model]()
    update, scaler = OPTIMIZERS[optimizer](network.parameters()), torch.amp.GradScaler("cpu", enabled=scaled)
    batches = [torch.randint(50, (8, 5)) for _ in range(3)]
    scope = loopscope.attach(network, update, scaler=scaler, out=folder, display="none", **options) if options else None
    for rows in scope.batches(batches) if scope else batches:
        loss = network(rows).pow(2).mean()
        scope.backward(loss) if scope else scaler.scale(loss).backward()
        scaler.step(update)
        scaler.update()
        update.zero_grad()
    if scope:
        scope.close()
    return [*network.parameters()]


HOOKS = [["norms"], ["training_diagnostics"], ["loss_spikes"], ["weight_updates"], ["path_length"]]
CHOICES = [{"hooks": names} for names in HOOKS] + [{"with_hooks": "observers"}, {"with_hooks": "full"}]


@pytest.mark.some_rows(5)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_sparse_gradients_keep_their_bits(tmp_path, choice, model, scaled):
    for optimizer in OPTIMIZERS:
        bare = trained(tmp_path, model, optimizer, scaled=scaled)
        attached = trained(tmp_path / optimizer, model, optimizer, scaled=scaled, **choice)
        assert all(map(torch.equal, bare, attached))


@pytest.mark.parametrize("name", ["batch_dynamics", "consecutive", "subspace_gradient_info", "variance"])
def test_hooks_on_dense_gradients_are_refused(tmp_path, name):
    with pytest.raises(UsageError, match=f"Hook '{name}' reads dense gradients, but layer '0' gives sparse ones"):
        trained(tmp_path / "run", "embedding", "sgd", scaled=True, hooks=[name])


def with_hessian(folder, *, sparse: bool, optimizer: type[torch.optim.Optimizer]) -> dict[str, float]:
    """Train an embedding, whose batches repeat rows, with the hook ``hessian``; return the last metrics."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(6, 4, sparse=sparse), nn.Tanh()).double()
    update, batches = optimizer(network.parameters(), 0.1), [torch.randint(6, (8, 5)) for _ in range(3)]
    options = {"burst_length": 3, "method": "finite_difference"}
    with loopscope.attach(
        network, update, hooks=["hessian"], hook_options={"hessian": options},
        loss=lambda model, rows: model(rows).pow(2).mean(), out=folder, display="none",
    ) as scope:  # fmt: skip
        for rows in scope.batches(batches):
            scope.backward(network(rows).pow(2).mean())
            update.step()
            update.zero_grad()
    return {name: float(value) for name, value in scope.last_metrics().items() if name.startswith("hessian")}


@pytest.mark.longer
def test_hessian_of_sparse_gradients_matches_dense_ones(tmp_path):
    """Differences of gradients are those of the same model with dense gradients."""
    sparse, dense = (with_hessian(tmp_path / str(s), sparse=s, optimizer=torch.optim.SGD) for s in (True, False))
    assert "hessian/first_order_cosine" in sparse
    assert sparse == pytest.approx(dense, rel=1e-9, nan_ok=True)


def test_hessian_serves_sparse_adam(tmp_path):
    measured = with_hessian(tmp_path / "run", sparse=True, optimizer=torch.optim.SparseAdam)
    assert measured["hessian/first_order_cosine"] > 0.9
