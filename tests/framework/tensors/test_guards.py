"""The guard of torch and the comparison of properties detect the same changes of tensors."""

from collections.abc import Callable

import pytest
import torch
from loopscope.tensors import TensorIdentities, TensorProperties, guards
from torch import Tensor, nn

CHANGES: dict[str, Callable[[Tensor], object]] = {
    "none": lambda tensor: None,
    "bytes": lambda tensor: tensor.add_(1),
    "shape": lambda tensor: setattr(tensor, "data", tensor.data.view(6)),
    "strides": lambda tensor: tensor.t_(),
    "storage": lambda tensor: setattr(tensor, "data", torch.zeros(2, 3)),
    "dtype": lambda tensor: setattr(tensor, "data", torch.zeros(2, 3, dtype=torch.float64)),
    "requires_grad": lambda tensor: tensor.requires_grad_(not tensor.requires_grad),
    "class": lambda tensor: setattr(tensor, "__class__", Tensor if type(tensor) is nn.Parameter else nn.Parameter),
}


def is_current_after(change: Callable[[Tensor], object], tensor: Tensor) -> bool:
    identities = TensorIdentities([torch.ones(4), tensor], persistent=True)
    with torch.no_grad():
        change(tensor)
    return identities.is_current()


@pytest.mark.parametrize("kind", [nn.Parameter, torch.clone])
@pytest.mark.parametrize("change", CHANGES)
def test_guard_and_comparison_agree(
    change: str, kind: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_guard = is_current_after(CHANGES[change], kind(torch.zeros(2, 3)))
    monkeypatch.setattr(guards, "is_available", False)
    assert is_current_after(CHANGES[change], kind(torch.zeros(2, 3))) is with_guard
    assert with_guard is (change in ("none", "bytes"))


def test_guard_is_available() -> None:
    assert guards.is_available


@pytest.mark.parametrize("answer", [True, False, AttributeError("TensorGuards")])
def test_unreliable_guard_is_not_used(answer: bool | Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*tensors: Tensor) -> bool:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(guards, "guard_of", lambda tensors: check)
    assert not guards.detects_changes()


def test_properties_are_compared_without_their_guard() -> None:
    """In inference mode the guard fails although nothing has changed; a later change is still detected and named."""
    weight = nn.Parameter(torch.zeros(2, 3))
    properties, names = TensorProperties([weight]), {id(weight): "weight"}
    assert properties.guards[0]()
    with torch.inference_mode():
        assert not properties.guards[0]()
        assert properties.differences(names) == []
        assert properties.guards[0]()
        weight.requires_grad_(False)
        assert not properties.guards[0]()
    assert properties.differences(names) == ["weight (its requires_grad)"]
