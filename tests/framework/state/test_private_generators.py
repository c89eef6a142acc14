"""Private generators that forward passes and losses draw from keep their numbers when hooks compute losses."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import loopscope
import numpy as np
import pytest
import torch
from loopscope.state import RandomStreams, TrainingState
from loopscope.state.generators.private_generators import generators_of, generators_of_methods
from torch import nn

from tests.support import noise_source

HOOKS = ["lr_probe", "hessian", "gradient_noise_scale"]
GLOBAL = torch.Generator()
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "torch": (torch.Generator, lambda generator: torch.rand(1, generator=generator).item()),
    "Python": (lambda: random.Random(3), lambda generator: generator.random()),
    "NumPy": (lambda: np.random.default_rng(3), lambda generator: generator.random()),
    "NumPy's old one": (lambda: np.random.RandomState(3), lambda generator: generator.random_sample()),
}


class Drawing:
    """A loss that is an object, with a method that draws."""

    def __init__(self, generator: Any, draw: Callable[[Any], float]) -> None:
        self.tools, self.draw = SimpleNamespace(generators=[generator]), draw

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        return self.compute(model, batch)

    def compute(self, model: nn.Module, batch: Any) -> Any:
        return loss_with(self.tools.generators[0], self.draw, model, batch)


def loss_with(generator: Any, draw: Callable[[Any], float], model: nn.Module, batch: Any) -> Any:
    return (model(batch) - draw(generator)).square().mean()


def by_closure(generator: Any, draw: Callable[[Any], float]) -> Callable[..., Any]:
    def inner(model: nn.Module, batch: Any) -> Any:
        return loss_with(generator, draw, model, batch)

    return lambda model, batch: inner(model, batch)


def by_default(generator: Any, draw: Callable[[Any], float]) -> Callable[..., Any]:
    def loss(model: nn.Module, batch: Any, *, source: Any = generator) -> Any:
        return loss_with(source, draw, model, batch)

    return loss


PLACES: dict[str, Callable[..., Callable[..., Any]]] = {
    "closure": by_closure,
    "default": by_default,
    "partial": lambda generator, draw: partial(loss_with, generator, draw),
    "object": Drawing,
    "method": lambda generator, draw: Drawing(generator, draw).compute,
}


class Noisy(nn.Linear):
    """A layer whose helper method draws from a global generator."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.disturbed(super().forward(inputs))

    def disturbed(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs + torch.randn(outputs.shape, generator=GLOBAL)


def weights(folder: Path, hooks: list[str], loss: Callable[..., Any], kind: type[nn.Linear] = nn.Linear) -> list[float]:
    torch.manual_seed(0)
    model = kind(4, 2)
    optimizer, batches = torch.optim.SGD(model.parameters(), 0.1), [*torch.randn(24, 4).split(6)]
    scope = loopscope.attach(
        model, optimizer, hooks=hooks, loss=loss, loader=batches, out=folder, overwrite=True, display="none"
    )
    for batch in scope.batches(batches):
        scope.backward(loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    scope.close()
    return model.weight.flatten().tolist()


@pytest.mark.some_rows(2)
@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_generator_of_a_loss_is_not_moved(kind: str, place: str, tmp_path: Path) -> None:
    """A hook that computes losses leaves the weights of a loss that draws from a private generator."""
    make, draw = KINDS[kind]
    made = [PLACES[place](make(), draw) for _ in range(2)]
    assert weights(tmp_path, HOOKS[:1], made[0]) == weights(tmp_path, [], made[1])


@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("hook", HOOKS)
def test_generator_of_a_forward_pass_is_not_moved(hook: str, tmp_path: Path) -> None:
    """Hooks leave the weights of a model that draws from a private generator in its forward pass."""
    loss = lambda model, batch: model(batch).square().mean()
    GLOBAL.manual_seed(5)
    bare = weights(tmp_path, [], loss, Noisy)
    GLOBAL.manual_seed(5)
    assert weights(tmp_path, [hook], loss, Noisy) == bare


def draws_from_a_module(model: nn.Module, batch: Any) -> Any:
    return noise_source.GENERATOR.random() * noise_source.draw_indirectly()


def test_generators_in_other_modules_are_found() -> None:
    """Those that the code names are found, and others of the same module are not."""
    assert generators_of(draws_from_a_module) == [noise_source.GENERATOR, noise_source.INDIRECT]
    assert generators_of(draws_from_a_module, draws_from_a_module, max, nn.Linear, None) == generators_of(
        draws_from_a_module
    )
    assert generators_of_methods([Noisy(2, 2), Noisy(2, 2)]) == [GLOBAL]


def test_states_of_all_kinds_are_seeded_and_restored() -> None:
    """A derived stream gives other numbers, and the same ones for the same call."""
    generators = {name: make() for name, (make, _) in KINDS.items()}
    streams = RandomStreams(1, generators.values())
    draw = lambda: [KINDS[name][1](generator) for name, generator in generators.items()]
    saved = streams.save()
    first = draw()
    streams.derive("hook", "POST_STEP", 3)
    derived = draw()
    streams.derive("hook", "POST_STEP", 3)
    assert draw() == derived != first
    assert not saved.equals(streams.save())
    saved.restore()
    assert saved.equals(streams.save())
    assert draw() == first


@pytest.mark.parametrize("name", KINDS)
def test_generator_on_a_module_is_protected_once(name: str) -> None:
    """One that the model holds and its method names belongs to one part of the state."""
    model = nn.Linear(2, 2)
    model.source = KINDS[name][0]()
    state = TrainingState(model, torch.optim.SGD(model.parameters()), RandomStreams(1))
    assert len(state.streams.owned) == int(name == "torch")
