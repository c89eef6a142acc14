"""Start-up facts about parameters that a model does not register."""

import pytest
import torch
from loopscope.doctor.start_up_facts import start_facts
from torch import nn


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
