"""Other threads of a training's process: those that draw random numbers, and those that train other models."""

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import loopscope
import numpy as np
import pytest
import torch
from loopscope.doctor.senses.evaluation_modes import EvaluationCall
from loopscope.hooks import HookPoint, HookRegistry
from loopscope.isolation import Isolation
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as module_hooks

from tests.support import SpyHook, at

pytestmark = pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert")


def prefetched(count: int) -> Iterator[Tensor]:
    """Yield batches from a thread that draws them from NumPy's global generator."""
    batches: queue.Queue[Tensor | None] = queue.Queue(2)

    def produce() -> None:
        for _ in range(count):
            batches.put(torch.from_numpy(np.random.randn(64, 6).astype("float32")))
        batches.put(None)

    threading.Thread(target=produce, daemon=True).start()
    yield from iter(batches.get, None)


def train(folder: Path | None, **options: Any) -> Tensor:
    torch.manual_seed(0)
    np.random.seed(0)
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scope = loopscope.attach(net, optimizer, out=folder, display="silent", **options) if folder else None
    for batch in scope.batches(prefetched(20)) if scope else prefetched(20):
        loss = net(batch).square().mean()
        scope.backward(loss) if scope else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if scope:
        scope.close()
    return net.weight.detach()


@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("group", ["minimal", "health"])
def test_hooks_leave_the_numbers_of_a_thread(tmp_path: Path, group: str) -> None:
    """The weights equal those without hooks while a thread draws random numbers."""
    assert torch.equal(train(None), train(tmp_path / "run", with_hooks=group))


@pytest.mark.filterwarnings("always::loopscope.errors.RunNotice")
def test_hook_that_draws_during_a_thread_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spy = at(SpyHook, HookPoint.POST_STEP)(lambda ctx: {"value": float(np.random.rand())})
    train(tmp_path / "run", hooks=[spy])
    assert "runs while hooks or evaluations draw random numbers" in " ".join("".join(capfd.readouterr()).split())


def train_alone(seed: int, folder: Path | None, group: str) -> Tensor:
    """Train without random numbers, with hooks if a folder is given."""
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    data = [(torch.randn(16, 8, generator=generator), torch.arange(16) % 3) for _ in range(15)]
    loss_of = lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1])
    options = {"with_hooks": group, "loss": loss_of, "display": "none"}
    scope = loopscope.attach(net, optimizer, out=folder / str(seed), **options) if folder else None
    for batch in scope.batches(data) if scope else data:
        loss = loss_of(net, batch)
        scope.backward(loss) if scope else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if scope:
        scope.close()
    return net[0].weight.detach()


@pytest.mark.some_rows(2)
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("group", ["health", "observers"])
def test_trainings_in_two_threads_are_independent(tmp_path: Path, group: str) -> None:
    """Two trainings with hooks, in two threads, have the weights of those without hooks."""
    with ThreadPoolExecutor(2) as pool:
        bare, ours = (
            list(pool.map(partial(train_alone, folder=place, group=group), (1, 2))) for place in (None, tmp_path)
        )
    assert all(map(torch.equal, bare, ours))


def test_model_of_another_thread_is_left_alone(tmp_path: Path) -> None:
    """A model that another thread calls while a hook computes a loss is no module of the loss: nothing is undone."""
    net, other, calls = nn.Linear(4, 2), nn.BatchNorm1d(4), list[int]()
    waiting: queue.Queue[Tensor | None] = queue.Queue()

    def serve() -> None:
        for batch in iter(waiting.get, None):
            other(batch)
            waiting.task_done()

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        calls.append(len(batch))
        waiting.put(batch)
        waiting.join()
        return model(batch).square().mean()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options: dict[str, Any] = {"hooks": ["hessian"], "loss": loss_of, "display": "none"}
    with loopscope.attach(net, optimizer, out=tmp_path / "run", **options) as scope:
        for batch in scope.batches([torch.randn(8, 4) for _ in range(3)]):
            scope.backward(loss_of(net, batch))
            optimizer.step()
            optimizer.zero_grad()
    waiting.put(None)
    thread.join()  # the streams of later tests would be shared with it
    assert other.num_batches_tracked.item() == len(calls) > 3


def test_hooks_on_all_modules_wait_for_visits(tmp_path: Path) -> None:
    """Another run's hook on all modules appears after a visit, so that no hook of this run is blamed for it."""
    net, threads = nn.Linear(4, 2), list[threading.Thread]()

    def compute(ctx: Any) -> dict[str, float]:
        threads.append(threading.Thread(target=EvaluationCall, args=(nn.Linear(1, 1),)))
        threads[-1].start()
        threads[-1].join(0.1)
        return {"waits": float(threads[-1].is_alive())}

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    spy = at(SpyHook, HookPoint.POST_STEP)(compute)
    try:
        with loopscope.attach(net, optimizer, hooks=[spy], out=tmp_path / "run", display="none") as scope:
            for batch in scope.batches([torch.randn(8, 4) for _ in range(3)]):
                scope.backward(net(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        for thread in threads:
            thread.join()
        assert len(threads) == 3
    finally:
        module_hooks._global_forward_pre_hooks.clear()


def test_hooks_without_a_stream_draw_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of loopscope's hooks that get no separate random stream leave all generators unchanged."""
    observe, drawing = Isolation.observe, set[str]()

    def observed(isolation: Isolation, call: Any, function: Any) -> Any:
        before = isolation.streams.save()
        result = observe(isolation, call, function)
        if not call.draws and not isolation.streams.save().equals(before):
            drawing.add(str(call))
        return result

    monkeypatch.setattr(Isolation, "observe", observed)
    HookRegistry.discover()
    net = nn.Sequential(nn.Embedding(9, 8), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 9))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    data = [torch.randint(9, (8, 4)) for _ in range(5)]
    loss_of = lambda model, batch: functional.cross_entropy(model(batch), batch[:, 0])
    options = {"with_hooks": "full", "loss": loss_of, "loader": data, "display": "none"}
    with loopscope.attach(net, optimizer, out=tmp_path / "run", **options) as scope:
        for batch in scope.batches(data):
            scope.backward(loss_of(net, batch))
            optimizer.step()
            optimizer.zero_grad()
    assert not drawing
