import io
import json
import re
import warnings
from pathlib import Path

import pytest
from loopscope import sinks, training_hooks  # noqa: F401 - fills the registries
from loopscope.console import RunConsole, make_console, show_warnings
from loopscope.console.board import Notice
from loopscope.console.terminal import LastingConsole
from loopscope.errors import RunNotice
from loopscope.hooks import Alert, HookPoint, Recovery
from loopscope.training import TrainingTask
from rich.console import Console
from rich.text import Text
from torch import nn

from tests.sinks.emits import run_info
from tests.support import Case, build

SUMMARY = {
    "strategy": "stride",
    "status": "completed",
    "target_reached": {"epoch": 154, "step": 14105},
    "epochs": 155,
    "steps": 14105,
    "training_loss": 0.0123456,
    "final": {"train_acc": 1.0, "train_loss": 0.01, "val_acc": 0.99512, "val_loss": 0.02},
    "seconds": {"training": 63.4, "total": 65.0},
    "treatments": {},
    "hook_errors": [],
    "metrics": {},
    "sample": None,
    "hook_tables": {},
    "output_dir": "output/mod_arithmetic/stride",
}
OTHER = {
    **SUMMARY,
    "strategy": "fixed-random",
    "target_reached": None,
    "epochs": 420,
    "final": {"train_acc": 0.99, "val_acc": 0.2},
    "treatments": {"grad_clip": ("gradients",)},
    "hook_errors": [{"hook": "fourier"}, {"hook": "fourier"}],
    "output_dir": "output/mod_arithmetic/fixed-random",
}


@pytest.fixture(autouse=True)
def folder_without_runs(tmp_path, monkeypatch):
    """Change to a folder without runs."""
    monkeypatch.chdir(tmp_path)


def captured(*, terminal, width=80):
    return Console(
        file=io.StringIO(), width=width, force_terminal=terminal, force_interactive=terminal, legacy_windows=False
    )


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def session(mode, *, terminal, width=80):
    """Show a session with ten steps of a second each, a warning and a table; return the text and the display."""
    console, now = captured(terminal=terminal, width=width), [0.0]
    with RunConsole(mode, console=console, clock=lambda: now[0]) as shown:
        task, state = build(Case(loop="step"), steps=10)
        run = run_info(Path("output/exp/only"), loop="step", treatments={"grad_clip": ("gradients",)})
        progress = shown.strategy_started(run, task, [])
        for sink in shown.sinks():
            sink.set_run_context(run)
            sink.emit({"h/metric": 0.5}, 0, HookPoint.POST_EPOCH, step=1)
            sink.snapshot(0, 1)
        for state.loop.step in range(1, 11):
            now[0] += 1.0
            progress.step(state.loop)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("Hook 'x' failed.\nThe run continues.", stacklevel=1)
        shown.strategy_ended(SUMMARY)
        shown.ended([SUMMARY, OTHER])
    return console.file.getvalue(), shown


def test_session_without_terminal_prints_plain_lines():
    text, _ = session("normal", terminal=False)
    assert "\x1b" not in text
    assert "\r" not in text
    for part in (
        "exp only: ",
        "warning: Hook 'x' failed. The run continues.\n",
        "only, step 1: h/metric 0.5; 1 value not recorded",
    ):
        assert part in text
    assert "only: 20%" not in text  # the SNAPSHOT has a line instead


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_session_fits_its_width(width):
    """Header, treatments, warning, bar and table are shown at both widths."""
    text, _ = session("normal", terminal=True, width=width)
    lines = re.split(r"[\n\r]", plain(text))
    assert max(map(len, lines)) <= width
    for part in ("exp only", "grad_clip (gradients)", "warning: Hook 'x' failed. The run continues.", "metric", "100%"):
        assert part in plain(text)


@pytest.mark.parametrize("terminal", [True, False])
def test_silent_mode_shows_progress_and_final_warnings(terminal):
    """Alerts have the only sink."""
    text, shown = session("silent", terminal=terminal)
    lines = {line.strip() for line in re.split(r"[\n\r]", plain(text)) if line.strip()}
    assert lines
    warning = "warning: Hook 'x' failed. The run continues."
    assert all(line.startswith("only") and "%" in line for line in lines - {warning} if line != "only ━━━━━━━━")
    assert plain(text).strip().endswith(warning)
    assert [sink.name for sink in shown.sinks()] == ["alerts", "progress"]


