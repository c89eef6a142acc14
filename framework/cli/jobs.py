"""``--jobs N``: runs side by side, each in a process of the same program that is told what to train."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

import torch

from ..checkpoints import Signals, StoppedError
from ..console import MARK, Mode, RunConsole, RunsLine, ToldProgress, printable
from ..errors import LoopscopeError, RunNotice, UsageError, counted
from ..runs import RunFolder, Session, Setup, check_device
from .options import Options, config_of, plain, run_options, seeds_of, typed_options, wanted_sinks

ONE_OF_SEVERAL = "one-of-several"
"""The command of such a process, which is told on standard input what to train, and stops where that is closed."""
OWN, NOTE, WARNING = "loopscope: ", "loopscope: note: ", "loopscope: warning: "  # how lines of the command begin
THREADS = "OMP_NUM_THREADS"
REFUSED = 2  # the exit status for bad input
STARTING = "starting"  # until it tells of a step
PATIENCE = 0.2  # seconds after which it is looked again who has ended, and what signals ask for


@dataclass(eq=False)
class Job:
    """A run in a process of its own."""

    folder: RunFolder
    told: Mapping[str, Any]  # what the process is told
    last: str = ""  # the last line that it printed, or rather the command in it, with which failures end

    def begin(self, environment: Mapping[str, str], lines: "SimpleQueue[tuple[Job, str]]") -> None:
        """Start the process, whose output goes to ``lines``."""
        is_command = sys.argv[1:2] in (["run"], ["resume"])  # otherwise another program calls it
        program = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1] if is_command else ["-m", "loopscope"]
        piped: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        piped |= {"errors": "backslashreplace", "env": environment}
        # A process group of its own, not that of the terminal's Ctrl-C: it would be told twice to stop.
        command = [sys.executable, *program, ONE_OF_SEVERAL]
        self.process = subprocess.Popen(command, encoding="utf-8", process_group=0, **piped)
        self._listener = threading.Thread(target=self._listen, args=(lines,), daemon=True)
        self._listener.start()
        with suppress(OSError):  # it may be gone already
            print(json.dumps(self.told), file=self.process.stdin, flush=True)

    def _listen(self, lines: "SimpleQueue[tuple[Job, str]]") -> None:
        for line in self.process.stdout or ():
            lines.put((self, line.rstrip("\n")))

    def close(self) -> None:
        """Wait for the end of the process, and of its output."""
        self.process.wait()
        self._listener.join(1.0)  # a process that it has left behind may hold its output open
        for stream in (self.process.stdin, None if self._listener.is_alive() else self.process.stdout):
            with suppress(OSError):
                stream.close() if stream else None

    @property
    def problem(self) -> str:
        """How the process has failed, or nothing."""
        status = self.process.returncode
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return (self.last.removeprefix(OWN).rstrip(".") or f"ended with status {status}") if status else ""


@dataclass
class SideBySide:
    """Runs that train side by side, ``at_once`` at a time, and are told of in a line; ``signals`` stop them."""

    waiting: list[Job]
    at_once: int
    line: RunsLine
    signals: Signals
    _running: list[Job] = field(default_factory=list)
    _lines: "SimpleQueue[tuple[Job, str]]" = field(default_factory=SimpleQueue)

    def run(self, environment: Mapping[str, str]) -> Iterator[Job]:
        """Train all, whether or not some fail, and yield each as it ends; a signal stops all with their checkpoints.

        A second signal interrupts them at once; whatever ends this, no process is left behind.
        """
        is_stopping = False
        try:
            while self._running or self.waiting:
                while self.waiting and len(self._running) < self.at_once:
                    self._running.append(self.waiting.pop(0))
                    self._running[-1].begin(environment, self._lines)
                    self.line.running[self._running[-1].folder.name] = STARTING
                self._read(PATIENCE)
                self._pass_on()
                if self.signals.stop is not None and not is_stopping:
                    is_stopping = True
                    self.waiting.clear()
                    self._stop()
                for job in [job for job in self._running if job.process.poll() is not None]:
                    job.close()
                    self._read(0.0)
                    self._running.remove(job)
                    del self.line.running[job.folder.name]
                    yield job
        finally:
            self._stop()
            for job in self._running:
                job.close()

    def _pass_on(self) -> None:
        """Ask for checkpoints where they were asked for, of all that have begun: the signal would end the others."""
        asked, self.signals.asked = self.signals.asked, False
        for job in self._running if asked else ():
            if self.line.running[job.folder.name] != STARTING:
                job.process.send_signal(signal.SIGUSR1)

    def _stop(self) -> None:
        for job in self._running:
            job.process.terminate()

    def _read(self, seconds: float) -> None:
        """Show what the processes tell; where they tell nothing wait for it."""
        with suppress(Empty):
            while True:
                job, line = self._lines.get(timeout=seconds)
                seconds = 0.0
                printed, tells, progress = line.partition(MARK)
                if tells:
                    self.line.running[job.folder.name] = progress
                if printed or not tells:
                    self._tell(job, printed)
        self.line.show()

    def _tell(self, job: Job, line: str) -> None:
        if line.startswith(NOTE):
            warnings.warn(line.removeprefix(NOTE), RunNotice, stacklevel=1)
        elif line.startswith(WARNING):
            warnings.warn(f"{job.folder.name}: {line.removeprefix(WARNING)}", stacklevel=1)
        elif line.startswith(OWN):  # which is told in the end
            job.last = line
        else:
            job.last = job.last if job.last.startswith(OWN) else line
            self.line.console.print(f"{job.folder.name}: {printable(line)}", soft_wrap=True)


def train_side_by_side(plan: Sequence[Setup], options: Options, mode: Mode, compared_to: Mapping[str, str]) -> None:
    """Train what is planned in processes of its own; runs that are done stay as they are.

    Raises in the end :class:`LoopscopeError` that names the runs that failed and their folders, and
    :class:`UsageError` if all were refused before anything was written.
    """
    common = {"argv": sys.argv[1:], "options": plain(options), "experiment": plan[0].record.experiment}
    summaries = {setup.folder.name: setup.summary for setup in plan}
    left = [setup for setup in plan if setup.summary is None]
    waiting = [Job(setup.folder, {**common, "of": [setup.folder.strategy, setup.seed]}) for setup in left]
    at_once = max(1, min(options["jobs"], len(waiting)))
    threads = str(max(1, torch.get_num_threads() // at_once))
    signals, failed = Signals(), list[Job]()
    display = RunConsole("normal" if mode == "live" else mode, compared_to=compared_to)
    line = RunsLine(display.console, len(waiting), clock=time.monotonic if mode != "none" else lambda: -math.inf)
    with display, signals.deferred(), closing(line):
        if mode == "live":
            told = "--live shows one run on the whole screen; several side by side have a line for all."
            warnings.warn(told, RunNotice, stacklevel=1)
        if THREADS not in os.environ:
            told = f"{counted(at_once, 'process', 'processes')} share the processor: {THREADS} is {threads} for each."
            warnings.warn(told, RunNotice, stacklevel=1)
        for job in SideBySide(waiting, at_once, line, signals).run({THREADS: threads, **os.environ}):
            summary = summaries[job.folder.name] = None if job.problem else job.folder.completed()
            if summary is None:
                failed.append(job)
            else:
                line.done += 1
                display.strategy_ended({**summary, "hook_tables": {}, "sample": None})
        if completed := [summary for summary in summaries.values() if summary is not None]:
            display.ended(completed)
    if signals.stop is not None:
        raise StoppedError(signals.stop)
    if failed and not completed and all(job.process.returncode == REFUSED for job in failed):
        raise UsageError(" ".join(dict.fromkeys(f"{job.problem}." for job in failed)))
    if failed:
        told = " ".join(f"{job.folder.name}, in {job.folder.path}: {job.problem}." for job in failed)
        raise LoopscopeError(f"{len(failed)} of {counted(len(plan), 'run')} failed. {told}")


def train_one_of_several() -> None:
    """Train what the process at the other end of standard input tells, and tell it of the progress."""
    told = json.loads(sys.stdin.readline())
    sys.argv[1:] = told["argv"]
    signal.signal(signal.SIGUSR1, lambda *_: None)  # where no step is under way it asks for nothing, and ends nothing
    threading.Thread(target=_stop_with_the_other_end, daemon=True).start()
    experiment, options = typed_options(told["experiment"], told["options"])
    strategy, seed = told["of"]
    config = replace(config_of(experiment, options), seed=seed)
    chosen = replace(run_options(options), strategies=[strategy], seeds=[seed] if seeds_of(options) else [])
    runner = experiment(config, check_device(options["device"]))
    Session(runner, chosen, wanted_sinks(options), ToldProgress()).run()


def _stop_with_the_other_end() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
