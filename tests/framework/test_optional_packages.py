"""Optional packages, which only parts of loopscope need."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from loopscope.errors import UsageError
from loopscope.optional_packages import install_command, require_package

from tests.docs.markdown import ROOT

WITHOUT_COMMAND = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jsonargparse", "docstring_parser", "yaml", "shtab"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""
TRAINING = """
import loopscope, torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
with loopscope.attach(model, optimizer, out="run") as scope:
    for batch in scope.batches([torch.ones(8, 4)] * 5):
        scope.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
assert loopscope.read_run("run").matching("training_metrics/loss")
"""
COMMAND = "import loopscope.__main__; sys.exit(loopscope.__main__.main())"
REQUIREMENTS = {
    requirement
    for extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].values()
    for requirement in extra
    if not requirement.startswith("loopscope")  # an extra that includes another
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [
    path for name in ("framework", "sinks", "training_hooks", "experiments") for path in (ROOT / name).rglob("*")
]


def test_installed_package_is_accepted():
    require_package("json", "Sink 'some'")


def test_folder_with_package_name_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a_folder_of_runs").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        UsageError, match=r"'some' needs the package a_folder_of_runs.*: pip install a_folder_of_runs\."
    ):
        require_package("a_folder_of_runs", "Sink 'some'")


def test_command_contains_the_accepted_versions():
    for requirement in REQUIREMENTS:
        name = re.match(r"[\w-]+", requirement)[0]
        assert install_command(name) == ("pip install " + (f"'{requirement}'" if name != requirement else name))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_on_pages_name_the_accepted_versions(path: Path):
    for command in re.findall(r"pip install\s[^`]*", path.read_text(encoding="utf-8")):
        assert set(re.findall(r"'([^']+)'", command)) <= REQUIREMENTS


def test_no_message_contains_another_command():
    """Messages of the code take the command from :func:`install_command`."""
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES if path.suffix in (".py", ".txt")}
    assert [path.name for path, text in texts.items() if "pip install" in text] == ["optional_packages.py"]


def started_without_command(program: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program in an environment without the packages of the extra ``cli``."""
    words = (sys.executable, "-c", WITHOUT_COMMAND + program, *words)
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.process
def test_attach_needs_no_package_of_the_command(tmp_path: Path):
    """A training with the health hooks is diagnosed, recorded and read."""
    done = started_without_command(TRAINING, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "critical: " in done.stdout


@pytest.mark.process
def test_command_without_its_packages_names_the_remedy(tmp_path: Path):
    done = started_without_command(COMMAND, tmp_path, "ls")
    assert (done.returncode, done.stdout) == (2, "")
    sentence = r'.*The command needs docstring_parser, which is not installed: pip install "loopscope\[cli\]"\.\n'
    assert re.fullmatch(sentence, done.stderr)
