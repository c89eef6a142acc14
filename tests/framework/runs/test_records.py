"""Files in the folder of a run, and the truth of their content."""

import json
import math
import platform
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loopscope import training_hooks
from loopscope.durable_files import save_tensors, write_atomically, write_json
from loopscope.errors import LoopscopeError, UsageError
from loopscope.hooks import HookPoint, InterventionHook, StatePart
from loopscope.runs import RunFolder, build_run
from loopscope.runs.summaries import model_size
from torch import nn

from tests.framework.runs.small_experiment import (
    BATCH,
    ROWS,
    STEPS_PER_EPOCH,
    Small,
    SmallConfig,
    contents,
    read_json,
    registered,
    session,
    train,
)

assert training_hooks.__all__


def record(folder: Path) -> RunFolder:
    return RunFolder(folder / "small/plain", "plain")


# The summary


def test_the_summary_counts_epochs_steps_and_parameters(tmp_path: Path) -> None:
    summary = train(tmp_path, epochs=3)
    assert (summary["experiment"], summary["strategy"], summary["seed"]) == ("small", "plain", 0)
    assert (summary["status"], summary["error"], summary["hook_errors"]) == ("completed", None, [])
    assert (summary["epochs"], summary["steps"]) == (3, 3 * STEPS_PER_EPOCH)
    parameters = (4 * 8 + 8) + 2 * 8 + (8 * 2 + 2)
    assert summary["model"] == {"parameters": parameters, "trainable_parameters": parameters, "bytes": 4 * parameters}
    assert summary["output_dir"] == str(tmp_path / "small/plain")
    assert read_json(tmp_path / "small/plain/summary.json") == json.loads(json.dumps(summary))