def test_progress_of_stretch_ends_at_its_end():
    console, now = captured(terminal=False), [0.0]
    with RunConsole("silent", console=console, clock=lambda: now[0], until=10, label="steps 6 to 10") as shown:
        task, state = build(Case(loop="step"), steps=40)
        progress = shown.strategy_started(run_info(Path("out"), loop="step"), task, [])
        for state.loop.step in range(1, 11):
            now[0] += 1.0
            progress.step(state.loop)
    assert console.file.getvalue().splitlines()[-1].startswith("steps 6 to 10: 100%, step 10/10, ")


@pytest.mark.parametrize("terminal", [True, False])
def test_mode_none_prints_nothing(terminal):
    text, shown = session("none", terminal=terminal)
    assert text == ""
    assert shown.notices == [Notice("warning", "Hook 'x' failed. The run continues.")]


def test_cursor_is_restored_after_interrupt():
    console = captured(terminal=True)
    task, _ = build(Case())
    with pytest.raises(KeyboardInterrupt), RunConsole(console=console) as shown:  # noqa: PT012
        shown.strategy_started(run_info(Path("out")), task, [])
        raise KeyboardInterrupt
    text = console.file.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_strategy_failing_before_start_is_reported():
    """The console prints the status of a strategy whose start it did not receive."""
    console = captured(terminal=False)
    with RunConsole(console=console) as shown:
        shown.strategy_ended({**SUMMARY, "status": "failed", "final": {}, "training_loss": None})
        shown.strategy_ended({**SUMMARY, "status": "failed", "final": {}, "training_loss": None, "epochs": 1})
    assert console.file.getvalue() == (
        "stride: failed after 155 epochs, 14,105 steps, 1:03\nstride: failed after 1 epoch, 14,105 steps, 1:03\n"
    )


def test_end_shows_strategy_comparison_and_folder():
    """Treatments and failed hooks of each strategy are listed below the comparison."""
    text, _ = session("normal", terminal=False)
    rows = [line.split() for line in text.splitlines()]
    assert ["stride", "epoch", "154", "155", "0.01235", "1", "0.9951", "1:03"] in rows
    assert ["fixed-random", "not", "reached", "420", "0.01235", "0.99", "0.2", "1:03"] in rows
    assert " fixed-random: treatments: grad_clip\n fixed-random: failed hooks: fourier\n" in text
    assert "Results: output/mod_arithmetic/ with stride, fixed-random\n" in text


def test_a_single_strategy_is_not_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a folder without runs in output/
    console = captured(terminal=False)
    RunConsole(console=console).ended([SUMMARY])
    assert console.file.getvalue() == (
        "Results: output/mod_arithmetic/stride\nNext: loopscope show output/mod_arithmetic/stride\n"
    )


@pytest.mark.parametrize(("mode", "hooks"), [("normal", ""), ("verbose", "  hooks: none\n")])
def test_header_shows_size_length_and_folder(mode, hooks):
    console = captured(terminal=False)
    task = TrainingTask(nn.Linear(9, 1), None, range(7), None, length=1000)
    RunConsole(mode, console=console).strategy_started(run_info(Path("out/x"), loop="step"), task, [])
    assert console.file.getvalue() == (
        f"exp only: Linear of 10 parameters, 7 batches per epoch, at most 1,000 steps\n{hooks}  output: out/x\n"
    )


def test_warning_handler_is_restored_after_an_error():
    """While it is replaced, multi-line warnings arrive as one line."""
    before, seen = warnings.showwarning, []
    with pytest.raises(ZeroDivisionError), show_warnings(lambda *shown: seen.append(shown)), warnings.catch_warnings():  # noqa: PT012
        warnings.simplefilter("always")
        warnings.warn("one\n  two", stacklevel=1)
        raise ZeroDivisionError
    assert seen == [("warning", "one two")]
    assert warnings.showwarning is before


def test_run_notices_are_shown_as_notes():
    """Other warnings are shown as warnings."""
    console = captured(terminal=False)
    with RunConsole(console=console), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("Left out: 'x'.", RunNotice, stacklevel=1)
        warnings.warn("Spikes.", stacklevel=1)
    assert console.file.getvalue() == "note: Left out: 'x'.\nwarning: Spikes.\n"


def test_repeated_warning_is_shown_once_with_count():
    """A silent run shows warnings and notes at its end."""
    console = captured(terminal=False)
    with RunConsole("silent", console=console), warnings.catch_warnings():
        warnings.simplefilter("always")
        for sentence in ("Spikes.", "Left out.", "Spikes.", "Spikes."):
            warnings.warn(sentence, RunNotice if sentence == "Left out." else UserWarning, stacklevel=1)
    assert console.file.getvalue() == "warning: Spikes. (3 times)\nnote: Left out.\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_live_without_terminal_falls_back_to_normal(terminal):
    """A note explains it, and the full screen is not entered."""
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal, force_interactive=False)
    with RunConsole("live", console=console) as shown:
        assert [sink.name for sink in shown.sinks()] == ["alerts", "progress", "console"]
    text = console.file.getvalue()
    assert "\x1b[?1049h" not in text
    assert plain(text).startswith("note: The live display needs a terminal; the output is plain lines instead.")


