"""Model contexts without a hook manager, and comparisons of vectors."""

import torch
from loopscope.data import TensorLoader, fixed_order
from loopscope.engine import CommitRecord
from loopscope.engine.model_context import Access, ModelContext
from loopscope.hooks import ModelDataContext, StatePart
from loopscope.state import RandomStreams, TrainingState, seed_everything
from loopscope.tensors import trainable
from loopscope.training import TrainingTask
from torch import Tensor, nn
from torch.nn import functional

ROWS = 11
BOTH = frozenset(StatePart)


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def noisy_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def context(
    model: nn.Module | None = None,
    *,
    mutates: bool = True,
    commits: frozenset[StatePart] = BOTH,
    stream: tuple[str, str, int] = ("probe", "PRE_STEP", 1),
    loop: str = "epoch",
    **options: object,
) -> ModelDataContext:
    """Return a model context within a step: the batches have 4, 4 and 3 rows, and gradients exist."""
    seed_everything(3)
    model = model or noisy_model()
    dtype = next(model.parameters()).dtype
    data = (torch.randn(ROWS, 4, dtype=dtype), torch.randint(3, (ROWS,)))
    optimizer = torch.optim.AdamW(trainable(model).values(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loader = TensorLoader(data, 4, fixed_order(torch.arange(ROWS)))
    task = TrainingTask(model, optimizer, loader, mean_loss, scheduler=scheduler, **options)
    state = TrainingState(model, optimizer, RandomStreams(7), scheduler=scheduler)
    state.loop.batch = next(loader.batches(0))
    mean_loss(model, state.loop.batch).backward()
    record = CommitRecord("probe", commits)
    parameters = list(model.parameters())
    return ModelContext(Access(task, state, record, parameters, mutates=mutates, device=None, stream=stream, loop=loop))


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, **tolerance)


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert_close(actual, expected, rtol=0, atol=0)
