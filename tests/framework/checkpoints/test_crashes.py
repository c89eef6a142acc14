"""Runs that are killed anywhere and resumed end with the bytes and the rows of the uninterrupted run."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.framework.checkpoints.crash_runs import BOTH_SINKS, PLACES, Case, Kill, outcome, run, start
from tests.support.cases import slow_unless

EPOCHS = """small --epochs 3 --strategy plain clipped --save-checkpoints 1 --checkpoint-every-steps 2
    --keep-checkpoints 1 --hooks norms counterfactual hessian weight_average model_smoothing
    --hook-config model_smoothing.update_interval=2"""
STEPS = """small_steps --epochs 3 --amp fp16 --accumulation-steps 2 --log-every 4 --eval-every 3 --snapshot-every 5
    --checkpoint-every-steps 2 --hooks training_metrics variance path_length weight_average grad_clip lr_probe
    --hook-config variance.window=4"""
SKIPPING = f"{EPOCHS} --hooks norms stumbling counterfactual --on-hook-error skip --hook-config stumbling.at=5"
GROKKING = """mod_arithmetic --p 7 --train-size 20 --test-size 29 --batch-size 5 --epochs 3 --embed-dim 8 --num-heads 2
    --layers 1 --ff-dim 16 --eval-every 2 --snapshot-every 2 --accumulation-steps 2 --strategy stride random
    --save-checkpoints 1 --checkpoint-every-steps 3 --keep-checkpoints 2 --with-hooks full
    --hooks grad_clip model_smoothing counterfactual_validator"""
LANGUAGE = """tied_lm --steps 8 --vocabulary 300 --context 16 --width 16 --layers 1 --heads 2 --batch-size 4
    --evaluation-windows 4 --warmup-steps 1 --sample-tokens 5 --accumulation-steps 2 --log-every 3 --eval-every 4
    --snapshot-every 4 --checkpoint-every-steps 2 --strategy clip_rolling --with-hooks full
    --hooks grad_clip model_smoothing"""
CASES = {"epochs": EPOCHS, "steps": STEPS, "skipping": SKIPPING, "mod_arithmetic": GROKKING, "tied_lm": LANGUAGE}
ALWAYS = {
    "epochs": [
        *[Kill("after an optimizer's step", 5), Kill("state half written", 700)],
        *[Kill("an old checkpoint half removed", 4), Kill("a row half written", 5)],
    ],
    "steps": [Kill("before a checkpoint gets its name", 3), Kill("an intervention before it is rolled back", 1)],
    "skipping": [Kill("after a checkpoint got its name", 6)],
}


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory):
    """Return the case of a name, its uninterrupted run done once."""
    found: dict[str, Case] = {}

    def of(name: str) -> Case:
        if name not in found:
            found[name] = Case.of(CASES[name].split(), tmp_path_factory.mktemp("whole") / name)
        return found[name]

    return of


@pytest.mark.guarantee("resumed-runs-are-identical")
@pytest.mark.process
@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_unless(name == "epochs")) for name in ALWAYS])
def test_repeatedly_killed_run_matches_uninterrupted_run(name, case_of, tmp_path: Path) -> None:
    """After each kill the run is resumed; all files and records agree at the end."""
    case = case_of(name)
    assert case.killed(tmp_path / "run", ALWAYS[name], by_folder=name == "steps") == len(ALWAYS[name])
    assert outcome(tmp_path / "run").differing_entries(case.expected) == []


@pytest.mark.process
def test_comparison_detects_a_different_seed(case_of, tmp_path: Path) -> None:
    """Records, weights, optimizer moments and generators all differ between two seeds."""
    case = case_of("epochs")
    assert run(["run", *case.words, "--seed", "1", "--output-dir", str(tmp_path / "run")], tmp_path / "run.log") == 0
    differing_names = outcome(tmp_path / "run").differing_entries(case.expected)
    moment = "optimizer/state/0.weight/exp_avg"
    for part in (".csv", ".jsonl", "_final.pt", "parameters/0.weight", moment, "generators/torch"):
        assert any(part in name for name in differing_names), part


def chains(name: str, case: Case) -> Iterator[list[Kill]]:
    """Yield for places that a case reaches a chain of two kills, the first of them at a random visit there.

    For small these are all places, for the experiments with every hook, which take longer, some.
    """
    chance = random.Random(name)
    reached = [place for place in PLACES if case.counts.get(place)]
    for place in chance.sample(reached, 8) if "full" in case.words else reached:
        other = chance.choice(reached)
        first = Kill(place, chance.randint(1, case.counts[place]))
        yield [first, Kill(other, chance.randint(1, 1 + case.counts[other] // 4))]


@pytest.mark.guarantee("resumed-runs-are-identical")
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_run_killed_anywhere_matches_uninterrupted_run(name, case_of, tmp_path: Path) -> None:
    """Each run is killed twice, at places that cover all places which the case reaches."""
    case, deaths, places = case_of(name), 0, []
    for number, kills in enumerate(chains(name, case)):
        died = case.killed(tmp_path / str(number), kills, by_folder=name in ("steps", "tied_lm") and number % 2 == 1)
        assert died >= 1, kills
        assert outcome(tmp_path / str(number)).differing_entries(case.expected) == [], kills
        deaths, places = deaths + died, [*places, *[kill.place for kill in kills[:died]]]
    print(f"{name}: {deaths} kills at {len(set(places))} places, all equal")  # noqa: T201 - for the record


@pytest.mark.slow
@pytest.mark.parametrize("name", ["epochs", "steps", "mod_arithmetic"])
def test_randomly_killed_run_matches_uninterrupted_run(name, case_of, tmp_path: Path) -> None:
    """SIGKILL is sent to the process group at six random times."""
    case, chance, folder, log = case_of(name), random.Random(name), tmp_path / "run", tmp_path / "run.log"
    words = ["run", *case.words, "--output-dir", str(folder)]
    begin = time.monotonic()
    assert run(words, log) == 0
    whole, died, finished = time.monotonic() - begin, 0, True
    while died < 6:
        if finished:
            shutil.rmtree(folder)
        process = start(words if finished else [*words, "--resume"], log)
        process.join(whole * chance.uniform(0.05, 0.7))
        if process.exitcode is None and process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), log.read_text()
        finished = process.exitcode == 0
        died += not finished
    assert run([*words, "--resume"], log) == 0, log.read_text()
    assert outcome(folder).differing_entries(case.expected) == []


@pytest.mark.slow
def test_killed_command_resumes_from_its_folder(tmp_path: Path) -> None:
    """Kill loopscope run after a checkpoint; loopscope resume then reaches the result of an uninterrupted run."""
    words = [*LANGUAGE.replace("--steps 8", "--steps 60").split(), *BOTH_SINKS]
    command = [sys.executable, "-m", "loopscope"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*command, "run", *words, "--output-dir", str(whole)], check=True)
    with subprocess.Popen([*command, "run", *words, "--output-dir", str(killed)], start_new_session=True) as process:
        while not list(killed.glob("*/*/checkpoints/step_000000010")):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    assert not list(killed.glob("*/*/summary.json"))
    subprocess.run([*command, "resume", str(killed / "tied_lm/clip_rolling")], check=True)
    assert outcome(killed).differing_entries(outcome(whole)) == []
