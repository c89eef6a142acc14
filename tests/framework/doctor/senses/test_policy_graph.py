"""Terms of policies that the graph of a loss shows, for losses as they are usually written."""

from collections.abc import Callable

import pytest
import torch
from loopscope.doctor.senses import Episodes, policy_terms, variables_with
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.nn import functional as F

GENERATOR = torch.Generator().manual_seed(0)
ROWS = 6
ACTOR, CRITIC = nn.Linear(4, 3), nn.Linear(4, 1)
STATES = torch.randn(ROWS, 4, generator=GENERATOR)
ACTIONS = torch.tensor([0, 2, 1, 1, 0, 2])
ADVANTAGES = torch.tensor([-1.0, 0.5, 2.0, -0.25, 1.0, -2.0])
OLD = torch.randn(ROWS, generator=GENERATOR) / 10 - 1
TARGETS = torch.randn(ROWS, generator=GENERATOR)


def policy() -> Categorical:
    return Categorical(logits=ACTOR(STATES))


def ratios() -> Tensor:
    return (policy().log_prob(ACTIONS) - OLD).exp()


def normal() -> Tensor:
    return Normal(ACTOR(STATES), torch.ones(3)).log_prob(STATES[:, :3]).sum(-1)


def one_by_one() -> list[Tensor]:
    return [Categorical(logits=ACTOR(state)).log_prob(action) for state, action in zip(STATES, ACTIONS, strict=True)]


POLICY_LOSSES: dict[str, tuple[Callable[[], Tensor], int]] = {
    "clipped": (lambda: -torch.min(ratios() * ADVANTAGES, ratios().clamp(0.8, 1.2) * ADVANTAGES).mean(), -1),
    "negated": (lambda: torch.max(-ADVANTAGES * ratios(), -ADVANTAGES * ratios().clamp(0.8, 1.2)).mean(), 1),
    "logits": (lambda: -(policy().log_prob(ACTIONS) * ADVANTAGES).mean(), -1),
    "ascent": (lambda: (policy().log_prob(ACTIONS) * ADVANTAGES).sum() / 4, 1),
    "probs": (lambda: -(Categorical(probs=ACTOR(STATES).softmax(-1)).log_prob(ACTIONS) * ADVANTAGES).mean(), -1),
    "gather": (lambda: (-ADVANTAGES * ACTOR(STATES).log_softmax(-1).gather(1, ACTIONS[:, None])[:, 0]).sum(), 1),
    "index": (lambda: -(ADVANTAGES * ACTOR(STATES).log_softmax(-1)[torch.arange(ROWS), ACTIONS]).sum(), -1),
    "softmax": (lambda: 0 - (ACTOR(STATES).softmax(-1).gather(1, ACTIONS[:, None])[:, 0].log() @ ADVANTAGES), -1),
    "cross-entropy": (lambda: (F.cross_entropy(ACTOR(STATES), ACTIONS, reduction="none") * ADVANTAGES).mean(), -1),
    "normal": (lambda: -(normal() * ADVANTAGES).mean(), -1),
    "stack": (lambda: -(torch.stack(one_by_one()) * ADVANTAGES).sum(), -1),
    "numbers": (lambda: sum(-one * value for one, value in zip(one_by_one(), ADVANTAGES.tolist(), strict=True)), -1),
}
OTHER_LOSSES: dict[str, Callable[[], Tensor]] = {
    "classes": lambda: F.cross_entropy(ACTOR(STATES), ACTIONS),
    "weighted classes": lambda: (F.cross_entropy(ACTOR(STATES), ACTIONS, reduction="none") * STATES[:, 0].exp()).mean(),
    "regression": lambda: F.mse_loss(ACTOR(STATES), torch.zeros(ROWS, 3)),
    "reparametrised": lambda: (0.2 * Normal(ACTOR(STATES), 1.0).log_prob(ACTOR(STATES)).sum(-1) - TARGETS).mean(),
    "ranking": lambda: -F.logsigmoid(CRITIC(STATES[:3]) - CRITIC(STATES[3:])).mean(),
    "divergence": lambda: -0.5 * (1 + ACTOR(STATES) - ACTOR(STATES).exp()).mean(),
}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_advantages_and_their_sign_are_found(name: str) -> None:
    function, sign = POLICY_LOSSES[name]
    terms = policy_terms(function())
    assert terms.is_policy
    assert {one.sign for one in terms.weighted} == {sign}
    values = torch.cat([one.advantages.reshape(-1) for one in terms.weighted[:: 1 if name == "numbers" else ROWS]])
    expected = ADVANTAGES if sign < 0 or name == "ascent" else -ADVANTAGES
    assert torch.equal(values.float().sort().values, expected.sort().values)


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_other_losses_have_no_policy(name: str) -> None:
    assert not policy_terms(OTHER_LOSSES[name]()).is_policy


