"""The command that ``loopscope check`` runs, with a progress bar below its output."""

import codecs
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any, TextIO

WIDTH = 34
"""Columns for what is tried, so that the bar keeps its length."""
WATCHING = "watching the updates that follow"
END_OF_OUTPUT = 2.0
"""Seconds in which output may follow the end of the command, such as that of its children."""


def run_with_progress(
    command: Sequence[str],
    settings: Mapping[str, str],
    content: Callable[[], Mapping[str, Any]],
    streams: tuple[Any, Any] = (None, None),
    *,
    ends: bool = False,
) -> int:
    """Run a command with a progress bar, and return its exit status.

    Args:
        command: the command.
        settings: further environment variables.
        content: returns the results so far, without entries before the first step.
        streams: where its standard output and its standard error go; by default to those of this process.
        ends: interrupt the command after the last law; a script ends itself.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    console = Console(stderr=True)
    text = TextColumn("{task.description}", table_column=Column(width=WIDTH, no_wrap=True, overflow="ellipsis"))
    columns = TextColumn("checking"), BarColumn(None), text, TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, expand=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("waiting for the first step", total=None)
        with _started(command, {**os.environ, **settings}, streams, console) as process:
            while process.poll() is None:
                try:
                    time.sleep(0.1)
                    if known := content():
                        # One more than all tries, so that the time continues while updates are watched.
                        tried, total = known["tried"], known["total"]
                        description = known["trying"] if tried < total else WATCHING
                        progress.update(bar, completed=tried, total=total + 1, description=description)
                        if ends and tried >= total:
                            process.send_signal(signal.SIGINT)
                            ends = False
                except KeyboardInterrupt:
                    process.send_signal(signal.SIGINT)
    return process.returncode


@contextmanager
def _started(
    command: Sequence[str], environment: Mapping[str, str], streams: tuple[Any, Any], console: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command; what it writes to the terminal of the bar appears above the bar, by a pseudo-terminal."""
    targets: list[TextIO] = [given or own for given, own in zip(streams, (sys.stdout, sys.stderr), strict=True)]
    if os.name == "nt" or not console.is_terminal or not all(item.isatty() for item in targets):
        yield subprocess.Popen(command, env=environment, stdout=streams[0], stderr=streams[1])
        return
    import pty
    import termios

    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (console.height, console.width))
    process = subprocess.Popen(command, env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    reader = Thread(target=_print_lines, args=(ours, console), daemon=True)
    reader.start()
    yield process
    reader.join(END_OF_OUTPUT)


def _print_lines(terminal: int, console: Any) -> None:
    """Print the complete lines that a command writes to a pseudo-terminal, each in its last version."""
    from rich.text import Text

    decoder, rest = codecs.getincrementaldecoder("utf-8")("replace"), ""
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # Linux reports the end of a terminal by an error
            data = b""
        *lines, rest = (rest + decoder.decode(data, final=not data)).split("\n")
        lines += [rest] if rest and not data else []
        for line in lines:  # a progress bar of the command writes its line again and again
            console.print(Text.from_ansi(line.rstrip("\r").rsplit("\r", 1)[-1]), soft_wrap=True)
        if not data:
            os.close(terminal)
            return
