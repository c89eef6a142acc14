"""Detectors of mistakes in the losses of policies and values, from what the hook ``policy_health`` reads of them."""

from collections.abc import Iterable

import numpy as np

from .. import Evidence, Finding, History, Rule, Threshold
from ..detector import HooklessDetector, RuleValue
from ..history import median_of
from ..policy_numbers import HEALTH


def least(history: History, metric: str) -> RuleValue:
    """Return the least value of all checks, after the first of them, from the first step on."""
    curve = history.curve(metric)
    return RuleValue(float(np.min(curve.values)) if len(curve) >= 3 else 0.0, curve.first_step)


def opposite(history: History, metric: str) -> RuleValue:
    """Return the least value of all checks, after the first of them, with the other sign."""
    curve = history.curve(metric)
    return RuleValue(float(np.min(-curve.values)) if len(curve) >= 3 else 0.0, curve.first_step)


def shown(history: History, metric: str) -> RuleValue:
    """Return 1, from the first of them on, if at least three checks have shown a property; the others know nothing."""
    curve = history.curve(metric)
    step = curve.first_step_where(curve.values > 0)
    return RuleValue(int(np.sum(curve.values > 0) >= 3), step or curve.first_step)


class LossRule(Rule):
    """Finds a mistake in a loss that a single number shows."""

    stage = "set-up"
    needs = ()


