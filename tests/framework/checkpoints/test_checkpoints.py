"""Durable checkpoints: a resumed run equals the uninterrupted run, byte for byte."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loopscope.checkpoints import load_checkpoint, open_checkpoint, save_checkpoint
from loopscope.checkpoints.format import write_checkpoint
from loopscope.engine import HookManager
from loopscope.errors import UsageError
from loopscope.loops import epoch_loop, step_loop
from loopscope.state import TrainingState, seed_everything, without_on_demand
from loopscope.training import TrainingTask
from torch import nn

from tests.support import CASES, LOOPS, STEPS_PER_EPOCH, Case, Saving, build, differences

EPOCHS = 4
HALF = 2


class NoisyModel(nn.Module):
    """A model that draws from every global generator in training, including an odd number of Gaussians."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        noise = 0.0
        if self.training:
            noise = random.gauss(0, 0.1) + random.random() + np.random.standard_normal() + np.random.rand()
        return self.inner(inputs) * (1 + noise)


def noisy_build(case: Case, seed: int = 3) -> tuple[TrainingTask, TrainingState]:
    """Build a run whose result depends on every generator."""
    length = EPOCHS * (STEPS_PER_EPOCH if case.loop == "step" else 1)
    task, state = build(case, length=length)
    task.model = state.model = NoisyModel(state.model)
    seed_everything(seed)
    np.random.standard_normal()  # leaves a Gaussian in the cache
    random.gauss(0, 1)
    return task, state


def run(task: TrainingTask, state: TrainingState, case: Case, path: Path | None = None) -> dict[str, int]:
    """Train to the end, with checkpoints half way and at the end if ``path`` is given, and return the final digest."""
    manager = HookManager([], task, state, loop=case.loop)
    every = HALF * (STEPS_PER_EPOCH if case.loop == "step" else 1) if path is not None else 0

    def checkpoint() -> None:
        save_checkpoint(
            path.with_suffix(f".{state.loop.step}"), state, manager.hooks.state_dict(), manager.isolation.run_streams
        )

    loop = epoch_loop if case.loop == "epoch" else step_loop
    loop(task, manager, pauses=Saving(manager, every, checkpoint))
    return without_on_demand(state.digest())


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_resumed_run_matches_uninterrupted_run(case: Case, tmp_path: Path) -> None:
    """Saving changes no byte, and a fresh build that loads the checkpoint ends with the same bytes."""
    plain = run(*noisy_build(case), case)
    saved = run(*noisy_build(case), case, tmp_path / "run")
    assert not differences(plain, saved), "saving changed the run"
    task, state = noisy_build(case, seed=99)
    load_checkpoint(tmp_path / f"run.{HALF * STEPS_PER_EPOCH}", state)
    assert state.loop.step == HALF * STEPS_PER_EPOCH
    assert not differences(plain, run(task, state, case))


@pytest.mark.parametrize("loop", LOOPS)
def test_checkpoint_stores_streams_of_the_run(loop: str, tmp_path: Path) -> None:
    """A checkpoint written in an isolated call stores the random streams of the run, not the isolated ones."""
    case = Case("batchnorm_mlp", "adamw_fused", loop)
    task, state = noisy_build(case)
    before = without_on_demand(state.digest())
    manager = HookManager([], task, state, loop=loop)
    path = tmp_path / "a"
    manager.run_isolated("checkpoint", lambda: save_checkpoint(path, state, {}, manager.isolation.run_streams))
    _, other = noisy_build(case, seed=5)
    load_checkpoint(path, other)
    assert not differences(before, without_on_demand(other.digest()))