def test_clipped_ratios_values_and_entropy_are_found() -> None:
    value = F.mse_loss(TARGETS, CRITIC(STATES).flatten())
    terms = policy_terms(POLICY_LOSSES["clipped"][0]() - 0.01 * policy().entropy().mean() + 0.5 * value)
    assert terms.ratios is not None
    assert torch.equal(terms.ratios, ratios().detach())
    assert (terms.clip, terms.entropy_sign) == ((0.8, 1.2), -1)
    (regressed,) = terms.regressed
    assert torch.equal(regressed.targets, TARGETS)
    assert regressed.observations is not None
    assert torch.equal(regressed.observations, STATES)
    assert not regressed.has_picked


@pytest.mark.parametrize("sign", [-1, 1])
def test_sign_of_normal_entropy_is_found(sign: int) -> None:
    """The scale is a parameter, as in PPO; a penalty of the scale of another distribution is no entropy."""
    log_scale = torch.zeros(3, requires_grad=True)
    chosen = Independent(Normal(ACTOR(STATES), log_scale.exp()), 1)
    ratio = (chosen.log_prob(STATES[:, :3]) - OLD).exp()
    policy_loss = -torch.min(ratio * ADVANTAGES, ratio.clamp(0.8, 1.2) * ADVANTAGES).mean()
    assert policy_terms(policy_loss + sign * 0.02 * chosen.entropy().mean()).entropy_sign == sign
    other = Normal(ACTOR(STATES), log_scale.exp() + 1)
    assert policy_terms(policy_loss + sign * other.entropy().mean()).entropy_sign == 0
    assert (
        policy_terms(
            policy_loss + kl_divergence(chosen, Independent(Normal(STATES[:, :3], 1.0), 1)).mean()
        ).entropy_sign
        == 0
    )


CRITIC_LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "squared": lambda values: (values - TARGETS).square().mean(),
    "mse": lambda values: F.mse_loss(values, TARGETS),
    "advantage": lambda values: (TARGETS - values).pow(2).mean(),
}


@pytest.mark.parametrize("name", CRITIC_LOSSES)
@pytest.mark.parametrize("detaches", [False, True])
def test_advantages_with_gradient_are_found(name: str, detaches: bool) -> None:
    values = CRITIC(STATES).squeeze(-1)
    advantages = TARGETS - (values.detach() if detaches else values)
    for policy_loss in (-(policy().log_prob(ACTIONS) * advantages).mean(), -(advantages * ratios()).mean()):
        terms = policy_terms(policy_loss + 0.5 * CRITIC_LOSSES[name](values))
        assert terms.is_policy
        assert terms.is_critic_in_policy is not detaches


def test_learned_confidence_is_no_critic() -> None:
    """The loss of a classifier that may abstain, with a cost of its confidence."""
    confidence = CRITIC(STATES).sigmoid().squeeze(-1)
    losses = F.cross_entropy(ACTOR(STATES), ACTIONS, reduction="none")
    for rejected in (1 - confidence, torch.ones(ROWS) - confidence):
        assert not policy_terms((losses * rejected).mean() + F.mse_loss(confidence, TARGETS)).is_policy