class PolicyLossSign(HooklessDetector):
    """Finds a policy loss without its minus sign, which makes good actions less probable.

    Symptom: The reward of a policy does not rise, or falls

    The loss rises with the log-probability of actions with a positive advantage, so that the optimizer makes them less
    probable. Write -(advantage * log_prob).mean(), and -min(...) of the clipped and the other objective.

    Applies to: REINFORCE, A2C, PPO and GRPO; the advantages are those in a variable of that name, or those that fit the
    rewards of an environment of gymnasium

    Source: Williams (1992), REINFORCE; Schulman et al., arXiv 1707.06347, equation 7, is maximised
    """

    name = "policy-loss-sign"
    correlation = Threshold(-0.3, "of advantages and rewards that followed; with the right sign it is 0.2 to 1")
    points = Threshold(4, "few actions correlate by chance")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the loss rises with the log-probability of actions that were better than expected."""
        signs, correlations = (history.curve(f"{HEALTH}/{name}") for name in ("loss_sign", "return_correlation"))
        is_shown = len(signs) >= 2 and bool(np.all(signs.values > 0))
        fits = median_of(correlations.values) if len(correlations) >= self.points else 0.0
        if not (is_shown and fits <= 0) and not fits < self.correlation:
            return
        curve = signs if is_shown else correlations
        yield self.finding(
            "critical",
            curve.first_step,
            "The loss of the policy has the wrong sign: it rises with the log-probability of actions with a positive "
            "advantage, so that training makes good actions less probable"
            + (f" (correlation with the rewards that followed {fits:.2f})." if fits < 0 else "."),
            "Minimise -(advantage * log_prob).mean(), or -torch.min(ratio * advantage, clipped * advantage).mean().",
            Evidence(f"{HEALTH}/{'loss_sign' if is_shown else 'return_correlation'}", curve.last, None, "the opposite"),
            confidence=0.9,
        )


class EntropyBonusSign(LossRule):
    """Finds an entropy bonus that is added to the loss instead of subtracted.

    Symptom: The outputs of a policy become nonsense, longer or alike

    The loss rises with the entropy of the policy, so that exploration is punished. Subtract the bonus from the loss.

    Applies to: losses with the entropy of a categorical or normal distribution

    Source: Mnih et al., arXiv 1602.01783, section 4
    """

    name = "entropy-bonus-sign"
    read = staticmethod(least)
    metric = f"{HEALTH}/entropy_sign"
    why = "The loss rises with the entropy of the policy, so that training makes the policy certain as early as it can."
    remedy = "Subtract the entropy from the loss: loss - coefficient * entropy.mean()."
    usual = "-1"
    confidence = 0.9


class DivergencePenaltySign(LossRule):
    """Finds a penalty of the divergence from a reference that is subtracted from the loss instead of added.

    Symptom: The outputs of a policy become nonsense, longer or alike

    The loss falls with the divergence of the policy from fixed probabilities, so that training drives it away from
    them. Add the penalty to the loss.

    Applies to: losses of policies with the estimates exp(log q - log p) - 1 - log q + log p or (log p - log q)²/2, or
    with the divergence of a categorical distribution from a constant one, or the reverse

    Source: Shao et al., arXiv 2402.03300, equations 3 and 4; Schulman et al., arXiv 1707.06347, equation 8
    """

    name = "divergence-penalty-sign"
    read = staticmethod(opposite)
    metric = f"{HEALTH}/divergence_sign"
    why = (
        "The loss falls with the divergence of the policy from its reference, so that training drives the policy away "
        "from it."
    )
    remedy = "Add the penalty to the loss: loss + beta * divergence.mean()."
    usual = "1"
    confidence = 0.9


class ReturnsThroughEnds(LossRule):
    """Finds returns or advantages that continue through the ends of episodes.

    Symptom: The reward of a policy does not rise, or falls

    The recursion from the next step to this one, such as R = r + gamma * R, does not stop where an episode ends, so
    that actions get the rewards of the episodes after theirs. Multiply what follows by 1 - done.

    Applies to: rollouts of 5 steps or more, at least 17 in all environments, with rewards, ends, and returns or
    advantages (and values, if they are used) in variables of the script, or in attributes or entries of them, under
    usual names

    Source: Sutton and Barto, Reinforcement Learning, section 3.3; Schulman et al., arXiv 1506.02438, equation 16
    """

    name = "returns-through-ends"
    read = staticmethod(shown)
    metric = f"{HEALTH}/returns_through_ends"
    severity = "critical"
    why = (
        "Returns or advantages continue through the ends of episodes: at each end they follow from the next row, which "
        "belongs to another episode."
    )
    remedy = "Multiply the next value, and what the recursion carries, by 1 - done of the step."
    confidence = 0.95


class TrainedReference(LossRule):
    """Finds a teacher or a reference that the loss trains.

    Symptom: The outputs of a policy become nonsense, longer or alike

    The gradient reaches the model that gives the targets, and its weights change: it moves towards the model that
    should learn from it. Compute its outputs under torch.no_grad(), and leave its parameters out of the optimizer.

    Applies to: divergences from a teacher whose parameters nothing else in the loss reaches, preferences as in DPO, and
    ratios to a reference; the two models share no parameters

    Source: Hinton et al., arXiv 1503.02531; Rafailov et al., arXiv 2305.18290
    """

    name = "trained-reference"
    read = staticmethod(least)
    metric = f"{HEALTH}/reference_learns"
    severity = "critical"
    why = (
        "The loss trains the teacher or the reference, too: its gradient reaches the model that gives the targets, and "
        "the weights of this model change."
    )
    remedy = "Compute its outputs under torch.no_grad(), and give the optimizer the parameters of the other model only."
    confidence = 0.9


class AdvantagesOfPairs(LossRule):
    """Finds advantages of all pairs of returns and values.

    Symptom: The reward of a policy does not rise, or falls

    Returns of shape (N,) minus values of shape (N, 1) are N × N numbers, so that each action gets the mean advantage
    of all. Give both the same shape: values.squeeze(-1).

    Applies to: losses of log-probabilities or ratios times advantages

    Source: PyTorch's broadcasting semantics
    """

    name = "advantages-of-pairs"
    metric = f"{HEALTH}/advantages_of_pairs"
    severity = "critical"
    why = (
        "The advantages of N actions are a matrix of N × N pairs, as returns of shape (N,) minus values of shape "
        "(N, 1) give: every action gets the mean advantage of the batch, so that the policy learns nothing."
    )
    remedy = "Give returns and values the same shape before their difference: values.squeeze(-1)."
    confidence = 0.97


class AdvantagesWithGradient(LossRule):
    """Finds advantages through which the loss of the policy trains the critic.

    Symptom: The values of a critic diverge, or stay as they were

    The policy's term is -(log_prob * (returns - values)), and its gradient reaches the values: it moves them by the
    log-probabilities, away from the returns that the value loss teaches. Advantages must be constants.

    Applies to: losses of log-probabilities or ratios times returns - values, with a squared or smooth value loss of the
    same values

    Source: Mnih et al., arXiv 1602.01783, algorithm S3: the policy's gradient is that of the actor's parameters only
    """

    name = "advantages-with-gradient"
    metric = f"{HEALTH}/critic_in_policy_loss"
    why = (
        "The advantages have a gradient: the loss of the policy also trains the critic, and moves its values away from "
        "the returns."
    )
    remedy = "Detach them: advantages = returns - values.detach()."
    confidence = 0.95


class TargetNetworkStuck(HooklessDetector):
    """Finds a target network that is never updated, or always equals the online one.

    Symptom: The values of a critic diverge, or stay as they were

    The targets of values come from a network of the same shape. If it is never updated, they stay those of random
    weights; if it is updated at every step, it has no effect. Copy the weights every few hundred updates, or average
    them with a small factor. A target that copy.copy has made shares the weights: use copy.deepcopy.

    Applies to: DQN and other methods with target networks; networks up to 5 million parameters, and targets that share
    their weights, in variables or attributes of the script with target in their names

    Source: Mnih et al. (2015), Human-level control, algorithm 1; Lillicrap et al., arXiv 1509.02971, tau = 0.001
    """

    name = "target-network-stuck"
    updates = Threshold(300, "updates without any change; usual are 1 to 250, and 2,500 in stable-baselines3")
    checks = Threshold(8, "at which both are equal; a network that is copied now and then differs at most of them")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the target network has never changed, or was never different."""
        ages, distances = (history.curve(f"{HEALTH}/target_network_{name}") for name in ("age", "distance"))
        if len(distances) >= self.checks and not np.any(distances.values):
            what = "The target network equals the online network at every update, so that it has no effect."
        elif len(ages) and ages.last >= self.updates and bool(np.all(ages.values == ages.steps)):
            what = f"The target network was never updated in {int(ages.last)} updates of the online network."
        else:
            return
        yield self.finding(
            "warning",
            ages.first_step,
            what,
            "Create the target by copy.deepcopy, and copy the weights every few hundred updates, or average them: "
            "target = (1 - tau) * target + tau * online.",
            Evidence(f"{HEALTH}/target_network_age", ages.last, self.updates, "1 to 250"),
            Evidence(f"{HEALTH}/target_network_distance", distances.last),
            confidence=0.8,
        )


