"""The weight update monitor on two processes under FSDP2 matches that on one process, with the same samples."""

from typing import Any

import pytest
import torch
from loopscope.training_hooks.updates.weight_updates import WeightUpdateMonitor
from torch import nn

from tests.support.ranks import on_two_ranks

SETTINGS: tuple[dict[str, Any], ...] = ({"exact": True}, {"sample_size": 40}, {"sample_size": 4})


def build(*, sharded: bool, dtype: torch.dtype) -> nn.Module:
    """Return a model with an odd number of rows, and a bias without elements on the second rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Linear(5, 1)).to(dtype)
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0])
        fully_shard(model)
    return model


def diagnostics(*, sharded: bool) -> list[dict[str, dict[str, float]]]:
    """Check two steps with every setting and dtype; return all diagnostics."""
    checks = []
    for dtype in (torch.float32, torch.bfloat16):
        model = build(sharded=sharded, dtype=dtype)
        monitors = [WeightUpdateMonitor(**settings) for settings in SETTINGS]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(2):
            inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            for monitor in monitors:
                checks.append(monitor.check_gradients(model, optimizer))
            optimizer.step()
            checks += [monitor.check_updates(model, optimizer) for monitor in monitors]
    return [{name: plain_fields(diagnosis) for name, diagnosis in check.items()} for check in checks]


def plain_fields(diagnosis: Any) -> dict[str, Any]:
    fields = {name: getattr(diagnosis, name) for name in type(diagnosis).__slots__}
    return {name: value if isinstance(value, tuple) else float(value) for name, value in fields.items()}


def sharded_diagnostics() -> list[dict[str, dict[str, float]]]:
    return diagnostics(sharded=True)


@pytest.mark.slow
def test_two_ranks_match_one_rank(tmp_path):
    first, second = on_two_ranks(sharded_diagnostics, tmp_path)
    expected = diagnostics(sharded=False)
    assert first == second
    assert len(first) == len(expected) == 2 * 2 * 2 * len(SETTINGS)
    for check, expected_check in zip(first, expected, strict=True):
        assert check.keys() == expected_check.keys()
        for name, numbers in expected_check.items():
            terms = {key: value for key, value in numbers.items() if isinstance(value, tuple)}
            assert {key: check[name].pop(key) for key in terms} == {key: numbers.pop(key) for key in terms}
            assert check[name] == pytest.approx(numbers, rel=1e-6, abs=1e-12, nan_ok=True)
