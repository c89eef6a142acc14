"""Returns and advantages in the variables of a script, against recursions that are written out."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from loopscope.training_hooks.policies.rollouts import returns_through_ends
from torch import Tensor

STEPS, ENVIRONMENTS, GAMMA, LAMBDA = 80, 3, 0.97, 0.9
GENERATOR = torch.Generator().manual_seed(0)


class Buffer:
    """A rollout of random numbers, with advantages of GAE for masks of the value and of the recursion."""

    def __init__(self, *, value_mask: bool = True, mask: bool = True, truncates: bool = False) -> None:
        shape = (STEPS, ENVIRONMENTS)
        self.rewards = torch.rand(shape, generator=GENERATOR)
        self.values = torch.randn(shape, generator=GENERATOR)
        self.dones = (torch.rand(shape, generator=GENERATOR) < 0.1).float()
        self.advantages = torch.zeros(shape)
        last = torch.zeros(ENVIRONMENTS)
        for step in reversed(range(STEPS)):
            following = self.values[step + 1] if step + 1 < STEPS else torch.zeros(ENVIRONMENTS)
            live = 1 - self.dones[step]
            delta = self.rewards[step] + GAMMA * following * (live if value_mask else 1) - self.values[step]
            if truncates:  # the value of the last observation, which the rollout lacks
                delta += GAMMA * (1 - live) * torch.randn(ENVIRONMENTS, generator=GENERATOR)
            last = delta + GAMMA * LAMBDA * (live if mask else 1) * last
            self.advantages[step] = last
        self.returns = self.advantages + self.values


def found(**variables: Any) -> float | None:
    """Return the measure for variables of a script; ``None`` if it is unknown."""
    return returns_through_ends(variables.items()).get("returns_through_ends")


@pytest.mark.parametrize("masks", [(False, False), (False, True), (True, False)])
def test_advantages_through_ends_are_found(masks: tuple[bool, bool]) -> None:
    assert found(buffer=Buffer(value_mask=masks[0], mask=masks[1])) == 1


@pytest.mark.parametrize("truncates", [False, True])
def test_masked_advantages_are_right(truncates: bool) -> None:
    assert found(buffer=Buffer(truncates=truncates)) == 0


def discounted(rewards: Tensor, ends: Tensor) -> Tensor:
    returns, following = torch.zeros(len(rewards)), torch.zeros(())
    for step in reversed(range(len(rewards))):
        returns[step] = following = rewards[step] + GAMMA * (1 - ends[step]) * following
    return returns


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda values: values,
    "list": lambda values: values.tolist(),
    "list of tensors": lambda values: list(values),
    "array": lambda values: values.numpy().astype(np.float32),
    "normalised": lambda values: (values - values.mean()) / values.std(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_masked", [False, True])
def test_returns_are_judged_in_all_forms(form: str, is_masked: bool) -> None:
    """Equal rewards, as in CartPole; ends noted at the last step, or at the first one of the next episode."""
    ends = torch.zeros(STEPS)
    ends[[7, 9, 24, 40, 55, 70]] = 1
    returns = FORMS[form](discounted(torch.ones(STEPS), ends if is_masked else torch.zeros(STEPS)))
    for noted in (ends, ends.roll(1)):
        measure = found(rewards=torch.ones(STEPS), returns=returns, dones=noted.bool().tolist())
        assert (measure == 1) is not is_masked


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("steps", [5, 16])
def test_short_rollouts_of_environments_are_judged(steps: int, is_masked: bool) -> None:
    """As in A2C, with a value after the last step, and the reward of CartPole."""
    shape = (steps, 12)
    ends = (torch.rand(shape, generator=GENERATOR) < 0.15).float()
    following, returns = torch.randn(shape[1], generator=GENERATOR), torch.zeros(shape)
    for step in reversed(range(steps)):
        following = 1 + GAMMA * following * (1 - ends[step] if is_masked else 1)
        returns[step] = following
    rewards = [torch.ones(shape[1])] * steps
    assert (found(rewards=rewards, returns=returns, dones=[*ends]) == 1) is not is_masked


def test_episodes_of_few_states_are_unknown() -> None:
    """Periodic returns follow from the next ones by chance."""
    ends = (torch.arange(STEPS) % 3 == 2).float()
    assert found(rewards=torch.ones(STEPS), returns=discounted(torch.ones(STEPS), ends), dones=ends) is None


def test_other_returns_are_unknown() -> None:
    """Targets that no recursion explains, such as those of V-trace."""
    buffer = Buffer(mask=False)
    buffer.advantages.copy_(torch.randn(buffer.advantages.shape, generator=GENERATOR))
    buffer.returns.copy_(buffer.advantages)
    assert found(buffer=buffer) is None