def test_hook_states_are_restored(tmp_path: Path) -> None:
    """Tensors, lists, numbers and None in the state of a hook survive a checkpoint."""
    _, state = build(Case())
    states = {"mine": {"sum": torch.ones(2), "names": ["a"], "count": 3, "none": None}}
    save_checkpoint(tmp_path / "a", state, states, state.streams.save())
    found = load_checkpoint(tmp_path / "a", build(Case())[1])
    assert torch.equal(found["mine"].pop("sum"), torch.ones(2))
    assert found == {"mine": {"names": ["a"], "count": 3, "none": None}}


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the content of a checkpoint, and write it again with a correct manifest."""
    checkpoint = open_checkpoint(folder)
    content = checkpoint.content()
    change(content)
    write_checkpoint(folder, content, {"step": checkpoint.step, "score": None})


@pytest.mark.parametrize(
    "damage",
    [{"parameters": [1, 2]}, {"optimizer": {"state": {}, "param_groups": []}}, {"extras": {}}, {"kinds": None}],
    ids=str,
)
def test_malformed_checkpoint_content_is_refused(damage: dict[str, Any], tmp_path: Path) -> None:
    """Content of the wrong shape raises a UsageError of one sentence."""
    _, state = build(Case())
    save_checkpoint(tmp_path / "a", state, {}, state.streams.save())
    rewritten(tmp_path / "a", lambda content: content["state"].update(damage))
    other = "was written for another optimizer: the parameters of its groups differ"
    fit = rf"a (does not fit this run: \w+Error: .*|{other})\.$"
    with pytest.raises(UsageError, match=fit):
        load_checkpoint(tmp_path / "a", build(Case())[1])


def test_wrong_generator_state_size_is_refused(tmp_path: Path) -> None:
    """NumPy copies generator states without a check, so a size other than 2500 bytes raises a UsageError."""
    _, state = build(Case())
    save_checkpoint(tmp_path / "a", state, {}, state.streams.save())
    rewritten(
        tmp_path / "a",
        lambda content: content["state"]["generators"].update(numpy=torch.zeros(9000, dtype=torch.uint8)),
    )
    with pytest.raises(UsageError, match="has 9000 bytes instead of 2500"):
        load_checkpoint(tmp_path / "a", build(Case())[1])


def test_gradients_modes_and_flags_are_restored(tmp_path: Path) -> None:
    """Gradients, missing gradients, training modes and requires_grad survive a checkpoint."""
    _, state = build(Case())
    first, *others = state.model.parameters()
    first.grad, others[0].grad = torch.full_like(first, 0.5), None
    others[1].requires_grad_(False)
    state.model[1].eval()
    save_checkpoint(tmp_path / "a", state, {}, state.streams.save())
    _, fresh = build(Case())
    load_checkpoint(tmp_path / "a", fresh)
    first, *others = fresh.model.parameters()
    assert torch.equal(first.grad, torch.full_like(first, 0.5))
    assert others[0].grad is None
    assert not others[1].requires_grad
    assert (fresh.model.training, fresh.model[1].training) == (True, False)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case("transformer"), "written for another model: its parameters differ"),
        (Case("batchnorm_mlp", "sgd_momentum"), "with the optimizer AdamW, but this one is SGD"),
    ],
)
def test_checkpoint_of_another_build_is_refused(case: Case, words: str, tmp_path: Path) -> None:
    """The error reports that the model or the optimizer differs."""
    task, state = build(Case())
    epoch_loop(task, HookManager([], task, state))
    save_checkpoint(tmp_path / "a", state, {}, state.streams.save())
    _, other = build(case)
    with pytest.raises(UsageError, match=words):
        load_checkpoint(tmp_path / "a", other)


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    for name, change in (("dtype", nn.Module.double), ("wider", lambda model: model.append(nn.Linear(7, 7)))):
        _, state = build(Case())
        save_checkpoint(tmp_path / "a", state, {}, state.streams.save())
        change(state.model)
        before = state.digest()
        with pytest.raises(UsageError, match="written for another model"):
            load_checkpoint(tmp_path / "a", state)
        assert state.digest() == before, name


def test_scheduler_in_only_one_run_is_refused(tmp_path: Path) -> None:
    _, state = build(Case())
    save_checkpoint(tmp_path / "a", state, {}, state.streams.save())
    _, other = build(Case())
    other.scheduler = None
    with pytest.raises(UsageError, match="with the scheduler CosineAnnealingLR, but this one is none"):
        load_checkpoint(tmp_path / "a", other)
