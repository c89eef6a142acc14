"""``--jobs N``: runs side by side, each in a process of the same program that is told what to train."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

import torch

from ..checkpoints import Signals, StoppedError
from ..console import MARK, Notice, RunsConsole, ToldProgress
from ..errors import LoopscopeError, UsageError, counted
from ..runs import RunFolder, Session, Setup, check_device, seed_name
from .options import Options, config_of, plain, run_options, seeds_of, typed_options, wanted_sinks

ONE_OF_SEVERAL = "one-of-several"
"""The command of such a process, which is told on standard input what to train, and stops where that is closed."""
OWN = "loopscope: "  # begins what the command says
THREADS = "OMP_NUM_THREADS"
REFUSED = 2  # the exit status for bad input
PATIENCE = 0.2  # seconds after which it is looked again who has ended, and what signals ask for


@dataclass(eq=False)
class Job:
    """A run, and the process that trains it once it has begun."""

    name: str
    folder: RunFolder
    told: Mapping[str, Any]
    """What the process is told."""
    trains: bool = False
    """Whether it has told of its progress."""
    last: str = ""
    """The last line that it printed, or rather the command in it, with which failures end."""

    def begin(self, environment: Mapping[str, str]) -> None:
        """Start the process."""
        # In a group of its own it is not reached by the terminal's Ctrl-C: it would be told twice to stop.
        self.process = subprocess.Popen(
            [*_this_program(), ONE_OF_SEVERAL],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            encoding="utf-8",
            errors="backslashreplace",
            process_group=0,
        )
        with suppress(OSError):  # it may be gone already
            print(json.dumps(self.told), file=self.process.stdin, flush=True)

    def closed(self) -> None:
        """Wait for the end of the process."""
        self.process.wait()
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()

    @property
    def problem(self) -> str:
        """How the process has failed, or nothing."""
        status = self.process.returncode
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return (self.last.removeprefix(OWN) or f"ended with status {status}") if status else ""


@dataclass
class SideBySide:
    """Runs that train side by side, ``at_once`` at a time, and are shown on one console."""

    waiting: list[Job]
    at_once: int
    environment: Mapping[str, str]
    console: RunsConsole
    signals: Signals = field(default_factory=Signals)
    _stopping: bool = False
    _running: list[Job] = field(default_factory=list)
    _listening: dict[Job, threading.Thread] = field(default_factory=dict)
    _lines: "SimpleQueue[tuple[Job, str]]" = field(default_factory=SimpleQueue)

    def run(self) -> Iterator[Job]:
        """Train all, whether or not some fail, and yield each as it ends; a signal stops all with their checkpoints.

        A second signal interrupts them at once; whatever ends this, no process is left behind.
        """
        try:
            while self._running or self.waiting:
                while self.waiting and len(self._running) < self.at_once:
                    self._begin(self.waiting.pop(0))
                self._read(PATIENCE)
                self._pass_on_signals()
                for job in [job for job in self._running if job.process.poll() is not None]:
                    self._listening[job].join(1.0)  # a process that it left behind may hold its output open
                    self._read(0.0)
                    self._running.remove(job)
                    job.closed()
                    if job.process.returncode == REFUSED and not any(other.trains for other in self._listening):
                        self.waiting.clear()  # what is refused here before any has begun is refused of all
                    yield job
        finally:
            for job in self._running:
                job.process.terminate()
            for job in self._running:
                job.closed()

    def _begin(self, job: Job) -> None:
        job.begin(self.environment)
        self._running.append(job)
        self._listening[job] = threading.Thread(target=self._listen, args=(job,), daemon=True)
        self._listening[job].start()
        self.console.progressed(job.name, "starting")

    def _listen(self, job: Job) -> None:
        assert job.process.stdout is not None
        with job.process.stdout as lines:
            for line in lines:
                self._lines.put((job, line.rstrip("\n")))

    def _read(self, seconds: float) -> None:
        """Show what the processes tell; where they tell nothing wait for it."""
        with suppress(Empty):
            while True:
                job, line = self._lines.get(timeout=seconds)
                seconds = 0.0
                printed, tells, progress = line.partition(MARK)
                if tells:
                    job.trains = True
                    self.console.progressed(job.name, progress)
                if printed or not tells:
                    self._printed(job, printed)

    def _printed(self, job: Job, line: str) -> None:
        if notice := re.fullmatch(rf"{OWN}(note|warning): (.*)", line):
            self.console.notify(job.name, Notice("note" if notice[1] == "note" else "warning", notice[2]))
            return
        if line.startswith(OWN):  # which is told in the end
            job.last = line
            return
        if line.strip() and not job.last.startswith(OWN):
            job.last = line.strip()
        self.console.printed(job.name, line)

    def _pass_on_signals(self) -> None:
        asked, self.signals.asked = self.signals.asked, False
        for job in self._running:
            if asked and job.trains:
                job.process.send_signal(signal.SIGUSR1)
            if self.signals.stop is not None and not self._stopping:
                job.process.terminate()
        if self.signals.stop is not None:
            self._stopping = True
            self.waiting.clear()


def train_side_by_side(plan: Sequence[Setup], options: Options, console: RunsConsole) -> None:
    """Train what is planned in processes of its own; runs that are done stay as they are.

    Raises in the end :class:`LoopscopeError` that names the runs that failed and their folders, and
    :class:`UsageError` if all were refused before anything was written.
    """
    seeds = seeds_of(options)
    common = {"argv": sys.argv[1:], "options": plain(options)}
    jobs, summaries = {}, {}
    for setup in plan:
        folder, seed = setup.folder, setup.record.config["seed"]
        name = " ".join([folder.strategy, *([seed_name(seed)] if seeds else ())])
        jobs[name] = Job(
            name, folder, {**common, "experiment": setup.record.experiment, "strategy": folder.strategy, "seed": seed}
        )
        summaries[name] = setup.summary
    waiting = [job for name, job in jobs.items() if summaries[name] is None]
    at_once = max(1, min(options["jobs"], len(waiting)))
    threads = str(max(1, torch.get_num_threads() // at_once))
    together = SideBySide(waiting, at_once, {THREADS: threads, **os.environ}, console)
    failed: list[Job] = []
    with console, together.signals.caught():
        if THREADS not in os.environ:
            sentence = f"{counted(at_once, 'process', 'processes')} side by side share the processor: {THREADS}="
            console.notify("", Notice("note", f"{sentence}{threads} for each, since it is not set."))
        for job in together.run():
            summary = None if job.problem else job.folder.completed()
            summaries[job.name] = summary
            refused = job.process.returncode == REFUSED  # which is told in the end
            console.ended(job.name, summary, "" if refused else "stopped" if together.signals.stop else "failed")
            failed += [job] * (summary is None)
    completed = [summary for summary in summaries.values() if summary is not None]
    console.concluded(completed)
    if together.signals.stop is not None:
        raise StoppedError(together.signals.stop)
    if failed and not completed and all(job.process.returncode == REFUSED for job in failed):
        raise UsageError(" ".join(dict.fromkeys(job.problem for job in failed)))
    if failed:
        told = " ".join(f"{job.name}, in {job.folder.path}: {job.problem.rstrip('.')}." for job in failed)
        raise LoopscopeError(f"{len(failed)} of {counted(len(jobs), 'run')} failed. {told}")


def train_one_of_several() -> None:
    """Train what the process at the other end of standard input tells, and tell it of the progress."""
    told = json.loads(sys.stdin.readline())
    sys.argv[1:] = told["argv"]
    threading.Thread(target=_stop_with_the_other_end, daemon=True).start()
    experiment, options = typed_options(told["experiment"], told["options"])
    config = replace(config_of(experiment, options), seed=told["seed"])
    seeds = [told["seed"]] if seeds_of(options) else []
    chosen = replace(run_options(options), strategies=[told["strategy"]], seeds=seeds)
    runner = experiment(config, check_device(options["device"]))
    Session(runner, chosen, wanted_sinks(options), ToldProgress()).run()


def _stop_with_the_other_end() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _this_program() -> list[str]:
    """Return the words that start this program, as far as those after ``loopscope``."""
    if sys.argv[1:2] not in (["run"], ["resume"]):  # another program, which calls the command
        return [sys.executable, "-m", "loopscope"]
    return [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]]
