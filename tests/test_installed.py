"""The installed package: the wheel next to folders of the same names, and the types that checkers of users see."""

import os
import re
import subprocess
import sys
import sysconfig
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
SCRIPT = """
import loopscope
import torch
from loopscope import HookPoint, HookRegistry, RunDataContext, TrainingHook
from loopscope.hooks import Metrics


@HookRegistry.register
class Spread(TrainingHook):
    name = "spread"
    hook_points = {HookPoint.POST_STEP}
    metrics = "std | standard deviation of the logits | [0, ∞) | Grows with confidence."

    def compute(self, ctx: RunDataContext) -> Metrics:
        return {"std": ctx.forward(ctx.batch_data[0]).output.std()}


def train(model: torch.nn.Linear, optimizer: torch.optim.AdamW, batches: list[torch.Tensor]) -> None:
    with loopscope.attach(model, optimizer, hooks=["norms", Spread], out="runs/mine", display="none") as scope:
        reveal_type(scope)
        for batch in scope.batches(batches):
            reveal_type(batch)
            scope.backward(model(batch).sum())
            optimizer.step()


run = loopscope.read_run("runs/mine")
reveal_type(run)
reveal_type(run.matching("norms/*"))
"""
WRONG = """
import loopscope
import torch

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
loopscope.attached(model, optimizer)
loopscope.attach(model, optimizer, hook=["norms"])
loopscope.attach(model, optimizer, display="loud")
"""
TRAINERS = """
import lightning
import loopscope
import transformers


def attach(ours: transformers.Trainer, theirs: lightning.Trainer) -> None:
    reveal_type(loopscope.attach(ours, hooks=["norms"]))
    reveal_type(loopscope.attach(theirs, hooks=["norms"]))
    loopscope.attach(theirs, accumulate=2)
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


@pytest.mark.slow
@pytest.mark.some_rows(2)
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


@pytest.fixture(scope="module", params=["wheel", "editable"])
def checker(request: pytest.FixtureRequest, site: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the command of mypy for an environment with loopscope, as a wheel or as make installs it."""
    environment = tmp_path_factory.mktemp(request.param) / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (packages,) = environment.glob("lib/python3*/site-packages")
    if request.param == "wheel":
        (packages / "loopscope").symlink_to(site / "loopscope")
    else:
        subprocess.run(["make", "types", f"VENV={environment}", f"TYPES={environment}"], cwd=ROOT, check=True)
    others = tmp_path_factory.getbasetemp() / "others"  # the same folder for both, so that the cache serves both
    if not others.exists():
        others.mkdir()
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if "loopscope" not in path.name:
                (others / path.name).symlink_to(path)
    (packages / "others.pth").write_text(f"{others}\n")
    options = ["--strict", "--cache-dir", str(others.with_name("cache")), "--python-executable"]
    return [sys.executable, "-m", "mypy", *options, str(environment / "bin/python")]


def _check(checker: list[str], folder: Path, script: str) -> tuple[list[str], list[str]]:
    """Return the revealed types, and the errors by line."""
    (folder / "script.py").write_text(script, encoding="utf-8")
    done = subprocess.run([*checker, "script.py"], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.stderr == ""
    types = re.findall(r'Revealed type is "(.+)"', done.stdout)
    return types, re.findall(r"^script.py:\d+: error: .+", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_mypy_sees_the_types_of_a_script(checker: list[str], tmp_path: Path) -> None:
    """A script with a hook, a custom loop and a recorded run passes mypy --strict."""
    types, errors = _check(checker, tmp_path, SCRIPT)
    assert errors == []
    names = ["integrations.scope.Scope", "report.run_index.FoundRun"]
    assert types == [f"loopscope.{names[0]}", "torch._tensor.Tensor", f"loopscope.{names[1]}", "list[str]"]


@pytest.mark.slow
def test_mypy_reports_wrong_calls(checker: list[str], tmp_path: Path) -> None:
    """A wrong name or argument and an unknown value are errors."""
    _, errors = _check(checker, tmp_path, WRONG)
    assert {int(error.split(":")[1]) for error in errors} == {7, 8, 9}


@pytest.mark.slow
@pytest.mark.trainer
def test_mypy_accepts_both_trainers(checker: list[str], tmp_path: Path) -> None:
    """The result for a Trainer is an AttachedScope, and the arguments of a custom loop are errors."""
    types, errors = _check(checker, tmp_path, TRAINERS)
    assert types == ["loopscope.integrations.scope.AttachedScope"] * 2
    assert {int(error.split(":")[1]) for error in errors} == {10}
