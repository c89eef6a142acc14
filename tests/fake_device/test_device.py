"""The simulated accelerator itself: what distinguishes it from the CPU, and what it counts."""

import pytest
import torch
from torch import nn

from tests.fake_device import building
from tests.fake_device.device import count_synchronisations, on_fake_device

pytestmark = [pytest.mark.fake_device, pytest.mark.slow]


@on_fake_device
def test_torch_knows_the_device():
    assert torch.accelerator.current_accelerator() == torch.device("fake")
    assert torch.zeros(2, device="fake").device == torch.device("fake", 0)


@on_fake_device
def test_devices_do_not_mix():
    here, there = torch.ones(3), torch.ones(3, device="fake")
    for mix in (
        lambda: here + there,
        lambda: there.add_(here),
        lambda: here.add_(there),
        lambda: torch.dot(here, there),
    ):
        with pytest.raises(RuntimeError, match="device"):
            mix()
    assert (there * torch.tensor(2.0)).tolist() == [2.0, 2.0, 2.0]
    assert there[torch.tensor([0, 2])].tolist() == [1.0, 1.0]


@on_fake_device
def test_views_share_memory():
    base = torch.zeros(3, 4, device="fake")
    base.t()[1:3].fill_(1.0)
    base.unfold(1, 2, 2)[0].add_(1.0)
    torch.view_as_complex(base.view(3, 2, 2))[2, 0].zero_()
    assert base.tolist() == [[1.0, 2.0, 2.0, 1.0], [0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]]


@on_fake_device
def test_generator_is_separate_from_the_cpus():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    drawn = torch.randn(5, device="fake")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.randn(5), drawn.cpu())
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(2, device="fake", generator=torch.Generator())


@on_fake_device
def test_synchronisations_are_counted():
    values = torch.arange(4.0, device="fake")
    with count_synchronisations() as none:
        (values * 2 + 1).sum()
    assert none.by_kind == {}
    with count_synchronisations() as some:
        float(values.sum()), values.tolist(), torch.tensor([1.0], device="fake"), values[values > 1.0]
    kinds = {"items": 1, "copies to the host": 1, "copies to the device": 1, "waits": 1}
    assert some.by_kind == kinds
    assert some.total == 4


@on_fake_device
def test_training_step_has_the_bytes_of_the_cpu():
    results = []
    for device in ("cpu", "fake"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 2)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        torch.manual_seed(2)
        model(torch.ones(3, 4, device=device)).square().sum().backward()
        optimizer.step()
        results.append(torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()]))
    assert torch.equal(*results)


def test_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert building.missing_tool() == "the compiler no-such-compiler"


def test_cache_depends_on_source_and_torch(monkeypatch, tmp_path):
    folder = building.cache_folder()
    source = tmp_path / "other.cpp"
    source.write_text("// another source")
    monkeypatch.setattr(building, "SOURCE", source)
    assert building.cache_folder() != folder
    assert torch.__version__ in folder.name
