"""Scripts that set a default dtype, a default device or autocast for their whole training."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import loopscope
import pytest
import torch
from torch import Tensor, nn

DATA = [(torch.randn(16, 8, generator=torch.Generator().manual_seed(i)), torch.arange(16) % 5) for i in range(4)]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


def train(settings: Any, evaluates: bool = False, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the weights and the last metrics of a float32 model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with settings:
        given = {"loss": loss_of, "loader": DATA, "display": "none", **options}
        with loopscope.attach(model, optimizer, **given) if options else nullcontext() as scope:
            for batch in scope.batches(DATA) if scope else DATA:
                if evaluates:
                    scope.evaluate(lambda: {"value": float(model(DATA[0][0]).sum())})
                loss = loss_of(model, batch)
                scope.backward(loss) if scope else loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return [item.tolist() for item in model.parameters()], dict(scope.last_metrics()) if scope else {}


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.slow_rows("{'with_hooks': 'full'}")
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("options", [{"with_hooks": "full"}, {"hooks": ["hessian"]}, {"hooks": ["norms"]}], ids=str)
def test_autocast_around_loop_keeps_its_cache(tmp_path: Any, options: Any) -> None:
    """The casts of weights that the loop uses again, after updates too, are those of the loop without hooks."""
    weights, _ = train(autocast(), evaluates="norms" in options.get("hooks", ()), out=tmp_path / "run", **options)
    assert weights == train(autocast())[0]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [lambda: default_dtype(torch.bfloat16), default_device], ids=["dtype", "device"])
def test_metrics_do_not_depend_on_script_settings(tmp_path: Any, settings: Any) -> None:
    """All hooks of the group ``full`` report the same numbers, for the same weights."""
    weights, metrics = train(settings(), with_hooks="full", out=tmp_path / "run")
    plain_weights, plain = train(nullcontext(), with_hooks="full", out=tmp_path / "plain")
    assert weights == plain_weights
    assert metrics.keys() == plain.keys()
    numbers = {name: value for name, value in plain.items() if isinstance(value, float)}
    assert {name: metrics[name] for name in numbers} == pytest.approx(numbers, rel=1e-5, nan_ok=True)
