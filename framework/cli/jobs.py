"""The option ``--jobs N``: parallel runs, each in a separate process of the same program."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

import torch

from ..checkpoints import Signals, StoppedError
from ..console import MARK, Mode, ProgressMessages, RunConsole, RunsLine, lost_rows_text, printable, watch
from ..errors import LoopscopeError, RunNotice, UsageError, counted, short_path, warn
from ..interruption import ignore_signal
from ..runs import INCOMPLETE, RunFolder, Session, StrategyPlan, check_device
from ..sweeps import job_signals
from .options import Options, config_of, plain, run_options, seeds_of, typed_options, wanted_sinks
from .parser import ONE_OF_SEVERAL

# Prefixes of the lines that the command prints.
COMMAND_PREFIX = "loopscope: "
NOTE_PREFIX, WARNING_PREFIX = f"{COMMAND_PREFIX}note: ", f"{COMMAND_PREFIX}warning: "
THREADS = "OMP_NUM_THREADS"
REFUSED = 2  # the exit status for bad input
STARTING = "starting"  # until the process reports a step
POLL_INTERVAL = 0.2  # seconds between two checks for ended processes and for signals


@dataclass(eq=False)
class RunProcess:
    """A run in a separate process."""

    folder: RunFolder
    task: Mapping[str, Any]  # what the process trains, sent as JSON
    last: str = ""  # the last line that it printed; a line of the loopscope command takes precedence

    def start(self, environment: Mapping[str, str], lines: "SimpleQueue[tuple[RunProcess, str]]") -> None:
        """Start the process, and put each line of its output into ``lines``."""
        is_command = sys.argv[1:2] in (["run"], ["resume"])  # otherwise another program called main()
        program = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1] if is_command else ["-m", "loopscope"]
        piped: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        piped |= {"errors": "backslashreplace", "env": environment}
        # A separate process group does not receive the terminal's Ctrl-C, which would stop the process twice.
        command = [sys.executable, *program, ONE_OF_SEVERAL]
        self.process = subprocess.Popen(command, encoding="utf-8", process_group=0, **piped)
        self._listener = threading.Thread(target=self._listen, args=(lines,), daemon=True)
        self._listener.start()
        with suppress(OSError):  # the process may have ended already
            print(json.dumps(self.task), file=self.process.stdin, flush=True)

    def _listen(self, lines: "SimpleQueue[tuple[RunProcess, str]]") -> None:
        for line in self.process.stdout or ():
            lines.put((self, line.rstrip("\n")))

    def close(self) -> None:
        """Wait until the process and its output have ended."""
        self.process.wait()
        self._listener.join(1.0)  # an orphaned child process may keep the output open
        for stream in (self.process.stdin, None if self._listener.is_alive() else self.process.stdout):
            with suppress(OSError):
                stream.close() if stream else None

    @property
    def problem(self) -> str:
        """Why the process failed; empty if it did not."""
        status = self.process.returncode
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return (self.last.removeprefix(COMMAND_PREFIX).rstrip(".") or f"ended with status {status}") if status else ""


@dataclass
class ParallelRuns:
    """Parallel runs, at most ``at_once`` at a time, with one status line; ``signals`` stop them."""

    waiting: list[RunProcess]
    at_once: int
    line: RunsLine
    signals: Signals
    _running: list[RunProcess] = field(default_factory=list)
    _lines: "SimpleQueue[tuple[RunProcess, str]]" = field(default_factory=SimpleQueue)

    def run(self, environment: Mapping[str, str]) -> Iterator[RunProcess]:
        """Train all runs, even if some fail, and yield each when it ends.

        A signal lets every run write its checkpoint and stop; a second signal stops them immediately. No process
        outlives this generator.
        """
        is_stopping = False
        try:
            while self._running or self.waiting:
                while self.waiting and len(self._running) < self.at_once:
                    self._running.append(self.waiting.pop(0))
                    self._running[-1].start(environment, self._lines)
                    self.line.running[self._running[-1].folder.name] = STARTING
                self._read(POLL_INTERVAL)
                self._forward_checkpoint_requests()
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

    def _forward_checkpoint_requests(self) -> None:
        """Forward a request for checkpoints to all runs that have taken a step: the signal would end the others."""
        is_requested, self.signals.checkpoint_requested = self.signals.checkpoint_requested, False
        for job in self._running if is_requested else ():
            if self.line.running[job.folder.name] != STARTING:
                job.process.send_signal(signal.SIGUSR1)

    def _stop(self) -> None:
        for job in self._running:
            job.process.terminate()

    def _read(self, seconds: float) -> None:
        """Show the lines of the processes, waiting at most ``seconds`` for the first."""
        with suppress(Empty):
            while True:
                job, line = self._lines.get(timeout=seconds)
                seconds = 0.0
                printed, marker, progress = line.partition(MARK)
                if marker:
                    self.line.running[job.folder.name] = progress
                if printed or not marker:
                    self._show_line(job, printed)
        self.line.show()

    def _show_line(self, job: RunProcess, line: str) -> None:
        if line.startswith(NOTE_PREFIX):
            warn(line.removeprefix(NOTE_PREFIX), RunNotice, stacklevel=1)
        elif line.startswith(WARNING_PREFIX):
            warn(f"{job.folder.name}: {line.removeprefix(WARNING_PREFIX)}", stacklevel=1)
        elif line.startswith(COMMAND_PREFIX):  # reported at the end
            job.last = line
        else:
            job.last = job.last if job.last.startswith(COMMAND_PREFIX) else line
            self.line.console.print(f"{job.folder.name}: {printable(line)}", soft_wrap=True)


def train_in_parallel(
    plans: Sequence[StrategyPlan], options: Options, mode: Mode, compared_to: Mapping[str, str]
) -> None:
    """Train the planned runs in separate processes; completed runs are skipped.

    Raises:
        LoopscopeError: after all runs have ended, with the failed runs and their folders.
        UsageError: if all runs were refused before anything was written.
    """
    summaries = {plan.folder.name: plan.summary for plan in plans}
    unfinished = [plan for plan in plans if plan.summary is None]
    waiting = [RunProcess(plan.folder, task_of(plan, options)) for plan in unfinished]
    at_once = max(1, min(options["jobs"], len(waiting)))
    threads = str(max(1, torch.get_num_threads() // at_once))
    signals, failed = Signals(), list[RunProcess]()
    display = RunConsole("normal" if mode == "live" else mode, compared_to=compared_to)
    line = status_line(display, len(waiting), mode)
    with display, signals.deferred(), closing(line):
        if mode == "live":
            notice = "--live shows one run only; with --jobs, one line shows all runs."
            warn(notice, RunNotice, stacklevel=1)
        if THREADS not in os.environ:
            notice = f"{counted(at_once, 'process', 'processes')} share the processor: {THREADS} is {threads} for each."
            warn(notice, RunNotice, stacklevel=1)
        for job in ParallelRuns(waiting, at_once, line, signals).run({THREADS: threads, **os.environ}):
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
        problems = " ".join(f"{job.folder.name}, in {short_path(job.folder.path)}: {job.problem}." for job in failed)
        raise LoopscopeError(f"{len(failed)} of {counted(len(plans), 'run')} failed. {problems}")


def status_line(display: RunConsole, total: int, mode: Mode) -> RunsLine:
    """Return the line that shows how many of several runs have ended; without a display it is never due."""
    return RunsLine(display.console, total, clock=time.monotonic if mode != "none" else lambda: -math.inf)


def task_of(plan: StrategyPlan, options: Options) -> dict[str, Any]:
    """Return what :func:`train_one_of_several` needs to train a planned run, as plain values."""
    common = {"argv": sys.argv[1:], "options": plain(options), "experiment": plan.record.experiment}
    return {**common, "of": [plan.folder.strategy, plan.seed]}


def train_one_of_several(words: Sequence[str]) -> None:
    """Train a run: that of the word, in a job, or that which the parent process sends on standard input.

    The parent receives the progress of the run, and ends it by closing the pipe.
    """
    task = json.loads(words[0] if words else sys.stdin.readline())
    sys.argv[1:] = task["argv"]
    if not words:
        signal.signal(signal.SIGUSR1, ignore_signal)  # outside a step, a checkpoint request must not end the process
        threading.Thread(target=_stop_with_parent, daemon=True).start()
    experiment, options = typed_options(task["experiment"], task["options"])
    strategy, seed = task["of"]
    config = replace(config_of(experiment, options), seed=seed)
    seeds = [seed] if seeds_of(options) else []
    selected = replace(run_options(options, experiment), strategies=[strategy], seeds=seeds)
    session = Session(experiment(config, check_device(options["device"])), selected, wanted_sinks(options))
    if words:
        require_all_rows(watch(replace(session, signals=job_signals()), "normal"))
    else:
        require_all_rows(replace(session, display=ProgressMessages()).run())


def require_all_rows(summaries: Sequence[Mapping[str, Any]]) -> None:
    """Raise :class:`LoopscopeError`, after which the command ends with status 1, if sinks have lost rows."""
    incomplete = [summary for summary in summaries if summary["status"] == INCOMPLETE]
    texts = [f"{run['strategy']}: the training is complete, but {lost_rows_text(run)}." for run in incomplete]
    if texts:
        raise LoopscopeError(" ".join(texts))


def _stop_with_parent() -> None:
    os.read(0, 1)  # returns when the parent closes the pipe or ends
    os.kill(os.getpid(), signal.SIGTERM)