def test_model_size_counts_frozen_parameters_separately() -> None:
    """The number of bytes follows the dtype of each parameter."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1).double())
    model[0].requires_grad_(False)
    assert model_size(model) == {"parameters": 11, "trainable_parameters": 3, "bytes": 8 * 4 + 3 * 8}


def test_evaluations_match_initial_and_final_weights(tmp_path: Path) -> None:
    """The summary also contains their differences."""
    summary = train(tmp_path, epochs=2, eval_every=2)
    runner = Small(SmallConfig(epochs=2, eval_every=2))
    model = build_run(runner, "plain")[0].model.eval()
    with torch.no_grad():
        assert summary["initial"] == runner.evaluate(model)
        model.load_state_dict(torch.load(tmp_path / "small/plain/plain_final.pt", weights_only=True))
        assert summary["final"] == runner.evaluate(model)
    assert set(summary["final"]) == {"val_acc", "val_loss"}
    for name, delta in summary["deltas"].items():
        assert delta == summary["final"][name] - summary["initial"][name]


def test_final_evaluation_includes_last_commit(tmp_path: Path) -> None:
    """A commit at the last SNAPSHOT changes the final evaluation."""

    class Zeroer(InterventionHook):
        """Sets every parameter to zero after every epoch."""

        name = "zeroer"
        hook_points = {HookPoint.SNAPSHOT}
        commits = {StatePart.PARAMETERS}

        def intervene(self, run_ctx: Any, model_ctx: Any) -> dict[str, float]:
            zeros = {name: torch.zeros_like(value) for name, value in model_ctx.model.named_parameters()}
            model_ctx.blend_parameters(zeros, 1.0)
            return {}

        def describe_metrics(self) -> list[Any]:
            return []

    with registered(Zeroer):
        summary = train(tmp_path, hooks=["zeroer"])
    assert summary["final"]["val_loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_training_loss_is_mean_of_last_epoch(tmp_path: Path) -> None:
    """The summary contains the last loss of the record."""
    summary = train(tmp_path, hooks=["training_metrics"])
    lines = (tmp_path / "small/plain/plain.jsonl").read_text().splitlines()
    assert summary["training_loss"] == json.loads(lines[-1])["training_metrics/loss"]


def test_target_is_reached_at_first_good_epoch(tmp_path: Path) -> None:
    """The run stops there, and the summary records the epoch and the step."""

    class Eager(Small):
        name = "eager"
        grades = iter([0.1, 0.2, 0.6, 0.4, 0.9, 0.9])

        def evaluate(self, model: nn.Module) -> dict[str, float]:
            return {"val_acc": next(self.grades)}

        def should_stop(self, evaluation: Any) -> bool:
            return evaluation["val_acc"] >= self.config.target_acc

    summary = train(tmp_path, runner=Eager, epochs=9, target_acc=0.5)
    assert summary["target_reached"] == {"epoch": 1, "step": 2 * STEPS_PER_EPOCH}
    assert (summary["epochs"], summary["initial"], summary["final"]) == (2, {"val_acc": 0.1}, {"val_acc": 0.4})


def test_a_target_that_was_not_reached_is_null(tmp_path: Path) -> None:
    assert train(tmp_path)["target_reached"] is None


def test_seconds_match_elapsed_time(tmp_path: Path) -> None:
    class Slow(Small):
        name = "slow"

        def evaluate(self, model: nn.Module) -> dict[str, float]:
            time.sleep(0.05)
            return super().evaluate(model)

    begin = time.perf_counter()
    summary = train(tmp_path, runner=Slow, epochs=2)
    seconds = summary["seconds"]
    assert 2 * 0.05 <= seconds["training"] <= seconds["total"] - 2 * 0.05 <= time.perf_counter() - begin
    assert summary["steps_per_second"] == summary["steps"] / seconds["training"]


@pytest.mark.longer
def test_the_profile_counts_every_call_of_a_hook(tmp_path: Path) -> None:
    assert "hook_profile" not in train(tmp_path / "bare", hooks=["norms"])
    profile = train(tmp_path, hooks=["norms"], epochs=4, profile_hooks=True)["hook_profile"]
    assert profile["norms"]["calls"] >= 4
    assert all(entry["seconds"] > 0 for entry in profile.values())


def test_nan_numpy_and_tensor_numbers_are_recorded(tmp_path: Path) -> None:
    class Odd(Small):
        name = "odd"

        def evaluate(self, model: nn.Module) -> dict[str, float]:
            return {"nan": math.nan, "inf": -math.inf, "numpy": np.float32(0.5), "tensor": torch.tensor(2)}

    train(tmp_path, runner=Odd)
    final = read_json(tmp_path / "odd/plain/summary.json")["final"]
    assert math.isnan(final["nan"])
    assert (final["inf"], final["numpy"], final["tensor"]) == (-math.inf, 0.5, 2)


# The configuration


@pytest.mark.longer
def test_config_records_run_and_environment(tmp_path: Path) -> None:
    """The config contains options, hooks with defaults, treatments, versions and the device."""
    train(tmp_path, hooks=["hessian", "grad_clip"], hook_options={"hessian": {"burst_length": 2}}, ratio=0.5)
    found = read_json(tmp_path / "small/plain/experiment_config.json")
    assert found["config"] == SmallConfig(output_dir=tmp_path, ratio=0.5).as_dict()
    assert list(found["hooks"]) == ["training_metrics", "hessian", "grad_clip"]
    assert found["hooks"]["hessian"]["burst_length"] == 2
    assert found["hooks"]["hessian"]["every_n_steps"] == 1000
    assert found["treatments"] == {"grad_clip": ["gradients"]}
    assert found["run"] == {"on_hook_error": "raise", "audit_hooks": False, "reference": None}
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == platform.python_version()
    assert found["environment"]["threads"] == torch.get_num_threads()
    assert found["environment"]["device"] == "cpu"


def test_the_final_weights_are_a_plain_state_dict(tmp_path: Path) -> None:
    train(tmp_path)
    weights = torch.load(tmp_path / "small/plain/plain_final.pt", weights_only=True)
    model = Small(SmallConfig()).build_model()
    assert list(weights) == list(model.state_dict())
    assert weights["1.num_batches_tracked"] == 2 * STEPS_PER_EPOCH
    assert -(-ROWS // BATCH) == STEPS_PER_EPOCH


# The folder


@pytest.mark.parametrize(
    "name", ["summary.json", "experiment_config.json", "plain.csv", "plain.jsonl", "plain_final.pt"]
)
def test_any_run_file_prevents_overwriting(name: str, tmp_path: Path) -> None:
    """The check itself never changes the file."""
    record(tmp_path).make()
    (tmp_path / "small/plain" / name).write_text("precious")
    with pytest.raises(UsageError, match=r"already holds an? (unf.* run|run whose .*), which is left un"):
        record(tmp_path).refuse_to_overwrite(allowed=False)
    record(tmp_path).refuse_to_overwrite(allowed=True)
    assert (tmp_path / "small/plain" / name).read_text() == "precious"


@pytest.mark.parametrize(("status", "words"), [("completed", "a finished run"), ("failed", "ended as 'failed'")])
def test_refusal_names_status_of_earlier_run(status: str, words: str, tmp_path: Path) -> None:
    record(tmp_path).make()
    (tmp_path / "small/plain/summary.json").write_text(json.dumps({"status": status}))
    with pytest.raises(UsageError, match=words):
        record(tmp_path).refuse_to_overwrite(allowed=False)


@pytest.mark.longer
def test_unrelated_files_are_left_alone(tmp_path: Path) -> None:
    """A user's file does not count as a run and survives overwriting."""
    record(tmp_path).make()
    (tmp_path / "small/plain/notes.txt").write_text("mine")
    train(tmp_path)
    train(tmp_path, overwrite=True)
    assert (tmp_path / "small/plain/notes.txt").read_text() == "mine"


