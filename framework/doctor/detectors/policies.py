"""Detectors of policies in reinforcement learning and post-training, from the numbers that their trainers report.

Levels are compared with those at the start of the same run: the median of the first five points, and of the last tenth.
"""

from collections.abc import Iterable

import numpy as np

from .. import Curve, Detector, Evidence, Finding, History, Rule, Threshold
from ..detector import HooklessDetector
from ..history import Floats, median_of
from ..policy_numbers import FEWEST, HEALTH, LENGTHS_OF_EPISODES, MEASURED, PolicyNumbers, noise_of, rise_of

SLOW = 10
"""Times as many rollouts for a critic that is updated once for each."""


class CourseDetector(Detector):
    """Looks for one problem in the course of reported numbers."""

    needs = ()
    waits = True


class HighLevel(Rule):
    """Finds a reported number, ``metric`` by its common name, whose last tenth is above a limit."""

    needs = ()
    waits = True
    confidence = 0.85

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding from five reports on, since the step after which most are above the limit."""
        numbers, limit = PolicyNumbers(history), getattr(self, self.above)
        curve, level = numbers.curve(self.metric), numbers.curve(self.metric).end_level()
        if len(curve) >= 5 and level > limit:
            since = int(curve.steps[_start_of_streak(curve.values > limit)])
            evidence = Evidence(numbers.name(self.metric), curve.last, limit, self.usual)
            why = self.why.format(value=level)
            yield self.finding(self.severity, since, why, self.remedy, evidence, confidence=self.confidence)


class RewardsWithoutSpread(CourseDetector):
    """Finds groups of completions that all get the same reward.

    Symptom: The reward of a policy does not rise, or falls

    The advantage of a completion is its reward minus the mean of its group. If all completions of a prompt get the same
    reward, all advantages are 0, and nothing is learned. Reward part of an answer, use prompts that the model solves
    sometimes, more generations per prompt, or a higher temperature.

    Applies to: GRPO, RLOO and other methods that compare completions of one prompt, from reported numbers

    Source: Shao et al., arXiv 2402.03300, equation 3; Yu et al., arXiv 2503.14476, dynamic sampling
    """

    name = "rewards-without-spread"
    stage = "set-up"
    share = Threshold(0.8, "of the groups; with fewer, the others still teach something")
    points = Threshold(5, "a single batch of prompts may be too easy or too hard")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if most groups of the last batches have one reward, critical if so from the start."""
        numbers = PolicyNumbers(history)
        name, shares = "groups_without_spread", numbers.curve("groups_without_spread").values
        steps = numbers.curve(name).steps
        if name not in numbers and "reward_std" not in numbers:
            name = f"{HEALTH}/advantage_zero_fraction"
            shares, steps = history.curve(name).values, history.curve(name).steps
        elif name not in numbers:
            name = "reward_std"
            shares, steps = (numbers.curve(name).values < 1e-6).astype(float), numbers.curve(name).steps
        if len(shares) < self.points or not median_of(shares[-int(self.points) :]) >= self.share:
            return
        is_from_start = median_of(shares) >= self.share
        reward = numbers.curve("reward")
        # The first report is that of the steps before it.
        since = 1 if is_from_start else int(steps[_start_of_streak(shares >= self.share)])
        average = f" ({reward.last:.3g} on average)" if len(reward) else ""
        has_learned = not is_from_start and reward.end_level() > reward.start_level()
        yield self.finding(
            "critical" if is_from_start else "info" if has_learned else "warning",
            since,
            f"In {float(np.mean(shares[-int(self.points) :])):.0%} of the newest groups all completions get the same "
            f"reward{average}, so their advantages are 0 and nothing is learned from them.",
            "Reward partial success, use prompts that the model solves sometimes, more generations per prompt, or a "
            "higher temperature.",
            Evidence(numbers.name(name), numbers.curve(name).last, self.share, "below 0.5"),
        )


