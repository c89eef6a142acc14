"""docs/command-line.md lists exactly the existing options, files and fields."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from loopscope.cli import main

from docs import options
from tests.docs.markdown import ROOT, blocks, code, table_with, tables
from tests.docs.running import SMALL, status_of

PAGE = ROOT / "docs/command-line.md"
RUN = f"run mod_arithmetic --strategy random --no-console-output {SMALL['mod_arithmetic']}".split()
HOOKS = ["--hooks", "norms", "grad_clip", "--hook-csv", "--hook-jsonl", "--hook-tensorboard", "--profile-hooks"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with everything on and return the folder of the run."""
    folder = tmp_path_factory.mktemp("run")
    assert main([*RUN, *HOOKS, "--save-checkpoints", "1", "--output-dir", str(folder)]) == 0
    return folder / "mod_arithmetic/random"


def documented_options() -> set[str]:
    return set(re.findall(r"^\| `(--[a-z0-9-]+)", options.PAGE.read_text("utf-8"), re.M))


def fields(heading: str) -> set[str]:
    """Return the fields of the table that follows the name of a file."""
    after = [table for table in tables(PAGE) if table and set(table[0]) == {"field", "content"}]
    table = after[0] if heading == "experiment_config.json" else after[1]
    return {name for row in table for name in code(row["field"])}


def test_every_option_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """The generated list is up to date, and contains every option of the help."""
    assert options.PAGE.read_text("utf-8") == options.page(), "docs/options.md is stale: run make docs"
    for experiment in ("mod_arithmetic", "lowbit_lm", "tied_lm"):
        assert status_of(partial(main, ["run", experiment, "--help"])) == 0
        assert documented_options() >= set(re.findall(r"^ +(--[a-z0-9-]+)", capsys.readouterr().out, re.M))


@pytest.mark.parametrize("name", ["experiment_config.json", "summary.json"])
def test_every_field_of_a_file_is_listed(run: Path, name: str) -> None:
    content: dict[str, Any] = json.loads((run / name).read_text())
    assert fields(name) == content.keys()


def test_every_file_of_a_run_is_listed(run: Path) -> None:
    names = [name for row in table_with(PAGE, "file", "content") for name in code(row["file"])]
    patterns = [name.replace("STRATEGY", "random").replace("N", "[0-9]") for name in names]
    files = {path for path in run.rglob("*") if path.is_file()}
    assert files == {path for pattern in patterns for path in run.glob(pattern)}
    assert all(list(run.glob(pattern)) for pattern in patterns)


def test_printed_config_can_be_run(tmp_path: Path, monkeypatch, capsys) -> None:
    """The output of --print-config is accepted by --config."""
    monkeypatch.chdir(tmp_path)
    assert status_of(lambda: main([*RUN, "--hooks", "norms", "--print-config"])) == 0
    Path("printed.yaml").write_text(capsys.readouterr().out)
    assert main(["run", "mod_arithmetic", "--config", "printed.yaml"]) == 0
    assert (tmp_path / "output/mod_arithmetic/random/summary.json").exists()


def test_yaml_example_uses_documented_options() -> None:
    """Every key of the YAML example is the name of an option on the page."""
    (example,) = [block.text for block in blocks(PAGE) if block.language == "yaml"]
    keys = re.findall(r"^(\w+):", example, re.M)
    assert {f"--{key.replace('_', '-')}" for key in keys} <= documented_options()