class Closed(io.StringIO):
    """A broken pipe."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("mode", ["normal", "silent", "live"])
@pytest.mark.parametrize("terminal", [True, False])
def test_run_continues_after_output_is_closed(mode, terminal):
    """A broken pipe never ends a run in any display mode."""
    console = LastingConsole(file=Closed(), width=80, force_terminal=terminal, force_interactive=terminal)
    now = [0.0]
    with RunConsole(mode, console=console, clock=lambda: now[0]) as shown, warnings.catch_warnings():
        warnings.simplefilter("always")
        task, state = build(Case(loop="step"), steps=10)
        progress = shown.strategy_started(run_info(Path("out"), loop="step"), task, [])
        for state.loop.step in range(1, 11):
            now[0] += 60.0
            progress.step(state.loop)
        shown.strategy_ended(SUMMARY)
        shown.ended([SUMMARY, OTHER])


def test_pipe_gets_no_control_codes(monkeypatch, capsys):
    """This holds even if FORCE_COLOR is set."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    make_console().print(Text("[bold red]text", "bold red"))
    assert capsys.readouterr().out == "[bold red]text\n"


@pytest.mark.parametrize(("columns", "width"), [("0", 80), ("1", 20), ("33", 33)])
def test_console_has_a_least_width(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    assert make_console().width == width


def alerts_shown(mode, *, snapshots=()):
    """Show alerts of two kinds in epochs 0 to 4, two batches of epoch + 1 each, with SNAPSHOTs."""
    console = captured(terminal=False)
    with RunConsole(mode, console=console) as display:
        for sink in (sinks_of_run := display.sinks()):
            sink.set_run_context(run_info(Path("out"), "stride"))
        for epoch in range(5):
            for kind in ("a", "b") if epoch else ("a",):
                alerts = [Alert(f"{kind} went wrong at {step}.", metric=kind, step=step) for step in range(epoch + 1)]
                for alert in alerts:
                    alert.hook, alert.epoch = "h", epoch
                    warnings.warn_explicit(alert, Alert, "file.py", 1)  # like the visit; the display ignores it
                for sink in sinks_of_run:
                    sink.alert(alerts)
                    sink.alert(alerts)
            for sink in sinks_of_run if epoch in snapshots else ():
                sink.emit({"x/y": 1.0}, epoch, HookPoint.POST_EPOCH, step=epoch)
                sink.snapshot(epoch, epoch)
        for sink in sinks_of_run:
            sink.close("completed")
    return console.file.getvalue().splitlines()


@pytest.mark.filterwarnings("always")
def test_repeated_alerts_are_counted_and_shown_once():
    """At most one alert of a kind is shown per epoch and between two snapshots, with the count of the others."""
    assert alerts_shown("normal", snapshots=(0, 2)) == [
        "alert: h/a: a went wrong at 0.",
        "stride, epoch 0, step 0: x/y 1; 1 value not recorded; alerts: 2 h/a",
        "alert: h/a: a went wrong at 0. (and 1 more in epoch 1)",
        "alert: h/b: b went wrong at 0. (and 1 more in epoch 1)",
        "stride, epoch 2, step 2: x/y 1; 1 value not recorded; alerts: 10 h/a, 10 h/b",
        "alert: h/a: a went wrong at 0. (and 3 more in epoch 3)",
        "alert: h/b: b went wrong at 0. (and 3 more in epoch 3)",
    ]


@pytest.mark.filterwarnings("always")
def test_silent_display_summarizes_alerts_at_the_end():
    """Each kind of alert is one line with its count, and mode none shows nothing."""
    assert alerts_shown("silent") == [
        "alert: stride: h/a: a went wrong at 0. (and 29 more)", "alert: stride: h/b: b went wrong at 0. (and 27 more)",
    ]  # fmt: skip
    assert alerts_shown("none") == []


def test_paired_progress_metrics_are_explained_at_start():
    """The header lists the metrics of a label with two values, and omits labels with one."""
    console = captured(terminal=False)
    task = TrainingTask(nn.Linear(9, 1), None, range(7), None, length=1000)
    names = {"over": ["h/elements", "h/tensors"], "loss": ["h/loss"]}
    RunConsole(console=console, progress_metrics=names).strategy_started(run_info(Path("out")), task, [])
    assert "  over a/b: h/elements / h/tensors\n" in console.file.getvalue()
    assert "loss" not in console.file.getvalue()


@pytest.mark.parametrize("mode", ["normal", "verbose"])
def test_end_lists_output_files_and_next_commands(tmp_path, mode):
    """Folder and next command come last; of the verbose display also record, alerts, weights and a plot command."""
    summaries = [
        {**summary, "output_dir": str(tmp_path / "an exp" / summary["strategy"])} for summary in (SUMMARY, OTHER)
    ]
    for index, summary in enumerate(summaries):
        folder = Path(summary["output_dir"])
        folder.mkdir(parents=True)
        for name in (f"{summary['strategy']}.jsonl", f"{summary['strategy']}_final.pt", "summary.json"):
            (folder / name).touch()
        alerts = [Alert("High."), Alert("A spike.", severity="info"), Recovery("Over.")]
        (folder / "alerts.jsonl").write_text(
            "".join(f"{json.dumps(a.record() | {'step': 1})}\n" for a in alerts[index:])
        )
    console = captured(terminal=False)
    shown = RunConsole(mode, console=console)
    for sink in shown.sinks():
        sink.set_run_context(run_info(Path("out")))
        sink.emit({"training_metrics/loss": 1.0}, 0, HookPoint.POST_EPOCH, step=1)
    shown.ended(summaries)
    lines = console.file.getvalue().splitlines()
    if mode == "normal":
        assert lines[-2:] == ["Results: an exp/ with stride, fixed-random", "Next: loopscope show 'an exp/stride'"]
        return
    assert lines[-6:] == [
        "Results: an exp/ with stride, fixed-random",
        "  record   STRATEGY.jsonl",
        "  alerts   alerts.jsonl: 1 of stride (and 1 remark), 0 of fixed-random (and 1 remark)",
        "  weights  STRATEGY_final.pt",
        "Next: loopscope show 'an exp/stride'",
        "      loopscope plot 'an exp' --metrics training_metrics/loss",
    ]


@pytest.mark.parametrize(("mode", "titles"), [("normal", []), ("verbose", ["stride: overflow", "stride: other"])])
def test_hook_tables_need_verbose_display(mode, titles):
    summary = {**SUMMARY, "hook_tables": {"overflow": {"a": {"n": 1}, "b": {"n": 2}}, "other": {"c": {"n": 1}}}}
    console = captured(terminal=True)
    RunConsole(mode, console=console).strategy_ended(summary)
    lines = plain(console.file.getvalue()).splitlines()
    assert [line for line in lines if line.startswith("stride: o")] == titles


PROBLEM = {"id": "loss-rising", "severity": "critical", "step": 40, "evidence": [], "why": "The loss rises.",
           "next": "Halve the learning rate.", "confidence": 0.9}  # fmt: skip


@pytest.mark.parametrize("width", [40, 120])
def test_findings_follow_the_result(width):
    """At most three are shown, wrapped in the terminal without a cut, and the doctor is the next command."""
    findings = [{**PROBLEM, "id": f"loss-rising-{number}"} for number in range(5)] + [{**PROBLEM, "severity": "info"}]
    console = captured(terminal=True, width=width)
    shown = RunConsole(console=console)
    shown.strategy_ended({**SUMMARY, "findings": findings})
    shown.ended([{**SUMMARY, "findings": findings}])
    lines = [line.rstrip() for line in plain(console.file.getvalue()).splitlines()]
    begin = next(index for index, line in enumerate(lines) if line.startswith("critical: loss-rising-0, from"))
    end = lines.index("    2 more with loopscope doctor.")
    found = " ".join(" ".join(lines[begin:end]).split())
    assert found.count("The loss rises. next: Halve the learning rate.") == 3
    assert all(len(line) <= width for line in lines[begin:end])
    assert "Next: loopscope doctor output/mod_arithmetic/stride" in lines


def test_remarks_are_not_shown_at_the_end():
    console = captured(terminal=False)
    RunConsole(console=console).strategy_ended({**SUMMARY, "findings": [{**PROBLEM, "severity": "info"}]})
    assert len(console.file.getvalue().splitlines()) == 1


@pytest.mark.parametrize("mode", ["normal", "silent"])
def test_trainers_have_their_own_bar(mode):
    """Without a bar nothing is drawn on a terminal after the header, where that of the Trainer follows."""
    console = captured(terminal=True)
    with RunConsole(mode, console=console, bar=False) as shown:
        task, state = build(Case(loop="step"), steps=40)
        progress = shown.strategy_started(run_info(Path("out"), loop="step"), task, [])
        header = console.file.getvalue()
        progress.step(state.loop)
    assert console.file.getvalue() == header
    assert "━" not in header