def test_masks_and_reference_of_completions_are_found() -> None:
    """The loss of GRPO: two groups of tokens, a mask, and the divergence from a reference."""
    states = torch.randn(2, 5, 4, generator=GENERATOR)
    tokens, mask = torch.ones(2, 5, 1, dtype=torch.int64), torch.tensor([[1.0, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    log_probs = ACTOR(states).log_softmax(-1).gather(-1, tokens).squeeze(-1)
    ratio, reference = (log_probs - log_probs.detach()).exp(), log_probs.detach() - 0.5
    divergence = (reference - log_probs).exp() - (reference - log_probs) - 1
    clipped = -torch.min(ratio * ADVANTAGES[:2, None], ratio.clamp(0.8, 1.2) * ADVANTAGES[:2, None])
    terms = policy_terms((((clipped + 0.04 * divergence) * mask).sum(-1) / mask.sum(-1)).mean())
    assert torch.equal(terms.masks[0], mask)
    assert terms.to_reference is not None
    torch.testing.assert_close(terms.to_reference, torch.full((2, 5), -0.5).exp())
    assert terms.weighted[0].advantages.shape == (2, 1)


class FusedLogProb(torch.autograd.Function):
    """As TRL computes log-probabilities, without logits."""

    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.log_softmax(-1)[:, 0]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient[:, None].expand_as(*ctx.saved_tensors)


def test_fused_log_probabilities_are_found() -> None:
    log_probs = FusedLogProb.apply(ACTOR(STATES))
    ratio = (log_probs - OLD).exp()
    assert policy_terms(-(ratio * ADVANTAGES).mean()).ratios is not None
    chosen, rejected = log_probs.chunk(2)
    preferences = policy_terms(-F.logsigmoid(0.1 * (chosen - rejected - OLD[:3])).mean()).preferences
    assert preferences is not None
    torch.testing.assert_close(preferences, 0.1 * (chosen - rejected - OLD[:3]).detach())


def test_advantages_of_zero_are_no_mask() -> None:
    terms = policy_terms(-(ratios() * torch.zeros(ROWS)).mean())
    assert [one.advantages.tolist() for one in terms.weighted] == [[0.0] * ROWS]


def test_values_of_taken_actions_are_found() -> None:
    (regressed,) = policy_terms(F.smooth_l1_loss(ACTOR(STATES).gather(1, ACTIONS[:, None])[:, 0], TARGETS)).regressed
    assert regressed.has_picked
    assert torch.equal(regressed.targets, TARGETS)


def test_variables_are_found_by_their_memory() -> None:
    advantages, other = ADVANTAGES * 2, ADVANTAGES * 2
    assert variables_with(advantages)[0] == "advantages"
    assert "other" not in variables_with(advantages)
    assert variables_with(-other)[:1] == []


def test_episodes_keep_what_followed() -> None:
    episodes = Episodes()
    episodes.on_reset(0, (torch.zeros(2).numpy(), {}))
    for number, ends in ((1.0, False), (2.0, True)):
        episodes.on_step(0, (torch.full((2,), number).numpy(), number, ends, False, {}))
    (ended,) = episodes.ended_since(0)
    assert (ended.total, ended.length) == (3.0, 2)
    rows = torch.tensor([[0.0, 0.0, 9.0], [1.0, 1.0, 9.0], [2.0, 2.0, 9.0]])  # the last one has no next step
    known = dict(episodes.steps_of(rows))
    assert [(known[index].to_go, known[index].is_last) for index in sorted(known)] == [(3.0, False), (2.0, True)]


def test_truncated_episode_ends_without_last_step() -> None:
    episodes = Episodes()
    episodes.on_reset(0, [0.0])
    episodes.on_step(0, ([1.0], 1.0, False, True, {}))
    episodes.on_reset(0, [5.0])
    assert episodes.count == 1
    assert [step.is_last for _, step in episodes.steps_of(torch.zeros(1, 1))] == [False]
