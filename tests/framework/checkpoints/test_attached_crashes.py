"""Attached loops that are killed and started again end with the bytes and the rows of the uninterrupted loop."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.framework.checkpoints.attached_crash_runs import LOOPS, AttachedCase, outcome_of, run, start
from tests.framework.checkpoints.crash_runs import PLACES, Kill

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory):
    """Return the case of a loop, its uninterrupted run done once."""
    cases: dict[str, AttachedCase] = {}

    def of(loop: str) -> AttachedCase:
        if loop not in cases:
            cases[loop] = AttachedCase.of(loop, tmp_path_factory.mktemp("whole") / "run")
        return cases[loop]

    return of


@pytest.mark.guarantee("resumed-runs-are-identical")
def test_killed_loop_matches_uninterrupted_loop(case_of, tmp_path: Path) -> None:
    """A custom loop is killed within a row and before its checkpoint gets its name."""
    case = case_of("custom loop")
    assert {"weights.pt", "run/run.csv", "run/run.jsonl"} <= case.expected.files.keys()
    kills = [Kill("a row half written", 4), Kill("a whole file before it gets its name", 3)]
    assert case.killed(tmp_path / "run", kills) == 2
    assert outcome_of(tmp_path / "run").differing_entries(case.expected) == []


@pytest.mark.guarantee("resumed-runs-are-identical")
@pytest.mark.slow
@pytest.mark.trainer
@pytest.mark.parametrize("loop", LOOPS)
def test_loop_killed_anywhere_matches_uninterrupted_loop(loop: str, case_of, tmp_path: Path) -> None:
    """Each loop is killed twice, at places that cover all places which it reaches."""
    case, chance, deaths = case_of(loop), random.Random(loop), 0
    reached = [place for place in PLACES if case.counts.get(place)]
    for number, place in enumerate(reached):
        other = chance.choice(reached)
        kills = [Kill(place, chance.randint(1, case.counts[place])), Kill(other, chance.randint(1, 3))]
        died = case.killed(tmp_path / str(number), kills)
        assert died >= 1, kills
        assert outcome_of(tmp_path / str(number)).differing_entries(case.expected) == [], kills
        deaths += died
    print(f"{loop}: {deaths} kills at {len(reached)} places, all equal")  # noqa: T201 - for the record


@pytest.mark.guarantee("resumed-runs-are-identical")
@pytest.mark.slow
@pytest.mark.trainer
@pytest.mark.parametrize("loop", LOOPS)
def test_randomly_killed_loop_matches_uninterrupted_loop(loop: str, case_of, tmp_path: Path) -> None:
    """SIGKILL is sent to the process group at six random times."""
    case, chance, folder = case_of(loop), random.Random(loop), tmp_path / "run"
    begin = time.monotonic()
    assert run(loop, tmp_path / "timed") == 0
    whole, died = time.monotonic() - begin, 0
    while died < 6:
        process = start(loop, folder)
        process.join(whole * chance.uniform(0.05, 0.6))
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        died += process.exitcode == -signal.SIGKILL
        if process.exitcode == 0:
            folder = tmp_path / f"run {died}"
    assert run(loop, folder) == 0, folder.with_suffix(".log").read_text()
    assert outcome_of(folder).differing_entries(case.expected) == []
