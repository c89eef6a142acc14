"""Start-up facts about parameters that a model does not register."""

import copy

import pytest
import torch
from loopscope.doctor import diagnose
from loopscope.doctor.history import History
from loopscope.doctor.start_up_facts import start_facts
from loopscope.lowbit.metis import LowRankFactors
from torch import nn

from tests.support.ranks import on_ranks


class Holder(nn.Module):
    """A model with an attribute next to a registered layer."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.more = value


def layers() -> list[nn.Linear]:
    return [nn.Linear(3, 3), nn.Linear(3, 3)]


@pytest.mark.parametrize(
    "value", [layers(), tuple(layers()), {"a": nn.Linear(3, 8)}, [layers()], torch.randn(24, requires_grad=True)]
)
def test_unregistered_layers_are_named(value: object) -> None:
    """Dictionaries of one module count as lists of several do; a nested list is searched."""
    model = nn.Sequential(Holder(value if not isinstance(value, dict) else value | {"b": nn.ReLU()}))
    found = start_facts(model, [torch.optim.SGD(model.parameters(), lr=0.1)])["unregistered"]
    assert found["names"] == ["0.more"]
    assert found["elements"] in (24, 32)
    assert found["share"] == found["elements"] / (found["elements"] + 12)


@pytest.mark.parametrize(
    "value",
    [
        nn.ModuleList(layers()),
        nn.Parameter(torch.randn(3)),
        [nn.Linear(3, 3)],
        [layer.requires_grad_(False) for layer in layers()],
        [nn.ReLU(), nn.ReLU()],
        torch.randn(3),
        ["a", 1, None],
        None,
    ],
    ids=["module list", "parameter", "hidden teacher", "frozen", "no weights", "constant", "plain", "nothing"],
)
def test_other_attributes_are_no_layers(value: object) -> None:
    model = Holder(value)
    assert start_facts(model, [torch.optim.SGD(model.parameters(), lr=0.1)])["unregistered"]["count"] == 0


def test_layers_of_an_optimizer_are_known() -> None:
    """A list that the script passes to the optimizer itself is trained."""
    model = Holder(layers())
    extra = [parameter for layer in model.more for parameter in layer.parameters()]  # type: ignore[union-attr]
    optimizer = torch.optim.SGD([*model.parameters(), *extra], lr=0.1)
    assert start_facts(model, [optimizer])["unregistered"]["count"] == 0
    alias = Holder([model.layer, model.layer])
    alias.layer = model.layer
    assert start_facts(alias, [torch.optim.SGD(alias.parameters(), lr=0.1)])["unregistered"]["count"] == 0


@pytest.mark.parametrize(("fill", "count"), [(0.0, 0), (0.1, 3)])
def test_empty_factors_are_not_frozen_parameters(fill: float, count: int) -> None:
    """Frozen zeros that a later step fills, as the factors of a split layer, are no finding; other values are."""
    factors = LowRankFactors(torch.zeros(8, 8), rank=2)
    model = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8), factors])])
    for parameter in factors.parameters():
        parameter.data.fill_(fill)
    history = History(start_facts(model, [torch.optim.SGD(model.parameters(), lr=0.1)]))
    assert history.facts["frozen_in_optimizer"]["count"] == count
    findings = {finding.id: finding.severity for finding in diagnose(history)}
    assert findings.get("frozen-parameters-in-optimizer") == ("warning" if count else None)


def test_frozen_zero_matrix_is_a_frozen_parameter() -> None:
    """One matrix of zeros, such as the second factor of LoRA, could be trained."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).requires_grad_(True)
    nn.init.zeros_(model[1].weight).requires_grad_(False)
    facts = start_facts(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    assert facts["frozen_in_optimizer"]["names"] == ["1.weight"]


def facts_of_shards() -> int:
    """Return the number of collectives in which a rank reads the facts; the last rank has an empty shard."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data.copy_(model[0].weight.data)
    nn.init.zeros_(model[2].weight)
    model[3].requires_grad_(False)
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = torch.optim.Adam(model.parameters())
    with CommDebugMode() as collectives:
        start_facts(model, [optimizer])
    return collectives.get_total_counts()


@pytest.mark.ranks
def test_facts_of_shards_need_no_other_rank(tmp_path):
    """Only the first rank may write them, and of four rows the third of three ranks has none."""
    assert on_ranks(facts_of_shards, tmp_path, 3) == [0, 0, 0]


@pytest.mark.parametrize("is_trained", [False, True])
def test_frozen_layers_with_initial_weights(is_trained: bool) -> None:
    """A training leaves no weights that are distributed uniformly, as torch initialises them."""
    base, head = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16)), nn.Linear(16, 2)
    if is_trained:
        optimizer, rows = torch.optim.Adam(base.parameters(), 1e-2), torch.randn(64, 8)
        for _ in range(50):
            optimizer.zero_grad()
            base(rows).square().mean().backward()
            optimizer.step()
    base.requires_grad_(False)
    facts = start_facts(nn.Sequential(base, head), [torch.optim.Adam(head.parameters())])["frozen_untrained"]
    assert (facts["count"], facts["layers"]) == (0 if is_trained else 2, 2)


@pytest.mark.parametrize("momentum", [0.1, 0.99])
def test_largest_momentum_of_batch_normalisations(momentum: float) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=momentum), nn.BatchNorm1d(2, momentum=None))
    facts = start_facts(model, [torch.optim.SGD(model.parameters(), 0.1)])
    assert facts["largest_batchnorm_momentum"] == momentum


@pytest.mark.parametrize("has_moved", [False, True])
def test_momentum_encoders_are_no_untrained_layers(has_moved: bool) -> None:
    """A frozen copy of a trained layer is one, also after its first average, which rounds; a fresh layer is not."""
    trained = nn.Linear(16, 16)
    copied, fresh = copy.deepcopy(trained).requires_grad_(False), nn.Linear(16, 16).requires_grad_(False)
    if has_moved:
        copied.weight.mul_(0.99).add_(trained.weight.detach(), alpha=0.01)
    model = nn.ModuleList([trained, copied, fresh])
    facts = start_facts(model, [torch.optim.SGD(trained.parameters(), lr=0.1)])
    assert facts["frozen_untrained"] == {"count": 1, "names": ["2"], "layers": 2}
