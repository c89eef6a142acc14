"""The README's program prints the sample below it, and the sample of the first run is the output of `make run`."""

import re
import warnings
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, blocks, code, table_with
from tests.docs.running import recipes, run_recipe

README = ROOT / "README.md"
FIRST_RUN = ROOT / "docs/first-run.md"
INSTALLATION = ROOT / "docs/installation.md"


def sample(page: Path = FIRST_RUN) -> list[str]:
    (text,) = [block.text for block in blocks(page) if block.language == "text"]
    return text.splitlines()


def masked(text: str) -> str:
    """Return a text without the values of its numbers, and with single spaces."""
    return " ".join(re.sub(r"\d+(?:\.\d+)?(?:e-?\d+)?", "0", text).split())


@pytest.mark.process
def test_program_of_the_readme_prints_its_sample(tmp_path: Path, monkeypatch, capsys) -> None:
    (program,) = [block.text for block in blocks(README) if block.language == "python"]
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # a user's filters; those of the tests turn alerts into errors
        exec(compile(program, "tiny_gpt.py", "exec"), {})
    printed = masked(capsys.readouterr().out)
    assert masked("\n".join(sample(README))) in printed
    assert printed.count("causal-mask-missing") == 2  # at once, and at the end


def test_costs_of_the_readme_are_measured() -> None:
    """The benchmarks have the share of a step and of the memory."""
    rows = [
        line
        for line in (ROOT / "docs/data/benchmarks.txt").read_text("utf-8").splitlines()
        if "GPT of 4 x 512, " in line
    ]
    texts = {
        name: next(line for line in rows if line.startswith(f"| health, {name} "))
        for name in ("own CPU time", "peak memory")
    }
    shares = [round(100 * (float(re.search(r"(\d\.\d+) ×", text)[1]) - 1)) for text in texts.values()]
    step, memory = map(
        int, re.search(r"cost\s+(\d+) % of a step .* and (\d+) %\s+of its memory", README.read_text("utf-8")).groups()
    )
    assert [step, memory] == shares


def test_readme_fits_on_one_screen() -> None:
    """The program is in the first lines, and the page has at most 75 lines."""
    lines = README.read_text(encoding="utf-8").splitlines()
    assert lines.index("import loopscope, torch") < 12
    assert len(lines) <= 75


@pytest.mark.slow
@pytest.mark.process
def test_first_sample_matches_output_of_make_run(tmp_path: Path, monkeypatch, capsys) -> None:
    """Compare the columns, the form of the second-last line and the path of the report.

    Shorter runs have no finding, and so their next command is another one.
    """
    monkeypatch.chdir(tmp_path)
    run_recipe("run", monkeypatch)
    printed = capsys.readouterr().out.splitlines()
    heading = next(line for line in printed if line.split()[:1] == ["strategy"])
    assert set(heading.split()) <= set(sample()[0].split())
    following = re.compile(r"Next: loopscope (doctor|show) output/mod_arithmetic/(stride|target)")
    assert following.fullmatch(sample()[-2])
    assert following.fullmatch(printed[-2])
    page = printed[-1].split()[1]
    assert sample()[-1].split()[1] == page == "output/mod_arithmetic/report.html"
    assert Path(page).is_file()


def test_the_sample_compares_the_strategies_of_make_run() -> None:
    (run,) = [line for line in recipes()["run"] if "/loopscope run " in line]
    named = [line.split()[0] for line in sample()[1:] if line.split()[:1] and line.split()[0] in run.split()]
    assert named == ["stride", "target"]


def test_makefile_has_the_targets_of_the_installation_page() -> None:
    """Every target in the table exists, and the README's two are among them."""
    named = [word for row in table_with(INSTALLATION, "target") for word in code(row["target"])]
    assert {"make run", "make test"} <= set(named)
    assert all(recipes()[target.removeprefix("make ")] for target in named)
