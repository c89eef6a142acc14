"""Hooks attached to trainers that resume checkpoints made without them: the record has the trainer's step numbers."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from loopscope.integrations import attach

from tests.framework.integrations import hf_trainers, test_lightning
from tests.framework.integrations.hf_trainers import attached, same, traced, trainer
from tests.framework.integrations.test_lightning import fit
from tests.support import SpyHook
from tests.support.cases import some_of

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


def position_spy() -> SpyHook:
    """Return an observer of the position of every step."""
    return SpyHook(lambda ctx: {"epoch": ctx.epoch, "index": -1 if ctx.batch_idx is None else ctx.batch_idx})


def positions(folder: Path) -> dict[int, Any]:
    """Return the epoch and the index of each step, by number."""
    found: dict[int, Any] = {}
    (record,) = (path for path in folder.glob("*.jsonl") if path.name not in ("alerts.jsonl", "digests.jsonl"))
    for line in record.read_text().splitlines():
        row = json.loads(line)
        values = {name: row.get(f"spy/{name}") for name in ("epoch", "index")}
        if row["hook_point"] == "POST_STEP":
            steps = values["epoch"]["steps"]
            found |= {step: [values[name]["values"][at] for name in values] for at, step in enumerate(steps)}
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "within an epoch": {"save_steps": 3},
    "at the end of an epoch": {"save_steps": 7},
    "accumulation": {"save_steps": 3, "gradient_accumulation_steps": 2},
    "a number of steps": {"save_steps": 4, "max_steps": 10},
    "the data again": {"save_steps": 3, "ignore_data_skip": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["epoch", pytest.param("step", marks=pytest.mark.slow)])
@pytest.mark.parametrize("settings", some_of(SETTINGS, 3))
def test_resumed_steps_have_the_numbers_of_trainer(tmp_path: Path, settings: str, loop: str) -> None:
    """The positions are those of a run with hooks from the start, and the hooks leave the resumed training as it is."""
    options = SETTINGS[settings] | {"save_strategy": "steps"}
    plain = trainer(tmp_path / "plain", **options)
    plain.train()
    first = options["save_steps"]
    point = str(tmp_path / f"plain/checkpoint-{first}")
    resume = lambda made: made.train(resume_from_checkpoint=point)
    bare = traced(tmp_path / "bare", train=resume, **options)
    made = trainer(tmp_path / "resumed", trace := hf_trainers.Trace(), **options)
    attached(made, [position_spy()], out=tmp_path / "run", loop=loop)
    resume(made)
    assert same((trace.steps, bare[1]), bare)
    assert [*positions(tmp_path / "run")] == [*range(first + 1, made.state.global_step + 1)]
    if not options.get("ignore_data_skip"):
        whole = trainer(tmp_path / "whole", **options)
        attached(whole, [position_spy()], out=tmp_path / "all", loop=loop)
        whole.train()
        assert positions(tmp_path / "run").items() <= positions(tmp_path / "all").items()


@pytest.mark.slow
@pytest.mark.guarantee("resumed-runs-are-identical")
@pytest.mark.parametrize("steps", [3, pytest.param(7, marks=pytest.mark.slow)])
def test_resumed_hooks_have_the_positions_of_uninterrupted_ones(tmp_path: Path, steps: int) -> None:
    """The state of the hooks is in the checkpoint; the epoch after the resumed one starts at its first batch again."""
    options = {"save_strategy": "steps", "save_steps": steps}
    made = trainer(tmp_path, **options)
    scope = attached(made, [position_spy()])
    made.train()
    expected = positions(scope.folder)
    made = trainer(tmp_path, **options)
    scope = attached(made, [position_spy()])
    made.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{steps}"))
    assert positions(scope.folder) == expected


@pytest.mark.slow
def test_training_without_a_step_left_completes_its_record(tmp_path: Path) -> None:
    """A run that was killed after its last checkpoint has a summary and equal rows once it is resumed."""
    options = {"save_strategy": "steps", "save_steps": 7}
    made = trainer(tmp_path, **options)
    scope = attached(made, [position_spy()])
    made.train()
    (record,) = (path for path in scope.folder.glob("*.jsonl") if path.name not in ("alerts.jsonl", "digests.jsonl"))
    expected = record.read_bytes()
    (scope.folder / "summary.json").unlink()
    made = trainer(tmp_path, **options)
    attached(made, [position_spy()])
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-14"))
    assert json.loads((scope.folder / "summary.json").read_text())["status"] == "completed"
    assert record.read_bytes() == expected


@pytest.mark.slow
def test_checkpoint_of_other_hooks_continues_the_record(tmp_path: Path) -> None:
    """The new hook starts at the step after the checkpoint, in the record of the first run."""
    options = {"save_strategy": "steps", "save_steps": 3}
    made = trainer(tmp_path, **options)
    attached(made, ["norms"])
    made.train()
    made = trainer(tmp_path, **options)
    scope = attached(made, [position_spy()])
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [*positions(scope.folder)] == [*range(4, 15)]


@pytest.mark.slow
def test_second_training_of_a_trainer_is_recorded(tmp_path: Path) -> None:
    """After attaching again, the second call of train starts at step 1 in another folder, with only the new hooks."""
    made, spies = trainer(tmp_path, num_train_epochs=1), [position_spy(), position_spy()]
    scopes = []
    for spy in spies:
        scopes.append(attached(made, [spy]))
        made.train()
    assert scopes[0].folder != scopes[1].folder
    assert all([*positions(scope.folder)] == [*range(1, 8)] for scope in scopes)
    assert len(spies[0].seen) == len(spies[1].seen)


FITS: dict[str, dict[str, Any]] = {
    "at the end of an epoch": {"every": {"every_n_epochs": 1}},
    "within an epoch": {"every": {"every_n_train_steps": 2}},
    "accumulation": {"every": {"every_n_train_steps": 2}, "accumulate_grad_batches": 2},
    "a number of steps": {"every": {"every_n_train_steps": 6}, "max_epochs": -1, "max_steps": 9},
}


@pytest.mark.some_rows(2)
@pytest.mark.parametrize("settings", some_of(FITS, 3))
def test_resumed_fit_has_the_numbers_of_lightning(tmp_path: Path, settings: str) -> None:
    """The checkpoint was made without hooks."""
    options = dict(FITS[settings])
    saver = ModelCheckpoint(tmp_path / "kept", "{step}", save_top_k=-1, **options.pop("every"))
    fit(tmp_path / "plain", callbacks=[saver], enable_checkpointing=True, **options)
    path = min((tmp_path / "kept").iterdir(), key=lambda path: int(path.stem.partition("=")[2]))
    first = int(path.stem.partition("=")[2])
    bare, *_ = fit(tmp_path / "bare", ckpt=path, **options)
    found, _, made = fit(tmp_path, [position_spy()], ckpt=path, **options)
    assert found == bare
    assert [*positions(tmp_path / "run")] == [*range(first + 1, made.global_step + 1)]
    fit(tmp_path / "whole", [position_spy()], **options)
    assert positions(tmp_path / "run").items() <= positions(tmp_path / "whole/run").items()


def test_second_fit_of_a_trainer_is_recorded(tmp_path: Path) -> None:
    """Lightning continues its step numbers; without another attach the fit has a separate numbered run."""
    _, _, made = fit(tmp_path, [position_spy()], max_epochs=1)
    module, data = made.lightning_module, partial(test_lightning.batches, shuffle=True)
    made.fit_loop.max_epochs = 2
    attach(made, hooks=[position_spy()], out=tmp_path / "second", display="none")
    made.fit(module, data())
    assert [[*positions(tmp_path / name)] for name in ("run", "second")] == [[*range(1, 6)], [*range(6, 11)]]
    made.fit_loop.max_epochs = 3
    made.fit(module, data())
    assert [*positions(tmp_path / "second_2")] == [*range(11, 16)]
