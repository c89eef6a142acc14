"""The weight monitor on two processes under FSDP2 reports what it reports on one: the same elements are sampled."""

from typing import Any

import pytest
import torch
from loopscope.training_hooks.updates.weight_updates import WeightUpdateMonitor
from torch import nn

from tests.support.ranks import on_two_ranks

SETTINGS: tuple[dict[str, Any], ...] = ({"exact": True}, {"sample_size": 40}, {"sample_size": 4})


def build(*, sharded: bool, dtype: torch.dtype) -> nn.Module:
    """A model with rows that do not divide by two, and a bias of which the second rank has nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Linear(5, 1)).to(dtype)
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0])
        fully_shard(model)
    return model


def diagnostics(*, sharded: bool) -> list[dict[str, dict[str, float]]]:
    """Check two steps with every setting and dtype; return everything that was found."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = build(sharded=sharded, dtype=dtype)
        monitors = [WeightUpdateMonitor(**settings) for settings in SETTINGS]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(2):
            inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            for monitor in monitors:
                found.append(monitor.check_gradients(model, optimizer))
            optimizer.step()
            found += [monitor.check_updates(model, optimizer) for monitor in monitors]
    return [{name: plain(each) for name, each in one.items()} for one in found]


def plain(each: Any) -> dict[str, Any]:
    found = {name: getattr(each, name) for name in type(each).__slots__}
    return {name: value if isinstance(value, tuple) else float(value) for name, value in found.items()}


def on_one_rank() -> list[dict[str, dict[str, float]]]:
    return diagnostics(sharded=True)


@pytest.mark.slow
def test_two_ranks_find_what_one_finds(tmp_path):
    first, second = on_two_ranks(on_one_rank, tmp_path)
    expected = diagnostics(sharded=False)
    assert first == second
    assert len(first) == len(expected) == 2 * 2 * 2 * len(SETTINGS)
    for ours, theirs in zip(first, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, numbers in theirs.items():
            told = {key: value for key, value in numbers.items() if isinstance(value, tuple)}
            assert {key: ours[name].pop(key) for key in told} == {key: numbers.pop(key) for key in told}
            assert ours[name] == pytest.approx(numbers, rel=1e-6, abs=1e-12, nan_ok=True)
