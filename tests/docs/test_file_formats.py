"""docs/file-formats.md lists exactly the files of real runs, whose JSON files fit the schemas."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from jsonschema import Draft202012Validator
from loopscope.cli import main
from loopscope.hooks import HookPoint, MetricInfo, Metrics, RunDataContext, TrainingHook
from loopscope.training_hooks import WeightUpdates

from docs import file_formats
from tests.docs.markdown import ROOT, code, table_with
from tests.docs.running import SMALL
from tests.framework.runs.small_experiment import registered, session
from tests.framework.runs.test_recorded_rows import Sampled

RUN = f"run mod_arithmetic --strategy random --no-console-output {SMALL['mod_arithmetic']}".split()
HOOKS = ["--hooks", "norms", "grad_clip", "--hook-csv", "--hook-jsonl", "--hook-tensorboard", "--profile-hooks"]
PAGE = ROOT / "docs/file-formats.md"
FILES = {schema["title"]: schema for schema in file_formats.schemas()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with everything on and return the folder of the run."""
    folder = tmp_path_factory.mktemp("run")
    assert main([*RUN, *HOOKS, "--save-checkpoints", "1", "--output-dir", str(folder)]) == 0
    return folder / "mod_arithmetic/random"


@pytest.fixture(scope="module")
def attached(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train an attached loop that raises alerts, and return the folder of the run."""
    folder = tmp_path_factory.mktemp("attached") / "run"
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hooks = ["norms", WeightUpdates(vanishing_grad_threshold=50.0, interval=1)]
    with (
        warnings.catch_warnings(action="ignore"),  # alerts are warnings, which the tests turn into errors
        loopscope.attach(model, optimizer, hooks=hooks, out=folder, display="none") as scope,
    ):
        for batch in scope.batches(torch.ones(6, 2, 4)):
            scope.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return folder


def lines_of(path: Path) -> Iterator[Any]:
    """Yield the objects of a JSON file, or of the lines of one."""
    text = path.read_text(encoding="utf-8")
    yield from map(json.loads, text.splitlines()) if path.suffix == ".jsonl" else [json.loads(text)]


def check_files(folder: Path, expected: set[str]) -> None:
    """Check the JSON files of a run, which must be ``expected`` and must not be empty, against their schemas."""
    paths = {path for path in folder.rglob("*.json*") if path.is_file()}
    titles = {path: str(path.relative_to(folder)).replace(f"{folder.name}.jsonl", "STRATEGY.jsonl") for path in paths}
    shown = {path: "manifest.json" if path.name == "manifest.json" else title for path, title in titles.items()}
    assert set(shown.values()) == expected
    for path, title in shown.items():
        schema = next(schema for name, schema in FILES.items() if name.endswith(title))
        validator = Draft202012Validator(schema)
        for content in lines_of(path):
            assert [error.message for error in validator.iter_errors(content)] == [], title


def test_files_of_an_experiment_fit_the_schemas(run: Path) -> None:
    names = {"experiment_config.json", "summary.json", "files.json", "STRATEGY.jsonl", "alerts.jsonl", "digests.jsonl"}
    check_files(run, names | {"manifest.json"})
    for name in ("experiment_config.json", "summary.json"):
        assert FILES[name]["properties"].keys() == next(lines_of(run / name)).keys()


def test_files_of_an_attached_run_fit_the_schemas(attached: Path) -> None:
    names = {"experiment_config.json", "summary.json", "files.json", "STRATEGY.jsonl", "alerts.jsonl", "digests.jsonl"}
    check_files(attached, names)
    assert len([*lines_of(attached / "alerts.jsonl")]) > 0


class Failing(Sampled):
    """Raises after some steps."""

    name = "failing"
    steps = 0

    def compute_loss(self, model: Any, batch: Any) -> Any:
        self.steps += 1
        if self.steps > 5:
            raise RuntimeError("the sixth step")
        return super().compute_loss(model, batch)


class Raising(TrainingHook):
    """Raises whenever it is called."""

    name = "raising"
    hook_points = frozenset({HookPoint.POST_STEP})

    def compute(self, ctx: RunDataContext) -> Metrics:
        raise ValueError("always")

    def describe_metrics(self) -> list[MetricInfo]:
        return []


def test_files_of_a_failed_run_fit_the_schemas(tmp_path: Path) -> None:
    """A hook and the training fail, and a custom sampler draws the rows."""
    options = {"strategies": ["plain"], "hooks": ["raising"], "on_hook_error": "skip", "epochs": 3}
    with registered(Raising), pytest.raises(RuntimeError), pytest.warns(UserWarning, match="always"):
        session(tmp_path, Failing, **options).run()
    folder = tmp_path / "failing/plain"
    names = {"experiment_config.json", "summary.json", "files.json", "STRATEGY.jsonl", "alerts.jsonl", "digests.jsonl"}
    check_files(folder, names | {"rows.jsonl"})
    summary = next(lines_of(folder / "summary.json"))
    assert summary["status"] == "failed"
    assert [error["hook"] for error in summary["hook_errors"]] == ["raising"]


def test_schemas_describe_every_field_and_refuse_others() -> None:
    for schema in FILES.values():
        Draft202012Validator.check_schema(schema)
        assert all(field["description"] for field in schema["properties"].values())
        assert set(schema["required"]) <= schema["properties"].keys()
    wrong = {"epoch": 0, "step": 1, "hook_point": "NEVER"}
    assert [*Draft202012Validator(FILES["STRATEGY.jsonl"]).iter_errors(wrong)]


def test_both_pages_have_every_field() -> None:
    """The committed page has the names, that of the site also the descriptions."""
    committed, full = PAGE.read_text("utf-8"), file_formats.page()
    fields = [item for schema in FILES.values() for item in schema["properties"].items()]
    assert [name for name, _ in fields if f"`{name}`" not in committed] == []
    assert [name for name, field in fields if f"| `{name}` |" not in full or field["description"] not in full] == []


def test_every_file_of_a_run_is_listed(run: Path) -> None:
    names = [name for row in table_with(PAGE, "file", "content") for name in code(row["file"])]
    patterns = [name.replace("STRATEGY", "random").replace("N", "[0-9]") for name in names]
    files = {path for path in run.rglob("*") if path.is_file()}
    assert files == {path for pattern in patterns for path in run.glob(pattern)}
    assert all(list(run.glob(pattern)) for pattern in patterns)
