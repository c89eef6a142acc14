"""Identities of tensors detect every change apart from bytes."""

from collections.abc import Callable

import pytest
import torch
from loopscope.tensors import TensorIdentities
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


@pytest.mark.parametrize("kind", [nn.Parameter, torch.clone])
@pytest.mark.parametrize("name", CHANGES)
def test_identities_detect_all_but_bytes(name: str, kind: Callable[[Tensor], Tensor]) -> None:
    tensor = kind(torch.zeros(2, 3))
    identities = TensorIdentities([torch.ones(4), tensor])
    with torch.no_grad():
        CHANGES[name](tensor)
    assert identities.is_current() is (name in ("none", "bytes"))