class TerminalValuesLeak(HooklessDetector):
    """Finds targets of values that continue after the end of an episode.

    Symptom: The values of a critic diverge, or stay as they were

    Nothing follows the last step of an episode, so the target of its value is its reward. The mask of terminated
    episodes is missing: reward + gamma * next_value * (1 - terminated).

    Applies to: environments made by gymnasium.make with observations of numbers that reach the network as they are,
    under loopscope watch

    Source: Sutton and Barto, Reinforcement Learning, section 3.4: the value of terminal states is 0
    """

    name = "terminal-values-leak"
    spread = Threshold(0.25, "of that of all targets; with the mask it is 0")
    points = Threshold(3, "of the newest checks, since the targets of earlier ones may have another scale")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if targets of last steps with equal rewards differ."""
        curve = history.curve(f"{HEALTH}/terminal_spread")
        if len(curve) < self.points or not min(median_of(curve.values), median_of(curve.values[-3:])) > self.spread:
            return
        yield self.finding(
            "critical",
            curve.first_step,
            "The targets of values at the last steps of episodes differ although their rewards are equal: the value of "
            "what would follow is added, so the mask of terminated episodes is missing.",
            "Use reward + gamma * next_value * (1 - terminated).",
            Evidence(f"{HEALTH}/terminal_spread", curve.last, self.spread, "0"),
        )


class SameTransition(LossRule):
    """Finds batches of one transition, repeated.

    Symptom: The values of a critic diverge, or stay as they were

    All observations of a batch are equal, at every step: the replay buffer returns one transition again and again.
    Check the indices that are drawn, and that stored arrays are copies: env.step may return the same array.

    Applies to: values that are learned from observations by layers

    Source: Mnih et al. (2015), Human-level control: transitions are drawn uniformly from the memory
    """

    name = "same-transition"
    read = staticmethod(least)
    metric = f"{HEALTH}/same_rows_fraction"
    above = "share"
    share = Threshold(0.999, "of the rows at all checks; environments with few states repeat some")
    severity = "critical"
    why = "All observations of a batch are the same, at every step: the values are learned from single transitions."
    remedy = "Draw indices of the whole replay buffer, and store copies of observations."
    usual = "below 0.2"
    confidence = 0.95


class AdvantageIsLength(HooklessDetector):
    """Finds advantages that are the lengths of completions.

    Symptom: The outputs of a policy become nonsense, longer or alike

    In every batch, longer completions have the higher advantages, so that the reward is the length, or a count that
    rises with it. Look at a few completions, and normalise the reward by length.

    Applies to: losses with a mask of completions, from their graph

    Source: Singhal et al., arXiv 2310.03716, on length correlations in RLHF
    """

    name = "advantage-is-length"
    correlation = Threshold(0.9, "of advantages and lengths in a batch; by chance 0 ± 0.5")
    points = Threshold(5, "batches of a few completions correlate by chance")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if advantages follow lengths in most batches."""
        curve = history.curve(f"{HEALTH}/length_correlation")
        if len(curve) < self.points or not median_of(curve.values) > self.correlation:
            return
        yield self.finding(
            "warning",
            curve.first_step,
            f"In most batches the advantages follow the lengths of the completions (correlation "
            f"{curve.median:.2f}): the reward may be the length.",
            "Read a few completions; normalise the reward by length, or penalise lengths above a limit.",
            Evidence(f"{HEALTH}/length_correlation", curve.last, self.correlation, "-0.5 to 0.5"),
            confidence=0.8,
        )