class ReferenceIsTrained(HooklessDetector):
    """Finds a reference model that always equals the trained one.

    Symptom: The KL divergence of a policy is exactly 0

    The reference is the trained model itself, or a copy that is updated at every step. Load it separately, or copy it
    before the training, and leave it out of the optimizer.

    Applies to: KL penalties to a reference, and DPO, from reported numbers, while weights change

    Source: Rafailov et al., arXiv 2305.18290, equation 7
    """

    name = "reference-is-trained"
    points = Threshold(5, "the first updates of a warm-up, or of LoRA, change nothing yet")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if divergences, or chosen and rejected rewards, are 0 at all steps."""
        numbers = PolicyNumbers(history)
        names = ["kl"] if "kl" in numbers else ["chosen_reward", "rejected_reward"]
        curves = [numbers.curve(name) for name in names]
        zeros = history.curve(f"{HEALTH}/preference_zero_fraction")
        updates = history.update_ratios
        if names != ["kl"] and not min(map(len, curves)) and len(zeros):
            curves = [Curve.of_points(list(zeros.steps), list(1 - zeros.values))]
        if min(map(len, curves)) < self.points or not (len(updates) and updates.last > 0):
            return
        if any(np.any(curve.values != 0) for curve in curves):
            return
        what = "KL divergence to the reference" if names == ["kl"] else "reward of chosen and rejected answers"
        yield self.finding(
            "critical",
            curves[0].first_step,
            f"The {what} is exactly 0 in all {len(curves[0])} reports although the weights change: the reference is "
            "the trained model itself.",
            "Load the reference separately or copy it before the training, with requires_grad_(False).",
            Evidence(numbers.name(names[0]), 0.0, None, "above 0 after the first updates"),
            confidence=0.9,
        )


class EntropyCollapse(CourseDetector):
    """Finds a policy that has stopped exploring.

    Symptom: The outputs of a policy become nonsense, longer or alike

    The entropy falls to a small part of its value at the start while the reward does not rise any more. Raise the
    coefficient of the entropy or the upper clip range, lower the learning rate, or add a KL penalty. With a rising
    reward it is a remark, since a policy that has solved its task is certain.

    Applies to: discrete actions and tokens, from reported numbers

    Source: Cui et al., arXiv 2505.22617; Yu et al., arXiv 2503.14476, section 3.1
    """

    name = "entropy-collapse"
    stage = "outputs"
    share = Threshold(0.2, "of the entropy at the start; policies that learn keep 0.3 to 0.9 of it")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the entropy is far below that at the start."""
        numbers = PolicyNumbers(history)
        name, sign = ("entropy", 1.0) if "entropy" in numbers else ("negative_entropy", -1.0)
        curve = numbers.curve(name)
        entropy = sign * curve.values
        # Models that imitate given texts, in SFT and DPO, become certain by learning.
        explores = any(common in numbers for common in ("reward", "approx_kl", "clip_fraction"))
        if len(entropy) < FEWEST or not explores:
            return
        start, end = median_of(entropy[:5]), median_of(entropy[-max(5, len(entropy) // 10) :])
        if not (start > 0 and 0 <= end < self.share * start):
            return
        reward = numbers.curve("reward")
        is_solved = rise_of(reward) > 0 and reward.end_level() >= float(np.max(_smooth(reward.values))) - noise_of(
            reward
        )
        yield self.finding(
            "info" if is_solved else "warning",
            int(curve.steps[_start_of_streak(entropy < self.share * start)]),
            f"The entropy of the policy has fallen from {start:.3g} to {end:.3g}"
            + (", while the reward has risen." if is_solved else ": it has stopped exploring."),
            "Raise the entropy coefficient or the upper clip range, lower the learning rate, or add a KL penalty.",
            Evidence(numbers.name(name), curve.last, sign * self.share * start, f"about {sign * start:.3g} at first"),
            confidence=0.8,
        )


class KLRunaway(CourseDetector):
    """Finds a policy that moves away without limit: from its reference, or in one update.

    Symptom: The outputs of a policy become nonsense, longer or alike

    Usual causes are a learning rate that is too high, a KL coefficient that is too small, too many updates on one
    rollout, and a reward that other texts than the intended ones earn.

    Applies to: reported KL divergences

    Source: Schulman, Approximating KL Divergence (2020); stable-baselines3 stops at 1.5 × target_kl
    """

    name = "kl-runaway"
    stage = "outputs"
    growth = Threshold(10.0, "times the level of the second tenth of the run; divergences of sound runs level off")
    reference = Threshold(1.0, "nats; smaller divergences from the reference are usual")
    update = Threshold(0.2, "nats in one rollout's updates; usual targets are 0.01 to 0.05")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if a divergence is many times its earlier level, and large."""
        numbers = PolicyNumbers(history)
        for name, least, what in (
            ("kl", self.reference, "from its reference"),
            ("approx_kl", self.update, "in the updates on one rollout"),
        ):
            curve = numbers.curve(name)
            if len(curve) < FEWEST:
                continue
            values, tenth = curve.values, max(2, len(curve) // 10)
            before, now = median_of(values[tenth : 2 * tenth + 1]), curve.end_level()
            is_high_throughout = name == "approx_kl" and curve.median > self.update
            if not (now > least and (now > self.growth * max(before, 0.0) or is_high_throughout)):
                continue
            yield self.finding(
                "warning",
                int(curve.steps[_start_of_streak(values > least)]),
                f"The policy moves away: its KL divergence {what} has grown from {before:.2g} to {now:.3g}."
                if not is_high_throughout
                else f"The policy jumps: its KL divergence {what} is {curve.median:.2g}, many times the usual 0.01.",
                "Lower the learning rate, raise the KL coefficient, take fewer updates per rollout, or set a target "
                "KL divergence.",
                Evidence(numbers.name(name), curve.last, least, "0.01 to 0.05 in an update, levelling off"),
                confidence=0.8,
            )
            return


class RatiosClipped(HighLevel):
    """Finds updates most of whose ratios are clipped.

    Symptom: The reward of a policy does not rise, or falls

    A clipped ratio has no gradient. If most are clipped, the policy has moved too far for its data: lower the learning
    rate, or take fewer epochs or larger batches per rollout.

    Applies to: PPO, GRPO and others with clipped ratios, from reported numbers

    Source: Schulman et al., arXiv 1707.06347, equation 7
    """

    name = "ratios-clipped"
    stage = "updates"
    share = Threshold(0.5, "of the ratios; 0.05 to 0.3 are usual")
    metric, above, usual = "clip_fraction", "share", "0.05 to 0.3"
    why = (
        "{value:.0%} of the ratios of new to old probabilities are clipped, and have no gradient: the updates on one "
        "rollout move the policy too far."
    )
    remedy = "Lower the learning rate, or take fewer epochs or larger batches per rollout."


class RewardIsLength(CourseDetector):
    """Finds a reward that follows the length of completions.

    Symptom: The outputs of a policy become nonsense, longer or alike

    The reward rises with the length of completions, step by step: it may reward length itself. Look at a few
    completions, normalise the reward by length, or penalise what exceeds a limit.

    Applies to: completions of language models, from reported numbers; not the lengths of episodes

    Source: Singhal et al., arXiv 2310.03716, on length correlations in RLHF
    """

    name = "reward-is-length"
    stage = "set-up"
    correlation = Threshold(0.9, "of reward and length over the reports; 0.2 to 0.7 where both only rise")
    growth = Threshold(1.3, "times the length at the start; smaller changes may be chance")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if reward and length rise together."""
        numbers = PolicyNumbers(history)
        reward, length = numbers.curve("reward"), numbers.curve("length")
        if LENGTHS_OF_EPISODES.match(numbers.name("length")) or len(reward) != len(length) or len(reward) < FEWEST:
            return
        correlation = _correlation(reward.values, length.values)
        has_grown = length.end_level() > self.growth * length.start_level()
        if correlation > self.correlation and has_grown and rise_of(reward) > 0:
            yield self.finding(
                "warning",
                reward.first_step,
                f"Suspicious: the reward follows the length of the completions (correlation {correlation:.2f}), which "
                f"has grown from {length.start_level():.3g} to {length.end_level():.3g}: the reward may be the length.",
                "Read a few completions; normalise the reward by length, or penalise lengths above a limit.",
                Evidence(numbers.name("length"), length.last, None, "not like the reward"),
                Evidence(numbers.name("reward"), reward.last),
                confidence=0.75,
            )


class CompletionsTruncated(CourseDetector):
    """Finds completions that nearly all end at the longest allowed length.

    Symptom: The outputs of a policy become nonsense, longer or alike

    Truncated completions have no end, so that their rewards say little and the model learns not to end. Allow longer
    completions, mask or penalise truncated ones, and check that the model knows its end-of-text token.

    Applies to: post-training with generation, from reported numbers

    Source: Yu et al., arXiv 2503.14476, overlong filtering
    """

    name = "completions-truncated"
    stage = "set-up"
    share = Threshold(0.9, "of the completions; below it, enough of them end by themselves")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if nearly all of the newest completions are truncated."""
        numbers = PolicyNumbers(history)
        curve = numbers.curve("truncated")
        if len(curve) < FEWEST or not curve.end_level() >= self.share:
            return
        start, rise = curve.start_level(), rise_of(numbers.curve("reward"))
        has_risen = start < self.share
        hacking = " while the reward rises, which is a sign of reward hacking" if has_risen and rise > 0 else ""
        yield self.finding(
            "warning",
            int(curve.steps[_start_of_streak(curve.values >= self.share)]) if has_risen else curve.first_step,
            f"{curve.end_level():.0%} of the completions are truncated at the longest allowed length"
            + (f", {start:.0%} at the start{hacking}." if has_risen else ", from the start."),
            "Allow longer completions, mask or penalise truncated ones, and check the end-of-text token.",
            Evidence(numbers.name("truncated"), curve.last, self.share, "below 0.3"),
            confidence=0.75,
        )


class DeadCritic(CourseDetector):
    """Finds a critic that explains nothing of the returns.

    Symptom: The reward of a policy does not rise, or falls

    The explained variance of the returns stays at 0 or below, as that of a constant. Usual causes are returns of a
    large scale, a learning rate or a coefficient of the value loss that is too small, a shared network that the loss of
    the policy dominates, and values that are computed from other observations than the returns.

    Applies to: actor-critic methods that report the explained variance

    Source: explained variance 1 − Var(returns − values) / Var(returns), as in stable-baselines3
    """

    name = "critic-explains-nothing"
    stage = "outputs"
    points = Threshold(15, "rollouts; critics of sound runs need up to ten to begin")
    share = Threshold(0.1, "of the variance; sound critics explain 0.5 to 1 later")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the explained variance stays near 0 or below in the later half."""
        numbers = PolicyNumbers(history)
        curve = numbers.curve("explained_variance")
        later = curve.values[len(curve) // 2 :]
        # With one update per rollout, at which the new policy is the old one, a critic needs more of them; the hook
        # measures several times in a rollout.
        is_slow = "approx_kl" in numbers and float(np.max(np.abs(numbers.curve("approx_kl").values), initial=0)) < 1e-9
        is_measured = numbers.name("explained_variance") in MEASURED
        least = self.points * (SLOW if is_slow or is_measured else 1)
        if len(curve) >= least and median_of(later) <= self.share and curve.end_level() <= self.share:
            yield self.finding(
                "warning",
                curve.first_step,
                f"The critic explains nothing: the explained variance of the returns is {curve.end_level():.2g} after "
                f"{len(curve)} {'measurements' if is_measured else 'rollouts'}, so advantages are little more than "
                "returns.",
                "Normalise returns or rewards, raise the coefficient of the value loss, or give the critic "
                "separate layers.",
                Evidence(numbers.name("explained_variance"), curve.last, self.share, "0.5 to 1"),
                confidence=0.75,
            )


class RewardFalls(CourseDetector):
    """Finds a policy that becomes worse than it was at the start.

    Symptom: The reward of a policy does not rise, or falls

    A policy that follows its gradient in the wrong direction, such as without the minus sign before the objective,
    earns less than a random one. Otherwise its learning rate is too high, or the advantages belong to other actions.

    Applies to: policy-gradient methods that report a reward

    Source: Williams (1992), REINFORCE: the loss is minus the log-probability times the advantage
    """

    name = "reward-falls"
    stage = "outputs"
    fall = Threshold(4.0, "times the noise of the reward; sound runs vary by 1 to 2")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the reward stays below that of the start, by more than its noise."""
        numbers = PolicyNumbers(history)
        reward = numbers.curve("reward")
        is_gradient = any(name in numbers for name in ("entropy", "negative_entropy", "approx_kl", "clip_fraction"))
        if not is_gradient or len(reward) < FEWEST:
            return
        smooth, noise = _smooth(reward.values), noise_of(reward)
        start, end = reward.start_level(), reward.end_level()
        if end < start - self.fall * noise and end <= float(np.min(smooth)) + noise and noise > 0:
            yield self.finding(
                "warning",
                reward.first_step,
                f"The reward has fallen from {start:.3g} to {end:.3g}, and the policy is worse than at the start.",
                "Check the sign of the policy's loss, -(advantage * log_prob), and that advantages belong to their "
                "actions; then lower the learning rate.",
                Evidence(numbers.name("reward"), reward.last, start - self.fall * noise, f"above {start:.3g}"),
                confidence=0.7,
            )


class SamplerDiffers(HighLevel):
    """Finds a sampler whose probabilities differ from those of the trainer.

    Symptom: The outputs of a policy become nonsense, longer or alike

    The log-probabilities of the sampler and of the trainer differ by more than rounding: other weights (not
    synchronised), another precision, another temperature, or another template.

    Applies to: trainers that report the difference of both log-probabilities, as TRL with vLLM does

    Source: Yao et al. (2025), Your Efficient RL Framework Secretly Brings You Off-Policy RL Training
    """

    name = "sampler-differs"
    stage = "set-up"
    gap = Threshold(0.1, "nats per token on average; bfloat16 gives 0.005 to 0.03")
    metric, above, usual = "sampler_gap", "gap", "0.005 to 0.03"
    why = (
        "Sampler and trainer differ by {value:.2g} nats per token on average, more than rounding gives: the "
        "completions come from another policy than the one that is trained."
    )
    remedy = "Synchronise the sampler's weights after each update, and compare precision, temperature and template."


class RatioAlwaysOne(HooklessDetector):
    """Reports updates in which the new policy is the old one.

    Symptom: The KL divergence of a policy is exactly 0

    Each rollout is used for one update only, so that the ratio of new to old probabilities is 1 and clipping does
    nothing. That is right for one update per rollout; otherwise the old probabilities are computed again after each.

    Applies to: PPO-like methods that report the divergence from the old policy

    Source: Schulman et al., arXiv 1707.06347, equation 6
    """

    name = "ratio-always-one"

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a remark if the divergence from the old policy is 0 in all reports."""
        numbers = PolicyNumbers(history)
        curve = numbers.curve("approx_kl")
        if numbers.name("approx_kl") in MEASURED:  # also of trainers with one update per rollout by default
            return
        if len(curve) >= 5 and float(np.max(np.abs(curve.values))) < 1e-9:
            yield self.finding(
                "info",
                curve.first_step,
                "The new policy always equals the old one, so the ratio is 1 and clipping has no effect.",
                "With several updates per rollout, compute the old log-probabilities once, before the first of them.",
                Evidence(numbers.name("approx_kl"), curve.last, None, "above 0 after the first update"),
                confidence=0.9,
            )


def _start_of_streak(is_met: "np.typing.NDArray[np.bool_]") -> int:
    """Return the first index from which on a condition is met in at least half of the points up to the end.

    >>> _start_of_streak(np.array([True, False, False, False, True, True, False, True]))
    4
    """
    later = np.cumsum(is_met[::-1])[::-1] / np.arange(len(is_met), 0, -1)
    indices = np.flatnonzero(is_met)
    streaks = [index for index in indices if np.all(later[index:] >= 0.5)]
    return int(streaks[0]) if streaks else len(is_met) - 1


def _smooth(values: Floats) -> Floats:
    """Return means over windows of a tenth of the points, at least five."""
    width = min(len(values), max(5, len(values) // 10))
    return np.convolve(values, np.ones(width) / width, "valid") if width else values


def _correlation(one: Floats, other: Floats) -> float:
    """Return the correlation of two curves; 0 for constant ones."""
    if not (np.all(np.isfinite(one)) and np.all(np.isfinite(other))) or np.ptp(one) == 0 or np.ptp(other) == 0:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])
