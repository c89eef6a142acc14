"""Full screen in a terminal, and the restored terminal afterwards."""

import os
import re
import signal
import sys
import time

import pytest
from loopscope.console.terminal import SIGNALS

from tests.framework.console.live_session import HOOKS, METRICS, Session, run_session, step_until, warn
from tests.framework.console.terminals import Process, show

pytestmark = pytest.mark.process

SIZES = [(80, 24), (160, 50)]


def shows(text):
    return lambda terminal: any(text in line for line in terminal.display)


def numbers(lines):
    """Return the numbers next to metrics."""
    return re.findall(r"metric_\d +([^ ↑↓→│]+)", "\n".join(lines))


@pytest.mark.parametrize(("columns", "lines"), SIZES)
def test_screen_shows_progress_metrics_and_warnings(columns, lines):
    """Results, live and hook metrics, notes and counts of messages are readable in terminals of several sizes."""
    (screen,) = show(run_session, columns, lines).left
    text = "\n".join(screen)
    for part in (
        "exp  only",
        "step 5/10",
        "stride",
        "fixed-random",
        "accuracy",
        "val_acc",
        "hook_00",
        "warning: The loss",
    ):
        assert part in text
    assert re.search(r"1 warning, 1 note, 1 printed line, shown at the end ─", text)
    assert "note: Left out: 'x'." in text
    assert len(screen) == lines


@pytest.mark.parametrize(("columns", "lines"), [*SIZES, (100, 30), (60, 20)])
def test_sidebar_numbers_are_never_cut(columns, lines):
    """Every number on the screen is a whole value of a metric at every terminal size."""
    (screen,) = show(run_session, columns, lines).left
    found = numbers(screen)
    assert len(found) >= (HOOKS * METRICS if columns == 160 else 1)
    assert set(found) <= {
        f"{hook + metric / 8 + step:.4g}" for hook in range(18) for metric in range(6) for step in (4, 5)
    }


@pytest.mark.parametrize(("columns", "lines"), [(1, 1), (5, 2), (20, 5), (30, 8), (40, 10), (300, 90)])
def test_a_terminal_of_any_size_is_drawn_on(columns, lines):
    terminal = show(run_session, columns, lines)
    assert len(terminal.left) == 1
    assert terminal.is_restored


def test_sparklines_and_arrows_show_the_trend():
    def body():
        session = Session()
        with session.console:
            session.begin()
            for _ in range(4):
                session.step()
            session.console._exit.pop_all()
            os._exit(0)

    terminal = show(body)
    rows = {
        line.rpartition("│")[2].split()[0]: line.split()[-1] for line in terminal.display if re.search("[↑↓→] *$", line)
    }
    assert {name: rows[name] for name in ("val_acc", "train_acc", "loss")} == {
        "val_acc": "▁▃▆█↑",
        "train_acc": "▁▁▁▁→",
        "loss": "█▆▃▁↓",
    }


def test_exit_prints_the_normal_output_in_order():
    """After the screen closes, the terminal has the normal lines, warnings and prints."""
    terminal = show(run_session, 80, 50)
    text = " ".join("\n".join(terminal.lines_shown).split())
    assert terminal.is_restored
    parts = ["exp only: ", "warning: The loss is 0.123456789", "note: Left out: 'x'.", "printed by the experiment"]
    parts += [
        "stride: target reached",
        "fixed-random: stopped at the limit",
        "strategy target",
        "Results: output/mod_arithmetic/",
    ]
    assert [text.index(part) for part in parts] == sorted(text.index(part) for part in parts)


@pytest.mark.parametrize("exported", [{}, {"COLUMNS": "80", "LINES": "24"}], ids=["", "size exported"])
def test_screen_follows_terminal_size(exported, monkeypatch):
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in exported.items():
        monkeypatch.setenv(name, value)
    process = Process(step_until, 80, 24)
    process.read_until(shows("newest metrics"))
    process.resize(160, 50)
    terminal = process.read_until(
        lambda terminal: "hook_17" in "".join(terminal.display) and " of 1" not in terminal.display[3]
    )
    assert max(len(line.rstrip()) for line in terminal.display) > 120
    process.resize(60, 20)
    process.read_until(lambda terminal: terminal.display[0].startswith("exp") and len(terminal.display) == 20)
    process.type(b"\x03")
    assert process.finish().is_restored


def test_ctrl_c_restores_the_terminal():
    """The process exits with status 130, and the terminal has its old modes."""
    process = Process(step_until)
    before = process.modes()
    process.read_until(shows("newest metrics"))
    process.type(b"\x03")
    terminal = process.finish()
    assert process.status == 130
    assert terminal.is_restored
    assert len(terminal.left) == 1
    assert "exp only" in terminal.lines_shown[1]  # after the echo of the key that started it
    assert process.modes_left == before


