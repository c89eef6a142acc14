"""Tensors of every layout and kind: protected, or refused by name before the first step."""

import pytest
import torch
from loopscope.errors import UsageError
from loopscope.isolation import Call, Isolation
from loopscope.state import RandomStreams, TrainingState
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

pytestmark = pytest.mark.filterwarnings("ignore")
ONES = torch.ones(4)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


REFUSED = {
    "mkldnn": lambda: torch.ones(2, 3).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "sub_byte": lambda: torch.empty(4, dtype=torch.uint4),
    "fake": fake,
    "zeros_without_memory": lambda: torch._efficientzerotensor((3,)),
    "masked": lambda: torch.masked.masked_tensor(torch.ones(3), torch.ones(3, dtype=torch.bool)),
    "quint4": lambda: torch.quantize_per_channel(torch.ones(4, 2), ONES, torch.zeros(4), 0, torch.quint4x2),
}
PROTECTED = {
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "coordinates": lambda: torch.eye(4).to_sparse(),
    "uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "csc": lambda: torch.eye(4).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "meta": lambda: torch.zeros(3, device="meta"),
    "quint8": lambda: torch.quantize_per_tensor(ONES, 0.1, 0, torch.quint8),
    "qint8_channels": lambda: torch.quantize_per_channel(torch.ones(4, 2), ONES, torch.zeros(4).long(), 0, torch.qint8),
    "float8": lambda: ONES.to(torch.float8_e4m3fn),
    "float4": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "complex32": lambda: torch.ones(4, dtype=torch.complex32),
    "bits": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits8),
    "wrapper": lambda: TwoTensor(torch.ones(3), torch.ones(3)),
}
PLACES = {
    "buffers/odd": lambda model, tensor: model.register_buffer("odd", tensor),
    "modules/.odd": lambda model, tensor: vars(model).update(odd=tensor),
}


def state_with(tensor: torch.Tensor, place: str) -> TrainingState:
    model = nn.Linear(2, 2)
    PLACES[place](model, tensor)
    return TrainingState(model, torch.optim.SGD(model.parameters(), 0.1), RandomStreams(1))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", REFUSED)
def test_unprotectable_tensors_are_refused_by_name(kind, place):
    with pytest.raises(UsageError, match=f"{place} is a .*can neither be watched nor rolled back; accepted are"):
        state_with(REFUSED[kind](), place)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", PROTECTED)
def test_other_layouts_survive_hooks(kind, place):
    state = state_with(PROTECTED[kind](), place)
    digest, isolation = state.digest(), Isolation(state)
    with isolation.visit():
        isolation.observe(Call("spy", "POST_STEP", 1), lambda: None)
        isolation.intervene(Call("spy", "POST_STEP", 1), lambda: state.model.weight.data.zero_(), mutates=True)
    assert state.digest() == digest
