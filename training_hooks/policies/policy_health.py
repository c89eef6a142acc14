"""The hook that measures what trainers of policies often do not report."""

import re
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.doctor.senses import (
    EPISODES,
    MOST_PARTS,
    PolicyTerms,
    policy_terms,
    variables_of_callers,
    variables_with,
)
from loopscope.errors import require
from loopscope.hooks import BackwardContext, Metrics
from torch import Tensor

from .policy_measures import Measures, measures_of
from .rollouts import returns_through_ends
from .trained_references import TrainedReferences
from .value_targets import ValueTargets

EARLY_STEPS = (2, 3, 5, 10)
"""Measured steps in addition to one in ``interval``."""
MOST_MISSES = 5
"""Measured steps without a policy or values, after which only one in ten is inspected."""
MOST_SIGN_CHECKS = 5
"""Measured steps at which variables of the script are inspected."""
MOST_ROLLOUT_CHECKS = 20
"""Measured steps at which returns of the script are compared with its rewards."""
LEAST_KNOWN = 16
"""Actions from which their advantages are compared with the rewards that followed."""
NAMES_OF_ADVANTAGES = re.compile(
    r"(.*_)?(adv|advs|advantages?|returns?|rets?|rewards?|rews?|gaes?|deltas?|td_errors?|g|r)(_.*)?", re.IGNORECASE
)
"""Names of variables whose values an action should be made more probable with."""
NAMES_OF_COSTS = re.compile(r".*(neg|cost|loss|minus|regret|penal)", re.IGNORECASE)