WITHOUT_SINKS = ["experiment_config.json", "files.json", "plain_final.pt", "summary.json"]


@pytest.mark.longer
def test_overwriting_leaves_nothing_of_the_earlier_run(tmp_path: Path) -> None:
    average = {"weight_average": {"interval": 1}}
    train(tmp_path, save_checkpoints=1, hooks=["norms", *average], hook_options=average)
    assert (tmp_path / "small/plain/plain_ema.pt").exists()
    train(tmp_path, overwrite=True, sinks=False, seed=3)
    folder = tmp_path / "small/plain"
    assert sorted(path.name for path in folder.iterdir()) == WITHOUT_SINKS


def test_only_created_folders_are_removed_again(tmp_path: Path) -> None:
    """A folder that existed before the run stays."""
    (tmp_path / "small").mkdir()
    made = record(tmp_path)
    made.make()
    assert (tmp_path / "small/plain").is_dir()
    made.remove_created()
    assert contents(tmp_path) == {"small": b"a folder"}


def test_nonempty_folder_is_not_removed(tmp_path: Path) -> None:
    made = record(tmp_path)
    made.make()
    (tmp_path / "small/note").write_text("x")
    made.remove_created()
    assert contents(tmp_path) == {"small": b"a folder", "small/note": b"x"}


# Atomic writes


def test_failed_write_keeps_only_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def fail(file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(LoopscopeError, match=r"a\.json could not be written: No space left on device\.$"):
        write_atomically(path, fail)
    assert contents(tmp_path) == {"a.json": b"old"}


def test_weights_too_large_for_disk_are_refused(tmp_path: Path) -> None:
    """The error gives the reason in one sentence, and the old file stays."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "a.pt").write_text("old")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        with pytest.raises(LoopscopeError, match=r"a\.pt could not be written: File too large\.$"):
            save_tensors({"weight": torch.zeros(100_000)}, tmp_path / "a.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert contents(tmp_path) == {"a.pt": b"old"}


def test_json_keeps_numbers_and_stringifies_the_rest(tmp_path: Path) -> None:
    """NaN survives, keys and paths become strings, and tuples become lists."""
    write_json(tmp_path / "a.json", {1: [math.nan, 0.1, True, None], "path": Path("a"), "tuple": (1, "b")})
    found = read_json(tmp_path / "a.json")
    assert math.isnan(found["1"].pop(0))
    assert found == {"1": [0.1, True, None], "path": "a", "tuple": [1, "b"]}


def test_a_session_without_sinks_writes_four_files(tmp_path: Path) -> None:
    session(tmp_path, strategies=["plain"], sinks=False).run()
    assert sorted(path.name for path in (tmp_path / "small/plain").iterdir()) == WITHOUT_SINKS
