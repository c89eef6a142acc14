"""The files for contributors agree with the Makefile, pyproject.toml, constraints.txt and the tree."""

import re
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.markdown import ROOT, code, prose, table_with
from tests.docs.running import recipes

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github").rglob("*.yml")) + sorted((ROOT / ".github").glob("*.md"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOR_CONTRIBUTORS = [ROOT / name for name in ("CONTRIBUTING.md", "RELEASING.md", "SECURITY.md")]


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def constraints() -> dict[str, str]:
    """Return the exact versions of the packages."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    return dict(line.split("==") for line in lines)


def jobs() -> dict[str, Any]:
    return dict(chain.from_iterable(loaded(path)["jobs"].items() for path in WORKFLOWS))


@pytest.mark.parametrize("page", FOR_CONTRIBUTORS, ids=lambda page: page.name)
def test_every_path_of_a_page_exists(page: Path) -> None:
    built = (".venv", "dist/", ".venv-dist")
    paths = [
        span for span in code(prose(page)) if re.fullmatch(r"\.?[\w-]+/[\w./-]*|[\w.-]+\.(md|toml|txt|cff|yaml)", span)
    ]
    assert len(paths) > 2
    assert [path for path in paths if not path.startswith(built) and not (ROOT / path).exists()] == []


def test_file_tree_contains_every_tracked_folder() -> None:
    """The table of CONTRIBUTING.md has a row for each folder at the root."""
    rows = chain.from_iterable(code(row["path"]) for row in table_with(FOR_CONTRIBUTORS[0], "path", "contents"))
    ignored = {line.strip("/\n") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()}
    ignored |= {".git"}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.endswith(".egg-info")}
    assert folders - ignored <= {path.split("/")[0] for path in rows} | {"shared"}


@pytest.mark.parametrize(("name", "job"), jobs().items())
def test_every_job_calls_an_existing_target(name: str, job: dict[str, Any]) -> None:
    """Each job has a limit of time and calls one target of the Makefile."""
    assert job["timeout-minutes"] <= 90, name
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands
    assert all(recipes()[command.split()[1]] for command in commands if command.startswith("make "))
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)


def test_workflows_have_few_rights() -> None:
    for path in WORKFLOWS:
        assert loaded(path)["permissions"] == {"contents": "read"}
        assert loaded(path)["concurrency"]["group"]


def test_matrix_covers_the_supported_versions() -> None:
    """The matrix has both ends of torch's declared range, the pinned version, and the lowest Python version."""
    matrix = jobs()["fast"]["strategy"]["matrix"]
    (torch,) = [name for name in PROJECT["dependencies"] if name.startswith("torch>")]
    lowest, end = re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", torch).groups()  # type: ignore[union-attr]
    pinned = constraints()["torch"].rpartition(".")[0]
    assert matrix["torch"] == [f"2.{lowest}", pinned, f"2.{int(end) - 1}"]
    assert PROJECT["requires-python"] == f">={matrix['python'][0]}"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    ends = re.findall(r"^\.venv-(?:oldest|newest)/\.installed: END_PYTHON := python([\d.]+)$", makefile, re.M)
    assert [matrix["python"][0], matrix["python"][-1]] == ends


def test_pre_commit_uses_the_pinned_versions() -> None:
    repositories = loaded(ROOT / ".pre-commit-config.yaml")["repos"]
    versions = {entry["repo"].rpartition("/")[2]: entry["rev"] for entry in repositories if entry["repo"] != "local"}
    expected = {"ruff-pre-commit": f"v{constraints()['ruff']}", "codespell": f"v{constraints()['codespell']}"}
    assert versions == expected


def test_citation_has_the_version_of_the_project() -> None:
    citation = loaded(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert (citation["title"], citation["version"]) == (PROJECT["name"], PROJECT["version"])
    assert citation["license"] == PROJECT["license"]
    assert citation["abstract"] == PROJECT["description"]
    assert citation["authors"] == [{"name": "The loopscope authors"}]
    assert "The loopscope authors" in (ROOT / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_links_of_forms_lead_to_files(path: Path) -> None:
    """Links are relative to an issue or a pull request."""
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        assert link.startswith("../blob/HEAD/"), link
        assert (ROOT / link.removeprefix("../blob/HEAD/").partition("#")[0]).is_file(), link


def test_checkpoints_are_read_by_one_function() -> None:
    """Only read_tensors calls torch.load, with weights_only, and no module imports pickle (SECURITY.md)."""
    folders = ("framework", "training_hooks", "sinks", "experiments")
    sources = {path: path.read_text("utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py")}
    callers = [path.name for path, text in sources.items() if "torch.load(" in text]
    assert callers == ["durable_files.py"]
    assert "weights_only=True" in sources[ROOT / "framework/durable_files.py"]
    assert [
        path.name for path, text in sources.items() if re.search(r"^\s*(import|from) (pickle|dill)\b", text, re.M)
    ] == []