@HookRegistry.register
class PolicyHealth(TrainingHook):
    """Measure policies, in reinforcement learning and in the post-training of language models, from their own loss.

    The terms are read from the autograd graph of the loss before the backward pass, without a further pass: ratios of
    PPO and GRPO, log-probabilities times advantages of REINFORCE, preferences of DPO, values and their targets.
    Nothing is reported for other losses, for compiled ones, and in loops that run backward themselves. Under
    ``loopscope watch``, episodes are those of environments made by ``gymnasium.make`` in the process of the training.

    A ratio r is π(a)/π_old(a). Of large batches, entropies are those of about a million logits.

    Assumes that log-probabilities are those of a ``log_softmax``, of ``torch.distributions`` or of a cross-entropy, and
    that a constant of each action multiplies them or their ratios: its advantage.

    Args:
        interval: steps between two measurements; a prime number, so that it shares no period with the updates of a
            rollout.
    """

    name = "policy_health"
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    in_health = True
    metrics = """
        found | 1 if the loss has a policy, or values of states or actions, else 0; not reported at all steps of losses
            without them | {0, 1} | 0: nothing else is reported.
        entropy | mean over rows, or over the tokens of completions, of −Σ_a p_a ln p_a; of normal distributions the sum
            over dimensions of ½ ln 2πe + ln σ | (−∞, ∞) | Falling early while the reward does not rise: the policy has
            stopped exploring.
        entropy_early | the same over the first quarter of the tokens of each completion | [0, ∞) | See entropy_late.
        entropy_late | the same over their last quarter | [0, ∞)
            | Far above entropy_early: completions end in noise. Near 0: they end in repetitions.
        entropy_sign | 1 if the loss rises with the entropy, −1 if it falls; reported for losses with an entropy
            | {−1, 1} | 1: the entropy bonus has the wrong sign, so that exploration is punished.
        divergence_sign | 1 if the loss rises with a divergence of the policy from constant probabilities, −1 if it
            falls; reported for losses with such a penalty | {−1, 1} | −1: the penalty has the wrong sign.
        reference_learns | 1 if a loss with two models, of which one gives targets to the other, has changed the weights
            of both; reported if the gradient reaches both | {0, 1} | 1: the teacher or the reference is trained.
        returns_through_ends | 1 if returns or advantages in variables of the script follow the same recursion at the
            ends of episodes as elsewhere, 0 if not; reported if the recursion is known | {0, 1}
            | 1: the mask of ended episodes is missing.
        approx_kl | mean of r − 1 − ln r, an estimate (k3) of the divergence of the old policy from the new one | [0, ∞)
            | Above 0.05: the updates on one rollout go far. 0 at all steps: the old policy is the new one.
        approx_kl_error | standard error of approx_kl | [0, ∞) | Of the size of approx_kl: take larger batches.
        approx_kl_k1 | mean of −ln r, another estimate | (−∞, ∞) | Negative values are noise.
        ratio_mean | mean of r | [0, ∞) | Should be 1, up to noise. Far from it: old log-probabilities belong to other
            actions.
        ratio_max | max of r | [0, ∞) | Above 10: some actions were nearly impossible for the old policy.
        ratio_low | 0.1 % quantile of r | [0, ∞) | Far below the clipped range: clipping does not hold the policy.
        ratio_high | 99.9 % quantile of r | [0, ∞) | Far above the clipped range, likewise.
        effective_sample_share | (Σ r)² / (n Σ r²) | (0, 1] | Below 0.5: few actions decide the update.
        clip_fraction | share of the r outside of the limits between which the loss clips them | [0, 1]
            | 0.05 to 0.3 are usual. Above 0.5: most ratios have no gradient.
        kl | mean of ρ − 1 − ln ρ with ρ = π_ref(a)/π(a), an estimate (k3) of the divergence from the reference | [0, ∞)
            | 0 at all steps: the reference is the trained model. Growing tenfold: the policy runs away.
        kl_error | standard error of kl | [0, ∞) | Of the size of kl: it says little.
        kl_k1 | mean of −ln ρ, another estimate | (−∞, ∞) | Negative values are noise.
        advantage_mean | mean of the constants that multiply ratios or log-probabilities, as the loss has them
            | (−∞, ∞) | Far from 0 compared with advantage_std: there is no baseline.
        advantage_std | their standard deviation | [0, ∞) | Far from 1: they are not normalised. 0: nothing is learned.
        advantage_zero_fraction | share of them that are exactly 0 | [0, 1]
            | Near 1: all completions of a group get the same reward.
        advantages_of_pairs | 1 if the advantages of N actions are a matrix of N × N pairs; reported only then | {1}
            | Returns of shape (N,) met values of shape (N, 1).
        critic_in_policy_loss | 1 if the gradient of log-probabilities or ratios times returns − values reaches the
            values, which a regression in the same loss learns; reported only then | {1}
            | The advantages are not detached.
        length_correlation | correlation of the advantages with the lengths of the completions | [−1, 1]
            | Near 1 at all steps: the reward is the length.
        loss_sign | 1 if the loss rises with the log-probability of actions with a positive advantage, −1 if it falls;
            reported at the first steps, if a variable of the script shows it | {−1, 1}
            | 1: the actor's loss has the wrong sign.
        return_correlation | correlation of the advantages, with the sign that the loss gives them, with the rewards
            that the environment gave after each action | [−1, 1] | Below 0 at most steps: the loss has the wrong sign.
        explained_variance | 1 − Var(returns − values) / Var(returns), of a value loss of ``mse_loss`` or
            ``smooth_l1_loss`` in the loss of a policy | (−∞, 1]
            | Near 0 after many rollouts: the critic explains nothing.
        preference_margin | mean of the arguments of the log-sigmoid, as in DPO | (−∞, ∞) | Should rise from 0.
        preference_accuracy | share of them above 0 | [0, 1] | Should rise from 0.5.
        preference_zero_fraction | share of them that are exactly 0 | [0, 1]
            | 1 after the first update: the reference is the trained model.
        target_network_age | steps since a network of the same shape as the one that learns values has changed
            | 0, 1, 2, … | The number of all steps: the target network is never updated.
        target_network_distance | ‖θ − θ_target‖ / ‖θ‖ for the nearest of these networks | [0, ∞)
            | 0 at all steps: the target network has no effect.
        terminal_spread | standard deviation of the targets of values for the last steps of episodes with equal rewards
            / that of all targets; from eight such rows on | [0, ∞)
            | Should be 0, since nothing follows. Near 1: the mask of terminated episodes is missing.
        same_rows_fraction | share of the observations of the batch that equal its first one | [0, 1]
            | 1: a replay buffer returns the same transition again and again.
        episode_return | mean sum of rewards of the episodes that have ended since the last measurement | (−∞, ∞)
            | Should rise.
        episode_length | their mean number of steps | [1, ∞) | Compare with the limit of the environment.
    """

    _episodes = Remembered(int, saved=False)
    _measures = Remembered(list[Measures], saved=False)
    _misses = Remembered(int, saved=False)
    _sign_checks = Remembered(int, saved=False)
    _references = Remembered(TrainedReferences, saved=False)
    _rollout_checks = Remembered(int, saved=False)
    _values = Remembered(ValueTargets, saved=False)

    def __init__(self, *, interval: int = 7) -> None:
        require(interval >= 1, f"policy_health.interval is {interval}; it must be at least 1 step.")
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=interval, also=EARLY_STEPS)

    def before_backward(self, ctx: BackwardContext) -> None:
        """Measure the terms of a micro-batch."""
        if not ctx.is_due or not self._is_inspected():
            return
        terms = policy_terms(ctx.loss)
        measures = measures_of(terms) | self._values.measures_of(terms, ctx)
        if terms.is_policy and self._rollout_checks < MOST_ROLLOUT_CHECKS and ctx.index == 0:
            found = returns_through_ends([*variables_of_callers()])
            self._rollout_checks += bool(found)
            measures |= found
        measures |= self._references.measures_of(ctx.loss)
        self._misses = 0 if measures else self._misses + 1
        if terms.weighted:
            measures |= self._sign_measures(terms)
        self._measures = [*(self._measures if ctx.index else ()), {"found": float(bool(measures)), **measures}]

    def _is_inspected(self) -> bool:
        if self._misses < MOST_MISSES:
            return True
        self._misses += 1
        return self._misses % 10 == 0

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return the means over the micro-batches."""
        parts, self._measures = self._measures, []
        names = dict.fromkeys(name for part in parts for name in part)
        metrics: dict[str, Any] = {name: _mean([part[name] for part in parts if name in part]) for name in names}
        ended = EPISODES.ended_since(self._episodes)
        self._episodes = EPISODES.count
        if ended and metrics.get("found"):
            metrics["episode_return"] = sum(one.total for one in ended) / len(ended)
            metrics["episode_length"] = sum(one.length for one in ended) / len(ended)
        return metrics

    def _sign_measures(self, terms: PolicyTerms) -> Measures:
        """Return whether the loss makes actions with high advantages less probable."""
        first = terms.weighted[0]
        found: Measures = {}
        if self._sign_checks < MOST_SIGN_CHECKS and first.sign:
            self._sign_checks += 1
            names = variables_with(first.advantages)
            if any(NAMES_OF_ADVANTAGES.fullmatch(name) and not NAMES_OF_COSTS.match(name) for name in names):
                found["loss_sign"] = float(first.sign)
        return found | return_correlation(terms)


def return_correlation(terms: PolicyTerms) -> Measures:
    """Return the correlation of advantages with the rewards that followed, if the environment is known."""
    signs = {one.sign for one in terms.weighted}
    rows = [one.observations for one in terms.log_probs if one.observations is not None]
    if len(signs) != 1 or 0 in signs or len(rows) != len(terms.log_probs):
        return {}
    first = terms.weighted[0].advantages
    advantages = torch.cat([one.advantages.reshape(-1) for one in terms.weighted]) if first.numel() == 1 else first
    observations, advantages = torch.cat(rows), advantages.reshape(-1)
    if len(advantages) != len(observations) and len(rows) < MOST_PARTS:
        return {}
    known = [(index, step.to_go) for index, step in EPISODES.steps_of(observations[: len(advantages)])]
    if len(known) < LEAST_KNOWN:
        return {}
    indices, rewards = zip(*known, strict=True)
    raised = -signs.pop() * advantages[list(indices)].double()
    pairs = torch.stack([raised, torch.tensor(rewards, dtype=torch.float64)])
    return {"return_correlation": torch.corrcoef(pairs)[0, 1]} if bool((pairs.std(1) > 0).all()) else {}


def _mean(values: list[Tensor | float]) -> Tensor | float:
    return sum(values) / len(values) if len(values) > 1 else values[0]  # type: ignore[arg-type]
