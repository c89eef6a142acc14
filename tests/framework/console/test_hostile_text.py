"""Text of hooks, strategies, metrics and warnings never controls the terminal, in any display."""

import io
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope import sinks as shipped  # noqa: F401 - fills the registry of sinks
from loopscope.cli.hook_pages import experiment_list, hook_content, hook_list, hook_page
from loopscope.console import RunConsole, printable
from loopscope.console.terminal import LastingConsole
from loopscope.hooks import Alert, HookPoint, MetricInfo, Series, TrainingHook
from loopscope.runs import ExperimentRunner

from tests.framework.console.test_run_console import OTHER, SUMMARY
from tests.sinks.emits import run_info
from tests.support import Case, build

pytestmark = pytest.mark.longer

COMMANDS = st.sampled_from(
    ["\x1b[31m", "\x1b]0;title\x07", "\x9b2J", "\r", "\x08", "\x00", "\n", "\t", "\u202e", "\x7f"]
)
MARKUP = st.sampled_from(
    ["[red]", "[/]", "[bold]x[/bold]", ":smile:", "[link=http://a]", "[", "\\[b]", "{}", "%s", "ø"]
)
TASK = build(Case(loop="step"), steps=4)
HOSTILE = st.lists(st.one_of(COMMANDS, MARKUP, st.sampled_from("abc")), min_size=1, max_size=6).map("".join)


def console_of(*, terminal: bool) -> LastingConsole:
    size = {"width": 100, "height": 40}
    return LastingConsole(file=io.StringIO(), force_terminal=terminal, force_interactive=terminal,
                          legacy_windows=False, color_system=None, **size)  # fmt: skip


def shown(text: str, mode: Any, *, terminal: bool) -> str:
    """Return the output of a session in which every name and sentence is ``text``."""
    console, now = console_of(terminal=terminal), [0.0]
    task, state = TASK
    metric = f"{text}/{text}"
    sentence = re.sub(r"\s", "?", text)  # white space in sentences is collapsed
    run = run_info(Path("out"), strategy=text, loop="step", experiment=text, treatments={text: (text,)},
                   described=[metric])  # fmt: skip
    names: dict[str, Any] = {"live_metrics": {text: [metric, "x/y"]}, "progress_metrics": {text: [metric, "a/b"]}}
    with RunConsole(mode, console=console, clock=lambda: now[0], **names) as display:
        sinks = display.sinks()
        for sink in sinks:
            sink.set_run_context(run)
        progress = display.strategy_started(run, task, [named(text)()])
        for state.loop.step in range(1, 5):
            now[0] += 40.0
            for sink in sinks:
                metrics = {metric: 0.5, "x/y": text, "x/list": [text], f"x/{text}": {text: text}, "a/b": 1.0}
                sink.emit(metrics, 0, HookPoint.SNAPSHOT, step=state.loop.step)
                sink.emit({f"s/{text}": Series([1], [2.0])}, 0, HookPoint.POST_STEP, step=state.loop.step)
                alert = Alert(sentence, metric=text)
                alert.hook = text
                sink.alert([alert, alert])
                sink.snapshot(0, state.loop.step)
            state.loop.evaluation = {text: 1.0}
            progress.step(state.loop)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(sentence, stacklevel=1)
        table = {text: {text: {text: 1.0}}, "other": {"a": {text: 2.0}, text: {text: 3.0}}}
        summary = {**SUMMARY, "strategy": text, "final": {text: 1.0}, "treatments": {text: (text,)},
                   "hook_errors": [{"hook": text}], "hook_tables": table, "metrics": {metric: 1.0}}  # fmt: skip
        display.strategy_ended(summary)
        display.ended([summary, OTHER])
    return console.file.getvalue()


def named(text: str) -> type[TrainingHook]:
    class Named(TrainingHook):
        name = text
        hook_points = frozenset({HookPoint.SNAPSHOT})

        def __init__(self, *, option: str = text) -> None:
            self.option = option

        def compute(self, ctx: Any) -> dict[str, float]:
            return {}

        def describe_metrics(self) -> list[MetricInfo]:
            return [MetricInfo(text, text, text, text)]

    Named.__doc__ = f"{text}\n\n{text}\n\nArgs:\n    option: {text}"
    return Named


@pytest.mark.some_rows(4)
@pytest.mark.parametrize("mode", ["normal", "live", "silent", "none"])
@pytest.mark.parametrize("terminal", [False, True])
@settings(max_examples=8, deadline=None)
@given(text=HOSTILE)
def test_session_shows_hostile_text_as_printable_text(mode, terminal, text):
    """In every mode, the output equals that of a session with the printable form of the same text."""
    assert shown(text, mode, terminal=terminal) == shown(printable(text), mode, terminal=terminal)


@settings(max_examples=20, deadline=None)
@given(text=HOSTILE)
def test_markup_in_names_is_text(text):
    flat = "".join(shown(f"n{text}", "normal", terminal=False).split())
    assert flat.count("".join(printable(f"n{text}").split())) > 10


@settings(max_examples=20, deadline=None)
@given(text=HOSTILE)
def test_hook_and_experiment_pages_are_printable(text):
    """Names and descriptions with control characters and markup leave only printable characters in lists and pages."""
    hook = named(text)
    kind = type("Kind", (ExperimentRunner,), {"name": text, "strategies": (text,), "presets": {text: {}},
                                              "__doc__": text})  # fmt: skip
    console = console_of(terminal=False)
    for page in (hook_list([hook]), hook_page(hook_content(hook)), experiment_list([kind])):
        console.print(page)
    assert all(line.isprintable() for line in console.file.getvalue().split("\n"))
