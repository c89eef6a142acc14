"""``loopscope new``: new files run and pass their tests, and are written completely or not at all."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from loopscope import experiments, sinks, training_hooks
from loopscope.cli import main

from tests.docs.markdown import ROOT
from tests.docs.running import run_command, run_pytest
from tests.framework.cli.test_cli_bad_input import refused
from tests.support.cases import slow_unless

FILLED = (experiments, sinks, training_hooks)
KINDS = {"observer": ["hook"], "intervention": ["hook", "--intervention"], "experiment": ["experiment"]}
EACH_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
HIDING = {"hook": ["hook_point", "storing_sink", "true"], "experiment": ["experiment", "true"]}
"""Names whose plain class name would hide a name in the file, or is a keyword."""
HOOK, EXPERIMENT = ["new", "hook"], ["new", "experiment"]
REFUSED = [
    (["new"], "takes a kind and a name"),
    (HOOK, "takes a kind and a name"),
    ([*HOOK, "a", "b"], "takes a kind and a name"),
    (["new", "hok", "a"], "Did you mean 'hook'?"),
    ([*EXPERIMENT, "a", "--intervention"], "--intervention applies to hook"),
    ([*HOOK, "a", "--outputdir", "b"], "--outputdir"),
    ([*HOOK, "a", "--output-dir"], "needs a value"),
    ([*HOOK, "2nd"], "'2nd'"),
    ([*HOOK, "_"], "'_'"),
    ([*HOOK, ""], "''"),
    ([*HOOK, "a b"], "'a b'"),
    ([*HOOK, "a.b"], "'a.b'"),
    ([*HOOK, "../a"], "'../a'"),
    ([*HOOK, "größe"], "'größe'"),
    ([*HOOK, "a\x1b[31m"], "it must be a letter"),
    ([*HOOK, "a" * 31], "at most 30"),
    ([*HOOK, "class"], "and not a keyword."),
    ([*EXPERIMENT, "None"], "and not a keyword."),
    *(
        ([*HOOK, name], "would hide the module")
        for name in ("torch", "random", "loopscope", "numpy", "winreg", "conftest", "pytest")
    ),
    ([*HOOK, "norms"], "'norms_2' is free"),
    ([*HOOK, "observers"], "'observers_2' is free"),
    ([*EXPERIMENT, "mod-arithmetic"], "'mod_arithmetic_2' is free"),
    ([*HOOK, "here"], "here.py exists"),
    ([*HOOK, "tested"], "test_tested.py exists"),
    ([*HOOK, "package"], "package/__init__.py exists"),
    ([*HOOK, "a", "--output-dir", "package"], "package/__init__.py exists"),
    ([*HOOK, "a", "--output-dir", "here.py"], "'here.py', which is not a folder"),
    ([*HOOK, "a", "--output-dir", "here.py/b"], "Not a directory"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.longer
@pytest.mark.parametrize(
    "kind", [pytest.param(KINDS[kind], id=kind, marks=slow_unless(kind == "observer")) for kind in KINDS]
)
def test_printed_commands_run_and_test_new_file(kind: list[str], folder: Path, monkeypatch, capfd) -> None:
    """The command writes a module and its test for each kind, and both printed commands succeed."""
    assert main(["new", *kind, "spread"]) == 0
    message, run, test = capfd.readouterr().out.splitlines()
    assert message == "Wrote spread.py and test_spread.py. To run and test them:"
    assert run_command(shlex.join(["python", *shlex.split(run)[1:]]), monkeypatch) == 0
    assert list(folder.glob("output/**/*_final.pt"))
    assert test.endswith(" -m pytest test_spread.py")
    assert run_pytest("test_spread.py") == 0


@pytest.mark.process
@EACH_KIND
def test_new_files_pass_format_and_lint(kind: list[str], folder: Path, capfd) -> None:
    for name in ("a", "my-own", "b" * 30):
        assert main(["new", *kind, name, "--output-dir", "deep/er"]) == 0
    (folder / "deep/er/pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    for check in (["format", "--check"], ["check", "--ignore", "ANN,D"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *check, "deep/er"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    assert "class MyOwn(" in (folder / "deep/er/my_own.py").read_text("utf-8")


@EACH_KIND
def test_docstring_fits_any_name(kind: list[str], folder: Path, capfd) -> None:
    """The file is described as an example, so that ``dead_units`` does not claim to measure something else."""
    assert main(["new", *kind, "dead_units"]) == 0
    assert '    """An example to replace: ' in (folder / "dead_units.py").read_text("utf-8")


@pytest.mark.longer
@pytest.mark.parametrize("kind", ["hook", pytest.param("experiment", marks=pytest.mark.slow)])
def test_class_names_hide_no_needed_name(kind: str, folder: Path) -> None:
    for name in HIDING[kind]:
        assert main(["new", kind, name]) == 0
    assert run_pytest(*(f"test_{name}.py" for name in HIDING[kind])) == 0


@pytest.mark.parametrize(("words", "fragment"), REFUSED, ids=lambda value: " ".join(value).strip()[:40])
def test_refusal_is_a_sentence_without_files(words: list[str], fragment: str, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("here.py", "test_tested.py", "package/__init__.py"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text("mine\n")
    assert fragment in refused(words, tmp_path, capfd)
