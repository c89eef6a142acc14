"""Deterministic mode: active in the run, always restored; rejected operations are reported with advice."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope import training_hooks
from loopscope.cli import main
from loopscope.errors import HookError
from loopscope.hooks import HookPoint, TrainingHook
from loopscope.state.settings import deterministic, explain_nondeterminism, settings
from loopscope.state.settings.flags import CUBLAS, NotDeterministicError

from tests.framework.runs.small_experiment import Small, read_json, registered, session

assert training_hooks.__all__
SEEN: list[Mapping[str, Any]] = []


class Looking(Small):
    """Notes the settings under which it is evaluated."""

    name = "looking"

    def evaluate(self, model: Any) -> dict[str, float]:
        SEEN.append(settings())
        return super().evaluate(model)


class Putting(Small):
    """Uses an operation that has no deterministic implementation, on the CPU too."""

    name = "putting"

    def compute_loss(self, model: Any, batch: Any) -> Any:
        return super().compute_loss(model, batch) + put()


class PuttingHook(TrainingHook):
    """Does so in a hook."""

    name = "putting_hook"
    hook_points = {HookPoint.POST_STEP}

    def compute(self, ctx: Any) -> dict[str, Any]:
        return {"put": put()}

    def describe_metrics(self) -> list[Any]:
        return []


def put() -> torch.Tensor:
    return torch.zeros(3).put_(torch.tensor([1]), torch.tensor([0.0])).sum()


@pytest.fixture(autouse=True)
def entries():
    SEEN.clear()
    with registered(Looking, Putting, PuttingHook, Small):
        yield


def raise_after(on: bool, kept: bool, earlier: bool) -> None:
    assert (on, kept) == (True, earlier)
    raise ZeroDivisionError


EVERYTHING = {"deterministic_algorithms": True, "cudnn_deterministic": True, "cudnn_benchmark": False}


def test_settings_are_active_only_during_run(tmp_path: Path) -> None:
    original = settings()
    assert not original["deterministic_algorithms"]
    session(tmp_path, Looking, strategies=["plain"]).run()
    assert SEEN
    for seen in SEEN:
        assert {**seen, **EVERYTHING, "cublas_workspace": ":4096:8"} == dict(seen)
    assert settings() == original


def test_no_determinism_leaves_settings(tmp_path: Path) -> None:
    original = settings()
    session(tmp_path, Looking, strategies=["plain"], no_determinism=True).run()
    assert SEEN
    assert all(seen == original for seen in SEEN)


@pytest.mark.parametrize("earlier", [False, True])
def test_settings_are_restored_after_an_error(earlier: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier values were either set or unset."""
    monkeypatch.setenv(CUBLAS, ":16:8") if earlier else monkeypatch.delenv(CUBLAS, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", earlier)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    original = settings()
    with pytest.raises(ZeroDivisionError), deterministic(on=True):
        raise_after(torch.are_deterministic_algorithms_enabled(), os.environ[CUBLAS] == ":16:8", earlier)
    assert settings() == original
    assert torch.utils.deterministic.fill_uninitialized_memory == fill


@pytest.mark.longer
@pytest.mark.parametrize("on", [True, False])
def test_settings_are_recorded_with_the_run(on: bool, tmp_path: Path) -> None:
    session(tmp_path, strategies=["plain"], no_determinism=not on).run()
    recorded = read_json(tmp_path / "small/plain/experiment_config.json")["environment"]
    assert recorded["deterministic_algorithms"] is on
    assert recorded["cublas_workspace"] == (":4096:8" if on else os.environ.get(CUBLAS, "not set"))


@pytest.mark.longer
def test_nondeterministic_operation_is_refused_with_remedy(tmp_path, capfd) -> None:
    """The command prints one line that suggests --no-determinism, and the run completes with it."""
    words = ["run", "putting", "--strategy", "plain", "--no-console-output", "--output-dir", str(tmp_path)]
    assert main(words) == 1
    output, errors = capfd.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert "has no deterministic implementation here" in errors
    assert "start the run with --no-determinism" in errors
    assert "NotDeterministicError" in read_json(tmp_path / "putting/plain/summary.json")["error"]
    assert main([*words, "--overwrite", "--no-determinism"]) == 0


def test_nondeterministic_operation_in_hook_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HookError, match=r"'putting_hook' raised .* start the run with no_determinism=True"):
        session(tmp_path, strategies=["plain"], hooks=["putting_hook"]).run()


def test_other_errors_are_unchanged() -> None:
    error = RuntimeError("shapes do not fit")
    assert explain_nondeterminism(error) is error
    with pytest.raises(RuntimeError, match="shapes do not fit") as raised, deterministic(on=True):
        raise error
    assert not isinstance(raised.value, NotDeterministicError)
    assert raised.value.__cause__ is None


@pytest.mark.slow
@pytest.mark.process
def test_compiler_gets_setting_without_early_import() -> None:
    """compile_model imports torch._inductor, which then has the setting inside the context."""
    program = """
import sys, torch
from loopscope.training.compilation import compile_model
from loopscope.state.settings.flags import deterministic
with deterministic(on=True):
    assert torch.are_deterministic_algorithms_enabled()
    assert "torch._inductor" not in sys.modules
    compile_model(torch.nn.Linear(2, 2))
    from torch._inductor import config
    told = hasattr(config, "deterministic")  # the compiler has the setting from torch 2.10 on
    assert not told or config.deterministic
assert not told or not config.deterministic
"""
    subprocess.run([sys.executable, "-c", program], check=True)
