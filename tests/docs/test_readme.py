"""The README's sample matches the output of `make run`, except for numbers, and names existing make targets."""

from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, blocks
from tests.docs.running import recipes, run_recipe

README = ROOT / "README.md"


def sample() -> list[str]:
    (text,) = [block.text for block in blocks(README) if block.language == "text"]
    return text.splitlines()


def test_readme_sample_matches_output_of_make_run(tmp_path: Path, monkeypatch, capsys) -> None:
    """Compare the columns, the second-last line and the path of the report."""
    monkeypatch.chdir(tmp_path)
    run_recipe("run", monkeypatch)
    printed = capsys.readouterr().out.splitlines()
    heading = next(line for line in printed if line.split()[:1] == ["strategy"])
    assert set(heading.split()) <= set(sample()[0].split())
    assert sample()[-2] == printed[-2]
    page = printed[-1].split()[1]
    assert sample()[-1].split()[1] == page == "output/mod_arithmetic/report.html"
    assert Path(page).is_file()


def test_the_sample_compares_the_strategies_of_make_run() -> None:
    (run,) = [line for line in recipes()["run"] if "/loopscope run " in line]
    named = [line.split()[0] for line in sample()[1:] if line.split()[:1] and line.split()[0] in run.split()]
    assert named == ["stride", "target"]


@pytest.mark.parametrize("target", ["run", "test", "lint", "docs", "bench"])
def test_makefile_has_targets_named_in_readme(target: str) -> None:
    assert f"make {target}" in README.read_text(encoding="utf-8")
    assert recipes()[target]
