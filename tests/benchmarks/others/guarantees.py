"""Effects of callbacks in a framework: the same training with and without a callback, compared bit for bit."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from loopscope.errors import StateMutationError
from loopscope.state import seed_everything
from torch import Tensor, nn

from tests.benchmarks.others.frameworks import Framework
from tests.benchmarks.others.with_loopscope import train_with_interventions
from tests.benchmarks.others.work import Asked, Callback, Data, Seen, Work

Train = Callable[[Work, Asked], None]
STEPS, EPOCHS = 5, 2
FACTOR = 1.0001
UNCHANGED, CHANGED, CAUGHT, NAMED = "same bits", "other weights", "an error", "an error that names it"


def draws(seen: Seen) -> Mapping[str, float]:
    """Draw one random number."""
    torch.rand(1)
    return {}


def writes(seen: Seen) -> Mapping[str, float]:
    """Increase every weight slightly, bypassing autograd."""
    for parameter in seen.model.parameters():
        parameter.data.mul_(FACTOR)
    return {}


def what_a_draw_does(framework: Framework) -> str:
    """Return whether a callback that draws a random number after every step changes the final weights."""
    return _verdict(framework.train, draws)


def what_a_write_does(framework: Framework) -> str:
    """Return whether a callback that writes to the weights after every step is caught, undone or not noticed."""
    verdicts = {UNCHANGED: "undone", CHANGED: "not noticed", CAUGHT: CAUGHT, NAMED: NAMED}
    found = verdicts[_verdict(framework.train, writes)]
    if framework.file != "with_loopscope":
        return found
    return f"{found}; of an intervention: {verdicts[_verdict(train_with_interventions, writes)]}"


def _verdict(train: Train, callback: Callback) -> str:
    alone, again = _weights(train, Asked()), _weights(train, Asked())
    assert _same(alone, again), "The training without callbacks does not repeat its own bits."
    try:
        found = _weights(train, Asked(callbacks=[callback]))
    except StateMutationError as error:
        return NAMED if "observes_0" in str(error) else CAUGHT
    return UNCHANGED if _same(alone, found) else CHANGED


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def _weights(train: Train, asked: Asked) -> list[Tensor]:
    """Train a small model with dropout, which draws at every step, from the same seed, and return its weights."""
    seed_everything(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.randn(8, 8), torch.randint(4, (8,))) for _ in range(STEPS)]
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(Work(model, optimizer, Data(batches), EPOCHS, Path(folder)), asked)
    return [parameter.detach().clone() for parameter in model.parameters()]
