"""Measures of policies against formulas that are written out, and the hook in custom loops."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loopscope import attach
from loopscope.doctor.senses import LogProbs, PolicyTerms, Regressed, Weighted
from loopscope.training_hooks.policies import PolicyHealth
from loopscope.training_hooks.policies.policy_measures import measures_of
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence
from torch.nn import functional as F

from tests.support import RecordingSink

GENERATOR = torch.Generator().manual_seed(1)
BATCH, LENGTH, TOKENS = 3, 4, 5


def test_ratio_measures_are_those_of_numpy() -> None:
    """Every mean is written out in NumPy, in float64, over the tokens of the mask."""
    ratios = torch.rand(BATCH, LENGTH, generator=GENERATOR) + 0.5
    reference = torch.rand(BATCH, LENGTH, generator=GENERATOR) + 0.5
    mask = torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    weighted = Weighted(torch.tensor([[1.0], [-1.0], [0.0]]), -1, BATCH * LENGTH, (BATCH, LENGTH))
    found = measures_of(PolicyTerms(ratios, reference, (0.8, 1.2), [mask], [weighted]))
    r, rho = (values.double().numpy()[mask.numpy() > 0] for values in (ratios, reference))
    terms = r - 1 - np.log(r)
    expected = {
        "approx_kl": terms.mean(), "approx_kl_error": terms.std(ddof=1) / math.sqrt(len(r)),
        "approx_kl_k1": -np.log(r).mean(), "ratio_mean": r.mean(), "ratio_max": r.max(),
        "clip_fraction": ((r < 0.8) | (r > 1.2)).mean(), "kl": (rho - 1 - np.log(rho)).mean(),
        "kl_k1": -np.log(rho).mean(), "effective_sample_share": r.sum() ** 2 / (len(r) * (r**2).sum()),
        "advantage_mean": 0.0, "advantage_std": math.sqrt(2 / 3), "advantage_zero_fraction": 1 / 3,
    }  # fmt: skip
    assert {name: float(found[name]) for name in expected} == pytest.approx(expected)


def test_entropies_are_means_over_positions() -> None:
    rows = torch.randn(BATCH, LENGTH, TOKENS, generator=GENERATOR).log_softmax(-1)
    mask = torch.ones(BATCH, LENGTH)
    mask[0, 2:] = 0
    terms = PolicyTerms(torch.ones(BATCH, LENGTH), masks=[mask], log_probs=[LogProbs(BATCH * LENGTH, rows)])
    found, p = measures_of(terms), rows.double().exp().numpy()
    entropy, counted = -(p * np.log(p)).sum(-1), mask.numpy() > 0
    early, late = [entropy[0, 0], *entropy[1:, 0]], [entropy[0, 1], *entropy[1:, 3]]
    expected = {"entropy": entropy[counted].mean(), "entropy_early": np.mean(early), "entropy_late": np.mean(late)}
    assert {name: float(found[name]) for name in expected} == pytest.approx(expected)


def test_explained_variance_is_that_of_returns() -> None:
    values, targets = torch.randn(2, 9, generator=GENERATOR)
    terms = PolicyTerms(torch.ones(9), regressed=[Regressed(values, targets, False, None)])
    expected = 1 - np.var((targets - values).double().numpy()) / np.var(targets.double().numpy())
    assert float(measures_of(terms)["explained_variance"]) == pytest.approx(expected)


def test_length_correlation_is_that_of_advantages() -> None:
    mask = (torch.arange(8) < torch.tensor([[2], [4], [6], [8]])).float()
    terms = PolicyTerms(masks=[mask], weighted=[Weighted(torch.tensor([[1.0], [2], [3], [4]]), -1, 32, (4, 8))])
    assert float(measures_of(terms)["length_correlation"]) == pytest.approx(1.0)


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, states: Tensor) -> tuple[Categorical, Tensor]:
        return Categorical(logits=self.actor(states)), self.critic(states)


def trained(folder: Path, loss: Callable[[Agent], Tensor], steps: int = 3) -> dict[str, list[float]]:
    """Train with the hook, and return its metrics."""
    torch.manual_seed(0)
    agent = Agent()
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.1)
    sink = RecordingSink()
    with attach(agent, optimizer, hooks=[PolicyHealth(interval=1)], sinks=[sink], out=folder, display="none"):
        for _ in range(steps):
            optimizer.zero_grad()
            loss(agent).backward()
            optimizer.step()
    metrics: dict[str, list[float]] = {}
    for name, _, _, value in sink.rows("policy_health/"):
        metrics.setdefault(name.removeprefix("policy_health/"), []).append(float(value))
    return metrics


STATES = torch.randn(16, 4, generator=GENERATOR)
ACTIONS = torch.randint(3, (16,), generator=GENERATOR)
RETURNS = torch.randn(16, generator=GENERATOR)


def actor_critic(agent: Agent, *, squeezes: bool = True) -> Tensor:
    policy, values = agent(STATES)
    advantages = RETURNS - (values.squeeze(-1) if squeezes else values).detach()
    return -(policy.log_prob(ACTIONS) * advantages).mean() + F.mse_loss(values.squeeze(-1), RETURNS)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_sign_is_shown_by_variables(tmp_path: Path, sign: float) -> None:
    advantages = RETURNS  # as a script has it at the time of the backward pass

    def loss(agent: Agent) -> Tensor:
        return sign * (agent(STATES)[0].log_prob(ACTIONS) * advantages).mean()

    assert trained(tmp_path, loss)["loss_sign"] == [sign] * 3


REFERENCE = torch.randn(16, 3, generator=GENERATOR).log_softmax(-1)
DIVERGENCES: dict[str, Callable[[Categorical], Tensor]] = {
    "of samples": lambda policy: k3_of(REFERENCE.gather(1, ACTIONS[:, None])[:, 0] - policy.log_prob(ACTIONS)),
    "squared": lambda policy: (policy.log_prob(ACTIONS) - REFERENCE.gather(1, ACTIONS[:, None])[:, 0]).pow(2) / 2,
    "of distributions": lambda policy: kl_divergence(policy, Categorical(logits=REFERENCE)),
    "reversed": lambda policy: kl_divergence(Categorical(logits=REFERENCE), policy),
    "by hand": lambda policy: divergence_of(policy.logits.log_softmax(-1)),
    "of a function": lambda policy: F.kl_div(policy.logits.log_softmax(-1), REFERENCE.exp(), reduction="none").sum(-1),
    "of logarithms": lambda policy: F.kl_div(
        policy.logits.log_softmax(-1), REFERENCE, reduction="sum", log_target=True
    ),
}


def k3_of(difference: Tensor) -> Tensor:
    return difference.exp() - difference - 1


def divergence_of(rows: Tensor) -> Tensor:
    return (rows.exp() * (rows - REFERENCE)).sum(-1)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_sign_of_divergence_is_measured(tmp_path: Path, name: str, sign: float) -> None:
    def loss(agent: Agent) -> Tensor:
        policy = agent(STATES)[0]
        objective = policy.log_prob(ACTIONS) * RETURNS - sign * 0.1 * DIVERGENCES[name](policy)
        return -objective.mean()

    metrics = trained(tmp_path, loss)
    assert metrics["divergence_sign"] == [sign] * 3
    assert "entropy_sign" not in metrics


def test_sign_of_entropy_by_hand_is_measured(tmp_path: Path) -> None:
    def loss(agent: Agent) -> Tensor:
        policy = agent(STATES)[0]
        rows = policy.logits.log_softmax(-1)[:8]  # a view, as for the tokens of completions
        return -(policy.log_prob(ACTIONS) * RETURNS).mean() + 0.1 * (rows.exp() * rows).sum(-1).mean()

    metrics = trained(tmp_path, loss)
    assert metrics["entropy_sign"] == [-1.0] * 3
    assert "divergence_sign" not in metrics


def test_returns_of_script_are_read(tmp_path: Path) -> None:
    """The mask of ended episodes is missing in the variables of the loop."""
    rewards = [float(value) for value in torch.rand(64, generator=GENERATOR)]
    dones = [step % 8 == 7 for step in range(64)]
    returns = [0.0]
    for reward in reversed(rewards):
        returns.insert(0, reward + 0.9 * returns[0])
    returns = returns[:-1]

    def loss(agent: Agent) -> Tensor:
        assert len(dones) == len(returns) == len(rewards)
        return -(agent(STATES)[0].log_prob(ACTIONS) * torch.tensor(returns[:16])).mean()

    assert trained(tmp_path, loss)["returns_through_ends"] == [1.0] * 3


def test_advantages_of_pairs_are_found(tmp_path: Path) -> None:
    assert "advantages_of_pairs" not in trained(tmp_path / "right", actor_critic)
    metrics = trained(tmp_path / "wrong", lambda agent: actor_critic(agent, squeezes=False))
    assert metrics["advantages_of_pairs"] == [1.0] * 3


def test_target_network_that_never_changes_is_found(tmp_path: Path) -> None:
    target = Agent()

    def loss(agent: Agent) -> Tensor:
        with torch.no_grad():
            targets = RETURNS + target.actor(STATES).max(1).values
        # both parts of the agent are trained, so that it is one network
        return F.mse_loss(agent.actor(STATES).gather(1, ACTIONS[:, None])[:, 0], targets) + 0 * agent(STATES)[1].sum()

    metrics = trained(tmp_path, loss)
    assert metrics["target_network_age"] == [1.0, 2.0, 3.0]
    assert metrics["target_network_distance"][-1] > 0


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy])
def test_target_network_that_shares_weights_is_found(tmp_path: Path, copies: Callable[[nn.Module], nn.Module]) -> None:
    learner = SimpleNamespace(q=None, target_net=None)

    def loss(agent: Agent) -> Tensor:
        learner.q, learner.target_net = agent.actor, learner.target_net or copies(agent.actor)
        with torch.no_grad():
            targets = RETURNS + learner.target_net(STATES).max(1).values
        return F.mse_loss(learner.q(STATES).gather(1, ACTIONS[:, None])[:, 0], targets)

    distances = trained(tmp_path, loss).get("target_network_distance", [1.0])
    assert (max(distances) == 0) is (copies is copy.copy)


def test_passes_by_other_methods_are_measured(tmp_path: Path) -> None:
    """As in stable-baselines3, no pass of the whole model is seen."""
    advantages = RETURNS
    metrics = trained(
        tmp_path, lambda agent: -(Categorical(logits=agent.actor(STATES)).log_prob(ACTIONS) * advantages).mean()
    )
    assert metrics["found"] == [1.0] * 3


def test_other_losses_have_no_measures(tmp_path: Path) -> None:
    assert trained(tmp_path, lambda agent: F.cross_entropy(agent(STATES)[0].logits, ACTIONS)) == {"found": [0.0] * 3}
