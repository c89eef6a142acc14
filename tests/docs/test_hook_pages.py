"""docs/hooks/index.md is up to date, and every hook class is fully documented."""

import doctest
import re

import pytest
from loopscope.hooks import HookPoint, MetricInfo, TrainingHook, hook_options

from docs import generate, hook_pictures
from tests.docs.markdown import tables

SHIPPED = pytest.mark.parametrize("hook", generate.shipped_hooks(), ids=lambda hook: hook.name)


class Undescribed(TrainingHook):
    """Say too little.

    Args:
        known: is described.
    """

    name = "undescribed"
    hook_points = frozenset({HookPoint.POST_EPOCH})

    def __init__(self, *, known: int = 1, unknown: int = 2) -> None: ...

    def compute(self, ctx):
        return {}

    def describe_metrics(self):
        return [MetricInfo("bare", "a | b", "", "reading")]


def missing(hook: type[TrainingHook]) -> list[str]:
    """Return the gaps of a hook's page."""
    first, _, arguments = generate.documentation(hook)
    infos = hook().describe_metrics()
    blank = [f"{info.name}: {part}" for info in infos for part, text in vars(info).items() if not text.strip()]
    options = [name for name in hook_options(hook) if not arguments.get(name)]
    return [*([] if first else ["description"]), *([] if infos else ["metrics"]), *blank, *options]


def test_list_is_that_of_the_classes() -> None:
    written = generate.PAGE.read_text(encoding="utf-8")
    assert written == generate.index_page(generate.shipped_hooks()), "docs/hooks/index.md is stale: run make docs"


def test_only_the_list_of_hooks_is_committed() -> None:
    """The site's pages are generated when it is built, and a file of the same name would replace one."""
    assert [path.name for path in generate.PAGE.parent.iterdir()] == ["index.md"]


@SHIPPED
def test_page_of_a_hook_is_complete(hook: type[TrainingHook]) -> None:
    """The site's page has each metric, each option and the assumptions."""
    page = generate.hook_pages()[hook.name]
    assert page.startswith(f"# {hook.name}\n")
    assert [info.name for info in hook().describe_metrics() if f"| `{hook.name}/{info.name}` |" not in page] == []
    assert [name for name in hook_options(hook) if f"| `{hook.name}.{name}` |" not in page] == []
    assert "\nAssumes " in page


@SHIPPED
def test_every_hook_documents_metrics_and_options(hook: type[TrainingHook]) -> None:
    """A page has a description, metrics with every field filled in, and text for each option."""
    assert missing(hook) == []


def test_incomplete_hook_description_is_detected() -> None:
    assert missing(Undescribed) == ["bare: range", "unknown"]


@SHIPPED
def test_every_hook_states_what_it_assumes(hook: type[TrainingHook]) -> None:
    assert any(paragraph.startswith("Assumes ") for paragraph in generate.documentation(hook)[1].split("\n\n"))


def test_hook_cost_is_read_from_benchmarks(tmp_path) -> None:
    """Only the table under the heading Each hook counts."""
    data = tmp_path / "benchmarks.txt"
    data.write_text(
        "# B\n\n## Hooks\n\n| x | y | 9.00 ms |\n\n## Each hook\n\n"
        "| Figure | Against | Measured |\n| --- | --- | ---: |\n"
        "| norms | 1.0 calls | 2.50 ms | 2 ms |\n\n## How\n\n| late | z | 1.00 ms | |\n"
    )
    assert generate.measured_costs(data) == {"norms": "2.50 ms a call; 1.0 calls"}


def test_cells_of_the_index_are_short() -> None:
    """A cost is a percentage on one line, and needs are names without an explanation."""
    rows = [row for table in tables(generate.PAGE) for row in table]
    names = [hook.name for hook in generate.shipped_hooks()]
    assert {row["hook"] for row in rows} == {f'<a id="{name}"></a>[`{name}`](index.md#{name})' for name in names}
    for row in rows:
        assert re.fullmatch(r"-|[\d,.]+\N{NO-BREAK SPACE}%", row["cost"])
        assert re.fullmatch(r"(`\w+`(, )?)*", row["needs"])


def test_hook_missing_from_index_raises() -> None:
    """A hook that the index page assigns to no question raises ValueError."""
    with pytest.raises(ValueError, match="lacks undescribed: add it"):
        generate.index_page([*generate.shipped_hooks(), Undescribed])


def test_bars_in_formulas_do_not_break_tables() -> None:
    assert "| `undescribed/bare` | a \\| b |" in generate.hook_page(Undescribed)


def test_page_shows_the_picture_with_caption(tmp_path, monkeypatch) -> None:
    """A page has no picture without the file, and the docstring of the program as the caption."""
    monkeypatch.setattr(generate, "PICTURES", tmp_path)
    monkeypatch.setattr(hook_pictures, "PROGRAMS", tmp_path)
    assert generate.picture(Undescribed) == []
    (tmp_path / "undescribed.png").touch()
    assert generate.picture(Undescribed)[0] == "![undescribed](../pictures/hooks/undescribed.png)"
    (tmp_path / "undescribed.py").write_text('"""Norms\nover steps."""')
    assert "*Norms over steps.*" in generate.hook_page(Undescribed).splitlines()


def test_every_picture_has_a_program() -> None:
    drawn = {path.stem for path in hook_pictures.PICTURES.glob("*.png")}
    assert {name for name in drawn if not hook_pictures.caption(name)} == set()
    assert drawn <= {hook.name for hook in generate.shipped_hooks()}


def test_write_renews_a_stale_list(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(generate, "PAGE", tmp_path / "index.md")
    generate.PAGE.write_text("stale")
    assert generate.write()
    assert "(index.md#norms)" in generate.PAGE.read_text(encoding="utf-8")
    assert not generate.write()


def test_examples_of_the_generator_are_right() -> None:
    outcome = doctest.testmod(generate)
    assert outcome.attempted
    assert not outcome.failed