def test_error_restores_terminal_and_prints_warnings():
    """The warnings come before the error."""

    def body():
        session = Session()
        with session.console:
            session.begin()
            session.step()
            warn("Something went wrong before.")
            raise ZeroDivisionError("in a hook")

    process = Process(body)
    terminal = process.finish()
    assert process.status == 1
    assert terminal.is_restored
    assert terminal.lines_shown[-2:] == ["warning: Something went wrong before.", "raised ZeroDivisionError: in a hook"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_fatal_signal_restores_the_terminal_first(number):
    """The process then ends by SIGTERM, SIGHUP or SIGQUIT."""
    process = Process(step_until)
    process.read_until(shows("newest metrics"))
    process.kill(number)
    assert process.finish().is_restored
    assert process.status == -number


def test_signal_restores_a_slow_terminal():
    """A terminal with unread output is restored too when SIGTERM ends the process."""
    process = Process(step_until)
    process.read_until(shows("newest metrics"))
    time.sleep(1)  # meanwhile drawings fill the output buffer of the terminal
    process.kill(signal.SIGTERM)
    time.sleep(0.1)
    assert process.finish().is_restored
    assert process.status == -signal.SIGTERM


def shell():
    """Run ``step_until`` as a shell job: in the foreground, and again after a stop and a key press."""
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    job = os.fork()
    if job == 0:
        os.setpgid(0, 0)
        step_until()
    os.setpgid(job, job)
    os.tcsetpgrp(0, job)
    assert os.WIFSTOPPED(os.waitpid(job, os.WUNTRACED)[1])
    os.tcsetpgrp(0, os.getpgrp())
    os.write(1, b"[stopped]")
    os.read(0, 1)
    os.tcsetpgrp(0, job)
    os.kill(job, signal.SIGCONT)
    os.waitpid(job, 0)


def test_ctrl_z_restores_terminal_until_resumed():
    """The screen is drawn again when the process returns to the foreground."""
    process = Process(shell)
    process.read_until(shows("newest metrics"))
    process.type(b"\x1a")
    assert process.read_until(shows("[stopped]")).is_restored
    process.type(b"\n")
    process.read_until(lambda terminal: terminal.entered == 2 and shows("newest metrics")(terminal))
    process.type(b"\x03")
    assert process.finish().is_restored


def test_signal_handlers_are_restored():
    def body():
        before = [signal.getsignal(number) for number in SIGNALS]
        run_session()
        assert [signal.getsignal(number) for number in SIGNALS] == before
        assert type(sys.stdout).__name__ == "TextIOWrapper"

    assert show(body).is_restored


def test_forked_process_does_not_change_terminal():
    def body():
        session = Session()
        with session.console:
            session.begin()
            session.step()
            child = os.fork()
            if child == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
            session.step()
            session.end()

    terminal = show(body)
    assert len(terminal.left) == terminal.entered == 1


def test_stopped_terminal_does_not_block_training():
    """After Ctrl-S drawings are skipped and steps continue; after Ctrl-Q the newest drawing appears."""
    marker = os.pipe()

    def body():
        session = Session()
        with session.console:
            session.begin()
            os.write(marker[1], b"!")  # between drawings, since a drawing in progress would wait
            os.read(0, 1)
            for _ in range(400):
                session.step(waits=False)
                os.write(marker[1], b".")
            session.end()

    process = Process(body)
    process.read_until(shows("newest metrics"))
    assert os.read(marker[0], 1) == b"!"
    process.type(b"\x13\n")
    steps = b""
    while len(steps) < 400:
        steps += os.read(marker[0], 400)
    process.type(b"\x11")
    assert process.finish().is_restored
    assert process.status == 0


def test_next_drawing_overwrites_library_output():
    """A library writes directly on the screen."""

    def body():
        session = Session()
        with session.console:
            session.begin()
            session.step()
            os.write(1, b"\x1b[2;1Hgarbage from a library")
            session.step()
            session.end()

    (screen,) = show(body).left
    assert "garbage" not in "\n".join(screen)


@pytest.mark.parametrize(("variable", "value", "colours"), [("TERM", "xterm-256color", True), ("NO_COLOR", "1", False)])
def test_no_color_variable_disables_colors(variable, value, colours, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv(variable, value)
    process = Process(run_session)
    process.finish()
    assert bool(re.search(rb"\x1b\[[\d;]*(3\d|38|48)[;m]", process.bytes)) == colours


def test_dumb_terminal_gets_plain_lines(monkeypatch):
    """A note explains that --live needs a terminal."""
    monkeypatch.setenv("TERM", "dumb")
    process = Process(run_session)
    terminal = process.finish()
    assert b"\x1b" not in process.bytes
    assert terminal.entered == 0
    assert b"note: The live display needs a terminal;" in process.bytes
