"""The installed wheel works with a project whose folders have the same names, in any order of imports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("framework", "training_hooks", "sinks", "experiments")
SUFFIXES = (".py", ".txt")  # modules, and the templates of loopscope new
PROJECT = """
import sys
import experiments.own, framework.own, sinks.own
from loopscope import HookPoint, TrainingHook
from loopscope import experiments as ours, sinks as our_sinks, training_hooks
from loopscope.__main__ import main

assert {module.own.WORD for module in (experiments, framework, sinks)} == {"the project's"}
assert all("site" in module.__file__ for module in (ours, our_sinks, training_hooks))
sys.exit(main())
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel, not the editable folders, into a separate folder."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    names = tracked.stdout.split("\n") if tracked.returncode == 0 else []
    if not any(names):  # not a checkout: a source archive
        names = [str(path.relative_to(ROOT)) for name in (*FOLDERS, "pyproject.toml") for path in _below(ROOT / name)]
    for name in [*names, "README.md", "LICENSE"]:
        if (
            name
            and (ROOT / name).is_file()
            and name.split("/")[0] in (*FOLDERS, "pyproject.toml", "README.md", "LICENSE")
        ):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-build-isolation", "--target", str(folder), str(source)], check=True, timeout=300)
    return folder


def _below(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("*.*") if file.suffix in SUFFIXES]


@pytest.mark.parametrize("is_package", [True, False], ids=["packages", "plain folders"])
def test_wheel_coexists_with_same_named_folders(site: Path, tmp_path: Path, is_package: bool) -> None:
    """A project with folders named like our packages works with the installed wheel."""
    for folder in ("framework", "sinks", "experiments"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text('WORD = "the project\'s"\n')
        if is_package:
            (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "start.py").write_text(PROJECT)
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "start.py", "list"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "mod_arithmetic" in done.stdout


def test_wheel_is_complete_and_typed(site: Path) -> None:
    """The wheel contains every module and template and py.typed, and no other top-level folder."""
    installed = site / "loopscope"
    for name, folder in {"framework": installed, **{name: installed / name for name in FOLDERS[1:]}}.items():
        expected = {str(path.relative_to(ROOT / name)) for path in _below(ROOT / name)}
        assert expected <= {str(path.relative_to(folder)) for path in _below(folder)}
    assert (installed / "py.typed").is_file()
    assert [path.name for path in site.iterdir() if path.name in FOLDERS] == []
