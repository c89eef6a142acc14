"""Optional packages, which only parts of loopscope need."""

import re
import tomllib
from pathlib import Path

import pytest
from loopscope.errors import UsageError
from loopscope.optional_packages import install_command, require_package

from tests.docs.markdown import ROOT

REQUIREMENTS = {
    requirement
    for extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].values()
    for requirement in extra
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
    """loopscope is not on PyPI, so its extras cannot be installed by name."""
    for command in re.findall(r"pip install\s[^`]*", path.read_text(encoding="utf-8")):
        assert set(re.findall(r"'([^']+)'", command)) <= REQUIREMENTS


def test_no_message_contains_another_command():
    """Messages of the code take the command from :func:`install_command`."""
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES if path.suffix in (".py", ".txt")}
    assert [path.name for path, text in texts.items() if "pip install" in text] == ["optional_packages.py"]
