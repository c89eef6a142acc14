"""The summary of a scope in a notebook: progress, verdict, findings, and the most relevant numbers."""

from io import StringIO
from pathlib import Path

import loopscope
import torch
from loopscope.doctor import Diagnosis, Finding
from loopscope.integrations.scope_view import MOST_NUMBERS, scope_view
from rich.console import Console
from torch import nn


def shown(view: object, width: int = 100) -> list[str]:
    """Return the lines of what rich shows."""
    console = Console(file=StringIO(), width=width)
    console.print(view)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def finding(name: str, severity: str = "warning") -> Finding:
    return Finding(name, severity, 3, "It is broken, for a reason that fills the line.", "Repair it.")  # type: ignore[arg-type]


def test_view_has_verdict_and_three_findings() -> None:
    names = ("first", "second", "third", "fourth")
    diagnosis = Diagnosis([finding("worst", "critical"), *map(finding, names), finding("remark", "info")])
    lines = shown(scope_view("running", diagnosis, {}))
    assert lines[:3] == [
        "running",
        "1 critical problem and 4 warnings",
        "critical: worst, from step 3 (confidence 90%)",
    ]
    assert sum(": " in line and "(confidence" in line for line in lines) == 3
    assert lines[-1] == "3 further findings: print(scope.diagnose())"


def test_findings_fit_a_narrow_view() -> None:
    lines = shown(scope_view("running", Diagnosis([finding("wide")]), {}), width=40)
    assert max(map(len, lines)) <= 40
    assert "    why       It is broken, for a reason" in lines


def test_relevant_numbers_come_first() -> None:
    numbers = {f"m/{index}": index for index in range(30)} | {"training_metrics/loss": 2.5, "m/text": "a"}
    lines = shown(scope_view("running", Diagnosis(), numbers))
    assert lines[1] == "No problem was found."
    rows = [line for line in lines if "/" in line and "│" in line]
    assert len(rows) == MOST_NUMBERS
    assert "training_metrics/loss │ 2.5" in rows[0]
    assert "11 more: scope.last_metrics()" in lines[-1]


def test_scope_shows_progress_and_findings(tmp_path: Path) -> None:
    """Before the first step there is no verdict; then parameters that no optimizer holds are found."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    scope = loopscope.attach(model, optimizer, out=tmp_path / "run", loop="step", length=4, display="none")
    with scope:
        assert shown(scope.__rich__(), 200) == [f"not started: {scope.folder}"]
        for batch in scope.batches([torch.ones(2, 4)] * 2):
            scope.backward(model(batch).sum())
            optimizer.step()
    lines = shown(scope.__rich__(), 200)
    assert lines[0] == f"closed, step 2 of 4 (50%): {scope.folder}"
    assert any("parameters-without-optimizer, before the first step" in line for line in lines)
