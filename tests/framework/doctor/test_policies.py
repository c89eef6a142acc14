"""Findings about policies, from what their trainers report: planted courses, and those of sound trainings."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from loopscope.doctor import DetectorRegistry, History, diagnose
from loopscope.doctor.detectors import policies, policy_losses
from loopscope.doctor.policy_numbers import COMMON_NAMES, by_common_name, common_name, course_of

POINTS = 60
RNG = np.random.default_rng(0)
Course = Mapping[str, Sequence[float]]


def line(first: float, last: float, noise: float = 0.0) -> list[float]:
    """Return a line with noise."""
    return list(np.linspace(first, last, POINTS) + noise * RNG.standard_normal(POINTS))


def history_of(course: Course) -> History:
    """Return the history of a training that has reported these numbers."""
    history = History()
    for step in range(POINTS):
        reported = {name if "health/" in name else f"reported/{name}": values[step] for name, values in course.items()}
        loss = 0.1 + 0.01 * RNG.standard_normal()
        history.add(step + 1, {**reported, "training_checks/update_ratio": 0.01, "training_checks/loss": loss})
    return history


def severe(course: Course) -> set[str]:
    """Return the ids of findings above remarks."""
    return {finding.id for finding in diagnose(history_of(course)).at_least("warning")}


REWARD = line(0, 3, 0.2)
FAULTS: dict[str, Course] = {
    "rewards-without-spread": {"reward": line(0, 0), "frac_reward_zero_std": line(0.95, 1.0)},
    "reference-is-trained": {"reward": REWARD, "kl": line(0, 0)},
    "entropy-collapse": {"reward": line(1, 1, 0.1), "entropy": list(3 * np.exp(-np.arange(POINTS) / 8))},
    "kl-runaway": {"reward": REWARD, "kl": list(0.01 * 1.12 ** np.arange(POINTS))},
    "ratios-clipped": {"rollout/ep_rew_mean": line(20, 20, 1), "train/clip_fraction": line(0.6, 0.8, 0.02)},
    "reward-is-length": {"reward": line(4, 60, 3), "completions/mean_length": line(4, 60, 0.1)},
    "completions-truncated": {"reward": REWARD, "completions/clipped_ratio": line(0.96, 1.0)},
    "critic-explains-nothing": {"rollout/ep_rew_mean": line(20, 25, 2), "train/explained_variance": line(0, 0, 0.02)},
    "reward-falls": {"rollout/ep_rew_mean": line(22, 9, 0.5), "train/entropy_loss": line(-0.69, -0.5)},
    "policy-loss-sign": {"policy_health/return_correlation": line(-0.9, -0.7, 0.1)},
    "entropy-bonus-sign": {"policy_health/entropy_sign": line(1, 1)},
    "divergence-penalty-sign": {"policy_health/divergence_sign": line(-1, -1)},
    # as long as the critic gives values near 0, nothing is carried beyond an end
    "returns-through-ends": {"policy_health/returns_through_ends": [0.0] * 5 + [1.0] * (POINTS - 5)},
    "trained-reference": {"policy_health/reference_learns": line(1, 1)},
    "advantages-of-pairs": {"policy_health/advantages_of_pairs": line(1, 1)},
    "advantages-with-gradient": {"policy_health/critic_in_policy_loss": line(1, 1)},
    "target-network-stuck": {
        "policy_health/target_network_age": line(1, 60),
        "policy_health/target_network_distance": line(0, 0),
    },
    "terminal-values-leak": {"policy_health/terminal_spread": line(0.8, 1.1, 0.1)},
    "same-transition": {"policy_health/same_rows_fraction": line(1, 1)},
    "advantage-is-length": {"policy_health/length_correlation": line(0.97, 0.99, 0.01)},
    "sampler-differs": {"reward": REWARD, "sampling/sampling_logp_difference/mean": line(0.3, 0.4, 0.02)},
}
SOUND: dict[str, Course] = {
    "solved": {"rollout/ep_rew_mean": line(20, 500, 5), "train/entropy_loss": list(-np.exp(-np.arange(POINTS) / 9))},
    "grpo": {
        "reward": line(0.2, 0.8, 0.05), "frac_reward_zero_std": line(0.2, 0.5, 0.1), "entropy": line(1.2, 0.5, 0.05),
        "kl": line(0.0, 0.06, 0.005), "completions/mean_length": line(120, 130, 9),
        "clip_ratio/region_mean": line(0, 0), "completions/clipped_ratio": line(0.3, 0.1, 0.05),
    },
    "ppo": {
        "rollout/ep_rew_mean": line(20, 180, 4), "rollout/ep_len_mean": line(20, 180, 4),
        "train/approx_kl": line(0.01, 0.008, 0.002), "train/clip_fraction": line(0.1, 0.12, 0.02),
        "train/explained_variance": line(-0.1, 0.8, 0.05), "train/entropy_loss": line(-0.69, -0.4),
    },
    "dqn": {"rollout/ep_rew_mean": line(22, 9.5, 0.5), "rollout/exploration_rate": line(1, 0.05)},
    "continuous": {"rollout/ep_rew_mean": line(-1500, -200, 40), "train/entropy_loss": line(-1.4, 0.6)},
    "plain": {
        "policy_health/episode_return": line(20, 180, 4), "policy_health/entropy": line(0.69, 0.3, 0.02),
        "policy_health/divergence_sign": line(1, 1), "policy_health/returns_through_ends": line(0, 0),
        "policy_health/reference_learns": line(0, 0),
        "policy_health/entropy_sign": line(-1, -1), "policy_health/loss_sign": line(-1, -1),
        "policy_health/return_correlation": line(0.6, 0.2, 0.2), "policy_health/advantage_zero_fraction": line(0, 0),
        "policy_health/terminal_spread": line(0, 0), "policy_health/target_network_age": line(1, 30, 9),
        "policy_health/target_network_distance": line(0, 0.1), "policy_health/same_rows_fraction": line(0.02, 0.02),
        "policy_health/length_correlation": line(0.3, 0.1, 0.4), "policy_health/approx_kl": line(0, 0),
    },
    "critic at its start": {"policy_health/explained_variance": line(0, 0, 0.02)},
    "one update per rollout": {
        "rollout/ep_rew_mean": line(20, 25, 2), "train/explained_variance": line(0, 0, 0.02),
        "train/approx_kl": line(0, 0),
    },
    "sft": {"entropy": line(3, 0.1), "mean_token_accuracy": line(0.2, 0.9)},
    "dpo": {"rewards/chosen": line(0, -1, 0.1), "rewards/rejected": line(0, -3, 0.1)},
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_course_is_found(name: str) -> None:
    assert name in severe(FAULTS[name])


def test_every_detector_has_a_planted_course() -> None:
    names = {one.name for one in DetectorRegistry if one.__module__ in (policies.__name__, policy_losses.__name__)}
    assert names - {*FAULTS} == {"ratio-always-one"}


@pytest.mark.parametrize("name", SOUND)
def test_sound_course_has_no_warning(name: str) -> None:
    assert severe(SOUND[name]) == set()


def test_jump_with_target_network_is_no_finding() -> None:
    """The gradient norm jumps for good where the target network is copied; without one it is a finding."""
    for course, expected in (({}, {"gradient-jump"}), ({"policy_health/target_network_age": 1.0}, set())):
        history = History()
        history.facts["groups"] = [{"optimizer": "Adam"}]
        for step in range(1, 201):
            size = 1.0 if step < 100 else 60.0
            checks = {"training_checks/loss": size, "training_checks/grad_norm": size}
            history.add(step, {**checks, **course})
        assert {finding.id for finding in diagnose(history).findings} & {"gradient-jump"} == expected


def test_large_first_updates_are_remark_if_reward_rises() -> None:
    """The loss of a policy grows with its returns."""
    for rises, severity in ((True, "info"), (False, "critical")):
        history = History()
        for step in range(1, 41):
            checks = {"loss": 10.0 + 10 * step, "update_ratio": 0.6, "update_ratio_median": 0.6}
            reward = {"reported/reward": 10.0 * step if rises else 10.0}
            history.add(step, {f"training_checks/{name}": value for name, value in checks.items()} | reward)
        found = {finding.id: finding.severity for finding in diagnose(history)}
        assert found["learning-rate-too-high"] == severity


def test_values_that_grow_are_no_finding() -> None:
    """The output of a critic grows to the size of the returns; that of another model is a finding."""
    for course, expected in (({}, {"activations-grow"}), ({"policy_health/target_network_age": 1.0}, set())):
        history = History()
        for step in range(1, 401):
            history.add(step, {"training_checks/loss": 1.0, "activations/rms/last": 0.1 + step / 10, **course})
        assert {finding.id for finding in diagnose(history)} & {"activations-grow"} == expected


def test_ratio_of_one_is_remark() -> None:
    course = {"rollout/ep_rew_mean": line(20, 80, 2), "train/approx_kl": line(0, 0)}
    assert [item.id for item in diagnose(history_of(course)) if item.severity == "info"] == ["ratio-always-one"]


def test_equal_rewards_explain_missing_gradients() -> None:
    """What follows from rewards without spread points to them."""
    history = history_of(FAULTS["rewards-without-spread"])
    history.add(POINTS, {"training_checks/never_gradient_count": 3, "training_checks/without_gradient_count": 3})
    assert next(iter(diagnose(history))).id == "rewards-without-spread"


def test_equal_rewards_explain_gradients_of_zero() -> None:
    """Gradients are 0 from step 1 on, and the trainer reports from step 2 on."""
    history = History()
    for step in range(1, 41):
        reported = {"reported/reward": 0.0, "reported/frac_reward_zero_std": 1.0} if step > 1 else {}
        history.add(step, {"training_checks/loss": 0.0, "training_checks/grad_norm": 0.0, **reported})
    assert [finding.id for finding in diagnose(history)][:2] == ["rewards-without-spread", "gradients-all-zero"]


@pytest.mark.parametrize(
    ("name", "common"),
    [
        ("reward", "reward"), ("train/reward", "reward"), ("rollout/ep_rew_mean", "reward"), ("objective/kl", "kl"),
        ("train/approx_kl", "approx_kl"), ("losses/approx_kl", "approx_kl"), ("policy/approxkl_avg", "approx_kl"),
        ("losses/clipfrac", "clip_fraction"), ("policy/entropy_avg", "entropy"), ("losses/entropy", "entropy"),
        ("train/entropy_loss", "negative_entropy"), ("actor/entropy_loss", "entropy"), ("batch/kl_approx", "approx_kl"),
        ("charts/episodic_return", "reward"), ("losses/explained_variance", "explained_variance"),
        ("response_length/clip_ratio", "truncated"), ("loss", ""), ("eval_reward", ""), ("learning_rate", ""),
    ],
)  # fmt: skip
def test_names_of_trainers_have_common_names(name: str, common: str) -> None:
    assert common_name(f"reported/{name}") == common


def test_names_on_page_have_common_names() -> None:
    text = (Path(__file__).parents[3] / "docs/policies.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (`.*) \|$", text, re.M)
    names = {(common, name) for common, cell in rows for name in re.findall(r"`([^`]+)`", cell)}
    assert len(names) > 25
    found = {(common, common_name(f"reported/{name}").removeprefix("negative_")) for common, name in names}
    assert {pair for pair in found if pair[0] != pair[1]} == set()


def test_only_reported_numbers_have_common_names() -> None:
    assert by_common_name(["norms/entropy", "reported/entropy"]) == {"entropy": "reported/entropy"}
    assert {common_name(f"reported/{name}") for name in COMMON_NAMES if name != "rejected_reward"} >= {"kl", "entropy"}


def test_course_starts_with_reward() -> None:
    course = course_of(history_of(SOUND["ppo"]))
    assert list(course)[:4] == ["reward", "approx_kl", "entropy", "length"]
    assert course["entropy"]["start"] == pytest.approx(0.68, abs=0.02)
    assert course_of(history_of({"val_loss": line(1, 0)})) == {}
