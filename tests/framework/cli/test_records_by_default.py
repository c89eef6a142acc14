"""The record is written by default, does not change the run, and can be disabled."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from loopscope import experiments, sinks, training_hooks
from loopscope.checkpoints import checkpoints_by_moment, differing_entries, open_checkpoint
from loopscope.cli import main
from loopscope.cli.options import parse_run
from loopscope.hooks import MetricSink, SinkRegistry

from tests.framework.runs.small_experiment import Small, SmallConfig, SmallSteps, read_json, registered

assert experiments.__all__
assert sinks.__all__
assert training_hooks.__all__
BARE = ["--no-hook-jsonl"]
EVERY_STEP = ["--checkpoint-every-steps", "1", "--keep-checkpoints", "99", "--snapshot-every", "2", "--log-every", "2"]


@pytest.fixture(autouse=True)
def small():
    with registered(Small, SmallSteps):
        yield


def run(folder: Path, experiment: type[Small], *words: str) -> Path:
    command = ["run", experiment.name, "--strategy", "plain", "--no-console-output", "--output-dir", str(folder)]
    assert main([*command, *words]) == 0
    return folder / experiment.name / "plain"


def recorded(folder: Path) -> dict[str, list[str]]:
    """Return the recorded metrics, by hook point."""
    metrics: dict[str, list[str]] = {}
    for line in (folder / "plain.jsonl").read_text().splitlines():
        fields = json.loads(line)
        metrics[fields["hook_point"]] = sorted(fields.keys() - {"epoch", "step", "hook_point"})
    return metrics


LOSS = ["training_metrics/loss", "training_metrics/lr"]
EVALUATION = ["training_metrics/evaluation", "training_metrics/val_acc"]


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.guarantee("monitoring-changes-nothing")
@pytest.mark.parametrize(
    ("experiment", "points"),
    [(Small, {"POST_EPOCH": sorted(LOSS + EVALUATION)}), (SmallSteps, {"POST_STEP": LOSS, "SNAPSHOT": EVALUATION})],
)
def test_default_record_leaves_run_unchanged(tmp_path, monkeypatch, experiment, points):
    """Recording loss and evaluation changes no bit of the batches, random state, checkpoints or weights."""
    states: list[bytes] = []
    compute_loss = experiment.compute_loss

    def recording_loss(self, model, batch):
        parts = [*model.state_dict().values(), torch.get_rng_state(), *batch]
        states.append(b"".join(part.numpy().tobytes() for part in parts))
        return compute_loss(self, model, batch)

    monkeypatch.setattr(experiment, "compute_loss", recording_loss)
    kept = run(tmp_path / "kept", experiment, *EVERY_STEP)
    recorded_states, states[:] = list(states), []
    bare = run(tmp_path / "bare", experiment, *EVERY_STEP, *BARE)
    assert states == recorded_states
    assert len(states) == 6
    assert recorded(kept) == points
    assert read_json(kept / "experiment_config.json")["hooks"].keys() == {"training_metrics"}
    paths = checkpoints_by_moment(kept / "checkpoints"), checkpoints_by_moment(bare / "checkpoints")
    ends = [open_checkpoint(moments[max(moments)]).content()["state"] for moments in paths]
    assert max(paths[0]) == max(paths[1])
    assert differing_entries({"state": ends[0]}, {"state": ends[1]}) == []
    assert (kept / "plain_final.pt").read_bytes() == (bare / "plain_final.pt").read_bytes()


@pytest.mark.longer
def test_default_record_verifies_without_mentioning_hooks(tmp_path: Path, capfd) -> None:
    """Verifying reports equality, prints nothing to stderr and leaves the summary unchanged."""
    folder = run(tmp_path, Small, "--save-checkpoints", "1")
    before = read_json(folder / "summary.json")
    assert main(["verify", str(folder)]) == 0
    printed = capfd.readouterr()
    assert "plain: identical bit for bit" in printed.out
    assert printed.err == ""
    assert read_json(folder / "summary.json") == before


@pytest.mark.guarantee("monitoring-changes-nothing")
def test_run_without_hooks_or_record_is_bare(tmp_path: Path) -> None:
    """The run writes only config, summary, final weights and their digests, and its config lists no hooks."""
    folder = run(tmp_path, Small, *BARE)
    files = {"experiment_config.json", "summary.json", "files.json", "plain_final.pt"}
    assert {path.name for path in folder.iterdir()} == files
    assert read_json(folder / "experiment_config.json")["hooks"] == {}
    assert read_json(folder / "experiment_config.json")["options"]["hook_jsonl"] is False


@pytest.mark.longer
def test_recording_sink_adds_training_metrics(tmp_path: Path) -> None:
    """A CSV sink adds the training metrics hook, and a console display alone does not."""
    folder = run(tmp_path / "csv", Small, *BARE, "--hook-csv")
    assert "training_metrics/val_acc" in (folder / "plain.csv").read_text()
    assert main(["run", "small", "--strategy", "plain", "--output-dir", str(tmp_path / "shown"), *BARE]) == 0
    assert read_json(tmp_path / "shown/small/plain/experiment_config.json")["hooks"] == {}


@pytest.mark.longer
@pytest.mark.parametrize("in_config", [True, False])
def test_resumed_run_keeps_its_original_sinks(tmp_path: Path, in_config: bool) -> None:
    """If an older config does not mention a sink, the sink starts at the resume, like any new sink."""
    folder = run(tmp_path, Small, *BARE, "--save-checkpoints", "1", "--keep-checkpoints", "1")
    (folder / "plain_final.pt").unlink()
    config = read_json(folder / "experiment_config.json")
    if not in_config:
        del config["options"]["hook_jsonl"]
    (folder / "experiment_config.json").write_text(json.dumps(config))
    assert main(["resume", str(folder)]) == 0
    assert (folder / "plain.jsonl").exists() == (not in_config)
    assert (folder / "plain_final.pt").exists()


@pytest.mark.longer
def test_plugin_sink_may_be_on_by_default(tmp_path: Path, capsys) -> None:
    """The help shows the negated flag, which disables the sink."""

    class Counting(MetricSink):
        """Count the created sinks."""

        name = "counting"
        flag = "--count-metrics"
        default = True
        made = 0

        def __init__(self):
            type(self).made += 1

        def emit(self, metrics, epoch, hook_point, *, step):
            pass

    SinkRegistry.register(Counting)
    try:
        assert main(["run", "small", "--help"]) == 0
        assert "--no-count-metrics" in capsys.readouterr().out
        run(tmp_path / "on", Small)
        made, Counting.made = Counting.made, 0
        run(tmp_path / "off", Small, "--no-count-metrics")
        assert made > Counting.made == 0
    finally:
        SinkRegistry.unregister("counting")


@dataclass(frozen=True, kw_only=True)
class Switches(SmallConfig):
    """Switches that are on.

    Args:
        loud: one.
        quick: another.
        no_quick: a third one.
    """

    loud: bool = True
    quick: bool = True
    no_quick: bool = False


def test_option_named_like_a_negation_keeps_meaning() -> None:
    """--no-quick remains a separate option if no_quick exists, while --no-loud negates loud."""
    options = parse_run(type("Switched", (Small,), {"config_class": Switches}), ["--no-quick", "--no-loud"])
    assert (options["loud"], options["quick"], options["no_quick"]) == (False, True, True)
