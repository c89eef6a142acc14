"""Numbers that trainers of policies report, under common names: reinforcement learning and post-training.

The record keeps the names of the trainers; detectors and pages read them by this table.
"""

import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np

from .history import EMPTY, Curve, History, median_of

FEWEST = 10
"""Points of a curve from which on its course is judged."""
ORIGIN = "reported/"
"""The origin of reported numbers in the record."""
HEALTH = "policy_health"
"""The hook that measures numbers which trainers have not reported."""
MEASURED = {
    f"{HEALTH}/{name}": common
    for name, common in {
        "episode_return": "reward", "kl": "kl", "approx_kl": "approx_kl", "entropy": "entropy",
        "clip_fraction": "clip_fraction", "explained_variance": "explained_variance",
    }.items()
}  # fmt: skip
"""Common names of its numbers."""
COMMON_NAMES: Mapping[str, tuple[str, ...]] = {
    "reward": (
        r"reward", r"rollout/ep_rew_mean", r"(charts/)?episodic_return", r"episode_reward(_mean)?", r"reward_mean",
        r"mean_reward", r"rewards?/mean", r"critic/(score|rewards)/mean", r"objective/(rlhf_reward|scores)",
        r"(ep(isode)?_)?return(_mean)?", r"env_runners/episode_return_mean",
    ),
    "reward_std": (r"reward_std", r"group_reward_std", r"within_group_std"),
    "groups_without_spread": (r"frac_reward_zero_std", r"frac_zero_std", r"groups_without_spread"),
    "chosen_reward": (r"rewards/chosen",),
    "rejected_reward": (r"rewards/rejected",),
    "kl": (r"kl", r"objective/kl", r"kl_ref", r"ref_kl", r"actor/kl_loss", r"kl_to_reference", r"mean_kl"),
    "approx_kl": (
        r"(.*/)?approx_?kl(_avg|_v2)?", r"actor/ppo_kl", r"(.*/)?kl_approx", r"policy_kl", r"(.*/)?old_policy_kl",
    ),
    "entropy": (r"(.*/)?(policy_?)?entropy(_avg|_mean)?", r"objective/entropy", r"entropy/mean", r"actor/entropy_loss"),
    "negative_entropy": (r"entropy_loss",),
    "clip_fraction": (
        r"clip_ratio(/region_mean)?", r"(.*/)?clip_?frac(tion)?(_avg)?", r"actor/pg_clipfrac",
    ),
    "explained_variance": (r"(.*/)?explained_var(iance)?", r"critic/vf_explained_var"),
    "length": (
        r"completions/mean_length", r"completion_length", r"response_length(/mean)?", r"rollout/ep_len_mean",
        r"(charts/)?episodic_length", r"completions/mean_terminated_length",
    ),
    "truncated": (r"completions/clipped_ratio", r"response_length/clip_ratio", r"truncated(_share|_ratio)?"),
    "sampler_gap": (r"sampling/sampling_logp_difference/mean", r"(.*/)?sampler_(trainer_)?gap", r"rollout_corr/kl"),
    "ratio": (r"val/ratio", r"ratio(_mean)?", r"(.*/)?ratio/mean"),
    "advantage_std": (r"advantages?_std", r"advantages?/std"),
}  # fmt: skip
"""Patterns of the trainers' names, without ``train/`` and ``eval/`` before them, by the common name.

Of TRL 1.16 and stable-baselines3 2.9, from what they report; of CleanRL, torchrl and verl, from public code that uses
them.
"""
_PATTERNS = {common: re.compile("|".join(f"(?:{item})" for item in items)) for common, items in COMMON_NAMES.items()}
COURSE = ("reward", "kl", "approx_kl", "entropy", "negative_entropy", "length")
"""The numbers that show the course of a training, most important first."""
LENGTHS_OF_EPISODES = re.compile(r".*(ep_len|episodic_length)")
"""Names of lengths of episodes, which are no completions of a language model."""


@lru_cache(4096)
def common_name(name: str) -> str:
    """Return the common name of a reported number; an empty text if it has none.

    >>> common_name("reported/train/approx_kl"), common_name("reported/objective/kl"), common_name("reported/loss")
    ('approx_kl', 'kl', '')
    """
    if not name.startswith(ORIGIN):
        return MEASURED.get(name, "")
    short = name.removeprefix(ORIGIN).lower()
    for variant in (short, short.removeprefix("train/")):
        for common, pattern in _PATTERNS.items():
            if pattern.fullmatch(variant):
                return common
    return ""


def by_common_name(names: Iterable[str]) -> dict[str, str]:
    """Return the first of these metrics for each common name, a reported one if there is one."""
    found: dict[str, str] = {}
    for name in sorted(names, key=MEASURED.__contains__):
        if common := common_name(name):
            found.setdefault(common, name)
    return found


class PolicyNumbers:
    """The reported numbers of a history by their common names."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._names = by_common_name(history.curves)

    def __contains__(self, common: str) -> bool:
        return common in self._names

    def __bool__(self) -> bool:
        """Return whether this is the training of a policy."""
        return bool({"reward", "chosen_reward", "kl", "approx_kl", "explained_variance"} & self._names.keys())

    def name(self, common: str) -> str:
        """Return the metric with this common name, or the common name itself."""
        return self._names.get(common, common)

    def curve(self, common: str) -> Curve:
        """Return the curve with this common name; an empty one if nothing like it was reported."""
        return self._history.curve(self._names[common]) if common in self._names else EMPTY


def course_of(history: History) -> dict[str, dict[str, object]]:
    """Return the first and last levels of the numbers of a policy, most important first; empty for other trainings."""
    numbers = PolicyNumbers(history)
    if not numbers:
        return {}
    found = {}
    for common in dict.fromkeys((*COURSE, *COMMON_NAMES)):
        if common in numbers:
            curve, sign = numbers.curve(common), -1 if common == "negative_entropy" else 1
            levels = {"start": sign * curve.start_level(), "end": sign * curve.end_level()}
            found[common.removeprefix("negative_")] = {"metric": numbers.name(common), **levels}
    return found


def noise_of(curve: Curve) -> float:
    """Return the usual distance of two neighbouring points, as a standard deviation of the level."""
    steps = np.abs(np.diff(curve.values))
    width = max(5, len(curve) // 10)
    return median_of(steps) / 0.954 / math.sqrt(width) if len(steps) else math.nan


def rise_of(curve: Curve) -> float:
    """Return by how much a curve has risen beyond three times its noise; negative if it has not."""
    if len(curve) < FEWEST:
        return math.nan
    return curve.end_level() - curve.start_level() - 3 * noise_of(curve)
