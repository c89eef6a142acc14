"""Experiments trained again from every checkpoint: all digests and all metrics of hooks are equal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loopscope import experiments, sinks, training_hooks
from loopscope.checkpoints import checkpoints_by_moment, read_digests
from loopscope.cli import main
from loopscope.cli.options import config_of, parse_recorded, run_options, wanted_sinks
from loopscope.runs import Session, StepRange, check_device

from tests.framework.runs.patience import patient_experiments
from tests.framework.runs.test_rewinding import assert_the_same
from tests.support.processes import own_process

FILLED = (experiments, sinks, training_hooks)
pytestmark = pytest.mark.usefixtures("patient_small")
MODULAR = """mod_arithmetic --strategy stride --p 7 --train-size 20 --test-size 29 --batch-size 5 --epochs 3
    --embed-dim 8 --num-heads 2 --layers 1 --ff-dim 16 --eval-every 2 --snapshot-every 2"""
TEXT = """--steps 6 --vocabulary 300 --context 16 --width 16 --layers 1 --heads 2 --batch-size 4 --evaluation-windows 4
    --warmup-steps 1 --sample-tokens 5 --log-every 3 --eval-every 4 --snapshot-every 4"""
WORDS = {
    "mod_arithmetic": MODULAR,
    "tied_lm": f"tied_lm --strategy clip_rolling {TEXT}",
    "lowbit_lm": f"lowbit_lm --strategy fp4_metis {TEXT} --forward-warmup-steps 1 --merge-steps 2 --data TOKENS",
}
KEPT = "--save-checkpoints 1 --checkpoint-every-steps 3 --keep-checkpoints 50 --digest-every 1 --no-console-output"
GROUPS = ("none", "observers", "full")
VARIANTS = {"plain": "", "bf16": "--amp bf16", "accumulation": "--accumulation-steps 2", "jobs": "--seed 0 1 --jobs 2"}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of tokens, which needs no tokenizer."""
    path = tmp_path_factory.mktemp("data") / "tokens.u16"
    np.random.default_rng(1).zipf(1.5, 5000).clip(max=299).astype("<u2").tofile(path)
    return path


def train(folder: Path, name: str, tokens: Path, *more: str) -> Path:
    """Train, and return the folder of the run, or of the last seed's run."""
    words = WORDS[name].replace("TOKENS", str(tokens)).split()
    assert main(["run", *words, *KEPT.split(), *more, "--output-dir", str(folder)]) == 0
    return max(path.parent for path in folder.glob("**/experiment_config.json"))


def again(run: Path, stretch: StepRange, **changes: Any) -> tuple[Path, int, Sequence[int]]:
    """Train a stretch of a run again with the recorded options and some changes."""
    experiment, options = parse_recorded(run)
    options |= {"resume": False, "jobs": None, **changes}
    runner = experiment(config_of(experiment, options), check_device("cpu"))
    return Session(runner, run_options(options), wanted_sinks(options)).rewind(stretch)


def replay(run: Path, groups: Mapping[str, Path]) -> None:
    """Rewind from every checkpoint of a run, with its hooks and with those of each group's run."""
    last = max(step for _, step in read_digests(run))
    begins = sorted({0, *(step for _, step in checkpoints_by_moment(run / "checkpoints"))} - {last})
    for begin in begins:
        path, since, compared = again(run, StepRange(begin + 1, last))
        assert (since, compared) == (begin, [*range(begin + 1, last + 1)])
        assert_the_same(path, run, begin + 1, last)
    for group, expected in groups.items():
        for begin in begins[:: len(begins) // 2]:
            _, since, compared = again(run, StepRange(begin + 1, last), with_hooks=group)
            assert compared == [*range(since + 1, last + 1)]
        path, since, compared = again(run, StepRange(1, last, from_start=True), with_hooks=group)
        assert (since, compared) == (0, [*range(1, last + 1)])
        assert_the_same(path, expected, 1, last)


@pytest.mark.slow
@pytest.mark.guarantee("runs-can-be-verified")
@own_process
def test_replayed_epochs_match_run_with_all_hooks(tmp_path, tokens):
    """A run without hooks is trained again with all hooks, and gives the metrics of a run that had them."""
    with patient_experiments():
        words = ("--epochs", "2", "--with-hooks")
        bare, full = (train(tmp_path / group, "mod_arithmetic", tokens, *words, group) for group in ("none", "full"))
        path, since, compared = again(bare, StepRange(1, 8, from_start=True), with_hooks="full")
        assert (since, compared) == (0, [*range(1, 9)])
        assert_the_same(path, full, 1, 8)
        path, since, compared = again(full, StepRange(7, 8))  # within an epoch
        assert (since, compared) == (6, [7, 8])
        assert_the_same(path, full, 7, 8)


@pytest.mark.slow
@own_process
def test_a_language_model_trained_again_has_its_digests(tmp_path, tokens):
    with patient_experiments():
        run = train(tmp_path, "tied_lm", tokens, "--with-hooks", "none", "--amp", "bf16", "--accumulation-steps", "2")
        assert again(run, StepRange(4, 6), with_hooks="minimal")[1:] == (3, [4, 5, 6])


@pytest.mark.guarantee("runs-can-be-verified")
@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", WORDS)
def test_replay_from_every_checkpoint_matches(name, variant, tmp_path, tokens):
    """Each experiment and variant is replayed with its own hooks and with those of other groups."""
    runs = {
        group: train(tmp_path / group, name, tokens, "--with-hooks", group, *VARIANTS[variant].split())
        for group in GROUPS
    }
    for group, run in runs.items():
        replay(run, runs if group == "none" else {})


@pytest.mark.slow
@pytest.mark.parametrize("name", WORDS)
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_compiled_steps_trained_again_are_the_same(name, tmp_path, tokens):
    run = train(tmp_path, name, tokens, "--with-hooks", "none", "--with-compile")
    replay(run, {})
    last = max(step for _, step in read_digests(run))
    assert again(run, StepRange(1, last), with_hooks="observers")[2] == [*range(1, last + 1)]
