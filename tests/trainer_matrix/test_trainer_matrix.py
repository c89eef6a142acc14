"""Every row of the matrix has the same bytes with hooks and without."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.docs.markdown import ROOT
from tests.trainer_matrix.__main__ import DATA, line
from tests.trainer_matrix.attaching import AttachNothing
from tests.trainer_matrix.digests import Digests, Recorder, digest
from tests.trainer_matrix.outcome import Outcome, compared, first_difference, outcome
from tests.trainer_matrix.row import VARIANTS, Row
from tests.trainer_matrix.table import ROWS
from tests.trainer_matrix.written_table import written_table


@pytest.mark.slow
@pytest.mark.trainer
@pytest.mark.process
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("group", dict.fromkeys(row.group for row in ROWS.values()))
def test_trainings_have_equal_bytes(group: str) -> None:
    """Every trainer and loop of the matrix has the same bytes with hooks and without."""
    # A separate process, because the fork server of other tests has imported loopscope.
    command = [sys.executable, "-m", "tests.trainer_matrix", "--only", f"{group}:"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.process
def test_bare_trainings_run_without_loopscope() -> None:
    """Neither the rows nor the preloaded libraries import it, so a bare training is one without it."""
    program = "import sys, tests.trainer_matrix.table; sys.exit('loopscope' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def digests_of(change: Callable[[nn.Module, int], None]) -> list[Digests]:
    """Train three steps, with a change after each, and return the digests."""
    torch.manual_seed(0)
    recorder = Recorder()
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    AttachNothing(recorder)(model, optimizer)
    for step in range(1, 4):
        model(torch.randn(4, 2)).square().mean().backward()
        optimizer.step()
        change(model, step)
    recorder.finish()
    return recorder.steps


def change_buffer(model: nn.Module, step: int) -> None:
    if step == 2:
        model[1].running_mean[0] += 1e-7


def draw(model: nn.Module, step: int) -> None:
    if step == 2:
        torch.rand(1)


def change_last_bit(model: nn.Module, step: int) -> None:
    if step == 3:
        model[0].weight.data[0, 0] = torch.nextafter(model[0].weight.data[0, 0], torch.tensor(9.0))


@pytest.mark.parametrize(
    ("change", "place", "name"),
    [
        (change_buffer, "at step 3", "1.running_mean"),
        (draw, "at step 3", "random generator of torch"),
        (change_last_bit, "after the training", "0.weight"),
    ],
)
def test_first_difference_names_step_and_tensor(change: Callable[..., None], place: str, name: str) -> None:
    found = first_difference(digests_of(lambda model, step: None), digests_of(change))
    assert found.startswith(place)
    assert name in found or " and " in found


def test_equal_trainings_have_no_difference() -> None:
    steps = digests_of(lambda model, step: None)
    assert len(steps) == 4
    assert first_difference(steps, digests_of(lambda model, step: None)) == ""
    assert first_difference(steps, steps[1:]) != ""


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.zeros(0), torch.ones(3, 2, dtype=torch.bfloat16).T])
def test_digests_read_every_layout(tensor: Tensor) -> None:
    other = tensor.clone()
    assert digest({"a": [tensor]}) == digest({"a": [other]})
    assert digest(tensor) != digest(torch.ones(5))


def result(error: str = "", steps: int = 3, refused: bool = False, hooks: tuple[str, ...] = ("norms",)) -> dict:
    return {"steps": [{}] * steps, "error": error, "is_refused": refused, "hooks": hooks}


@pytest.mark.parametrize(
    ("hooked", "sentence"),
    [
        (result(), "equal"),
        (result("No.", 0, True), "refused: No."),
        (result("No.", 1, True), "fails: after step 1: No."),
        (result("KeyError: 1", 0), "fails: KeyError: 1"),
        (result(steps=2), "differs: 1 steps instead of 2"),
        (result(hooks=()), "fails: no hook has reported"),
    ],
)
def test_outcomes_have_a_sentence(hooked: dict, sentence: str) -> None:
    assert compared(Row("a", "b", print), [result()], [hooked]).sentence == sentence


def test_control_must_differ() -> None:
    """A control is accepted only if it differs, and any other row only if it is equal."""
    kinds, control, other = ("equal", "differs", "refused"), Row("a", "", print, control=True), Row("a", "", print)
    assert [Outcome(control, kind).is_accepted for kind in kinds] == [False, True, False]
    assert [Outcome(other, kind).is_accepted for kind in kinds] == [True, False, False]
    assert Outcome(control, "differs", "at step 1").sentence == "differs, as it must: at step 1"


def test_missing_packages_are_reported() -> None:
    row = Row("a", "b", print, ("no-such-package",))
    assert outcome(row).sentence == "not installed: no-such-package"
    assert line(outcome(row)).startswith("| a: b | no-such-package  |")


def test_some_rows_of_a_table_are_renewed() -> None:
    """The others are kept, in the order of all rows, and the dates are the first and the last one."""
    first, second, third = list(ROWS.values())[:3]
    head = "| configuration | result |\n|---|---|\n"
    lines = {row: (Outcome(row, "equal"), f"| {row.name} | equal |\n") for row in (first, second, third)}
    old = written_table(
        head, [(Outcome(second, "fails"), f"| {second.name} | fails: x |\n"), lines[third]], "1 May 2026"
    )
    assert old.startswith("Trained on 1 May 2026.\n\n2 rows: 1 × fails, 1 × equal.")
    new = written_table(head, [lines[second], lines[first]], "3 May 2026", old)
    assert new.startswith("Trained from 1 May 2026 to 3 May 2026.\n\n3 rows: 3 × equal.")
    assert new.endswith(head + "".join(lines[row][1] for row in (first, second, third)))
    assert written_table(head, lines.values(), "4 May 2026", new).startswith("Trained on 4 May 2026.")


def test_table_has_every_row() -> None:
    """A new row needs ``make matrix ARGS=--write``."""
    text = DATA.read_text(encoding="utf-8")
    assert [name for name in ROWS if f"| {name} |" not in text and f"| {name}, " not in text] == []


@pytest.mark.parametrize(
    "kind", ["PyTorch, loop of epochs", "Hugging Face Trainer", "Lightning Trainer", "TRL SFTTrainer"]
)
def test_every_kind_of_loop_has_every_variant(kind: str) -> None:
    assert {f"{kind}: {variant}" for variant in VARIANTS} <= ROWS.keys()


def test_logs_are_compared_without_times_and_evaluations() -> None:
    """A counter that hooks have moved is a difference; times differ in any two trainings."""
    recorder, log = Recorder(), [{"loss": 1.0, "step": 1, "num_tokens": 8, "train_runtime": 0.1}, {"eval_loss": 2.0}]
    recorder.watch_log(lambda: log)
    recorder.finish()
    other = Recorder()
    other.watch_log(lambda: [{"loss": 1.0, "step": 1, "num_tokens": 9, "train_runtime": 0.2}])
    other.finish()
    assert recorder.steps[-1]["log 0"] == digest([{"loss": 1.0, "step": 1, "num_tokens": 8}])
    assert "log 0" in first_difference(recorder.steps, other.steps)
