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
