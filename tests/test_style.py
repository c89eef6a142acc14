"""House rules that are checked automatically."""

from pathlib import Path

MOST_WORDS = 8


def test_names_of_tests_are_short() -> None:
    """Names of tests have at most eight words; details belong into the docstring."""
    long = []
    for file in Path(__file__).parent.rglob("test_*.py"):
        for line in file.read_text(encoding="utf-8").splitlines():
            name = line.strip().removeprefix("def ").partition("(")[0]
            if line.strip().startswith("def test_") and name.count("_") > MOST_WORDS:
                long.append(f"{file.name}: {name}")
    assert long == []


def test_markers_have_a_reason_in_the_settings() -> None:
    """Every marker of pyproject.toml is in use."""
    settings = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    lines = settings.split("markers = [")[1].split("]")[0].splitlines()
    markers = [line.split('"')[1].partition(":")[0] for line in lines if '"' in line]
    sources = "".join(file.read_text(encoding="utf-8") for file in Path(__file__).parent.rglob("*.py"))
    assert [name for name in markers if f"mark.{name}" not in sources] == []
