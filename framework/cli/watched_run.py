"""The command of a run that ``loopscope watch`` has recorded, which ``rewind`` and ``verify`` run again."""

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from tempfile import TemporaryDirectory
from typing import Any

from ..checkpoints import DIGESTS, Digest, Divergence, Moment, is_locked, read_digests
from ..durable_files import plain_json
from ..errors import LoopscopeError, UsageError, counted, listed, notice, require, short_path
from ..hooks import treatments
from ..hooks.selection import build_hooks, hook_groups, select_hooks
from ..runs import (
    ATTACHED,
    REWINDS,
    SUMMARY,
    TRAINED,
    DivergedError,
    RunRecord,
    StepRange,
    divergence_error,
    read_outcome,
    read_status,
    refuse_another_run,
    script_digest,
)
from .options import Options, parse_hook_options
from .watch import VARIABLES, variables

PAUSE = 0.2
"""Seconds between two looks at the digests of a command that runs again."""
PATIENCE = 10.0
"""Seconds until a command that was asked to end is killed."""
KEPT = ("loop", "log_every", "audit", "digest_every", "stop_after")
"""Options of ``loopscope watch`` with which a command runs again, besides those of its hooks."""
CAUSE = (
    "The script is not deterministic, or something besides its main file has changed: its data, modules that it "
    "imports, or files that it has written itself."
)


@dataclass(frozen=True)
class WatchedRun:
    """A run with its record, and the command that has trained it."""

    folder: Path
    record: RunRecord
    origin: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "WatchedRun | None":
        """Return the run in a folder, or ``None`` for one of an experiment.

        Raises:
            UsageError: if its command is not known, its script has changed, or it is still being trained.
        """
        record, where = RunRecord.read(folder), short_path(folder)
        if record.experiment != ATTACHED:
            return None
        origin = record.provenance.get("watch")
        require(
            isinstance(origin, Mapping),
            f"{where} was recorded by a call of loopscope in its script, not by loopscope watch, so its command is not "
            "known; take the call out, and train it as loopscope watch python SCRIPT to repeat its steps.",
        )
        require(not is_locked(folder), f"{where} is still being trained; wait until it has ended.")
        run = cls(folder, record, dict(origin or {}))
        run._check_script()
        return run

    def _check_script(self) -> None:
        script, digest = (self.record.provenance.get(name) for name in ("script", "script_xxh3_128"))
        if digest is not None and (now := script_digest(Path(str(script)))) != digest:
            change = "no longer exists" if now is None else "has changed since"
            raise UsageError(
                f"{script}, the script of {short_path(self.folder)}, {change}, so that none of its steps can be "
                "repeated; restore the file."
            )

    def verify(self, hooks: Options) -> list[int]:
        """Run the command again without a record, and return the steps at which it equals the run, bit for bit.

        Raises:
            UsageError: if the run has no digests, or its command cannot be run.
            DivergedError: at the first difference, or if the command ends before the last digest.
        """
        expected = read_digests(self.folder)
        require(bool(expected), f"{short_path(self.folder)} has no digests to compare with.")
        # A script that has come to its end does so again; another one is ended where the comparison is complete.
        is_complete = read_status(self.folder) in TRAINED
        options = {} if is_complete else {"stop_after": max(step for _, step in expected)}
        with TemporaryDirectory() as temporary:
            compared = self._run(Path(temporary, "run"), self._options(hooks) | options, expected)
        if missing := [step for moment, step in expected if (moment, step) not in compared]:
            raise DivergedError(f"The command ended before the digests of these steps: {listed(missing, 9)}. {CAUSE}")
        return sorted({step for _, step in compared})

    def rewind(self, stretch: StepRange, hooks: Options) -> tuple[Path, list[int]]:
        """Run the command again up to the end of a stretch, and record it with other hooks.

        Returns:
            The folder of the metrics, and the steps at which the state was compared, bit for bit.

        Raises:
            UsageError: if the run has no such steps, or its command cannot be run.
            DivergedError: if the training differs from the run.
        """
        outcome = read_outcome(self.folder)
        last, is_complete = (None, False) if outcome is None else (outcome["steps"], outcome["status"] in TRAINED)
        for name, step in (("step", stretch.step), ("until", stretch.until)):
            problem = f"--{name} is {step:,}, but the last step of the run in {self.folder} is {last:,}."
            require(last is None or step <= last, problem)
        expected = {
            moment: digest for moment, digest in read_digests(self.folder).items() if moment[1] <= stretch.until
        }
        path = self.folder / REWINDS / stretch.name
        first = stretch.step if any(hooks.values()) and not stretch.from_start else 1
        options = self._options(hooks, first) | {"overwrite": True}
        if not is_complete or stretch.until != last:
            options["stop_after"] = stretch.until
        notice(
            f"A script has no checkpoint of loopscope to start from: it is run from its start up to step "
            f"{stretch.until:,}."
            + ("" if expected else " The run has no digest up to there, so nothing can show that it is the same run.")
        )
        (path / DIGESTS).unlink(missing_ok=True)  # of an earlier rewind, until the command replaces it
        compared = self._run(path.absolute(), options, expected)
        done = read_outcome(path)
        steps = 0 if done is None else done["steps"]
        require(steps >= stretch.step, f"The command ended after step {steps:,}, before step {stretch.step:,}.")
        return path, sorted({step for _, step in compared})

    def _options(self, hooks: Options, first_step: int = 1) -> dict[str, Any]:
        """Return the options of attach, with the given hooks in place of those of the run that commit nothing.

        Hooks that commit nothing start at ``first_step``.

        Raises:
            UsageError: for unknown hooks, and for other committing hooks than those of the run.
        """
        recorded, chosen = self.origin["options"], dict[str, Any]()
        if any(hooks.values()):
            kept = [name for name in self.record.treatments if name not in hooks["hooks"]]
            chosen = {
                "with_hooks": hooks["with_hooks"] or "none",
                "hooks": [*kept, *(name.replace("-", "_") for name in hooks["hooks"])],
                "hook_options": {name: dict(self.record.hooks[name]) for name in kept}
                | parse_hook_options(hooks["hook_config"]),
            }
        else:
            chosen = {name: recorded[name] for name in ("hooks", "with_hooks") if name in recorded}
        given = chosen.get("hooks", [])
        names = select_hooks(chosen.get("with_hooks"), given, hook_groups(), "")
        built = build_hooks(names, chosen.get("hook_options", {}), {}, [], required=given, left_out={})
        created = [item.hook for item in built]
        committing = plain_json(treatments(created))
        refuse_another_run(self.folder, self.record, replace(self.record, treatments=committing))
        schedules = {hook.name: hook.step_schedule for hook in created if hook.name not in committing}
        delayed = {
            name: vars(replace(schedule, warmup=schedule.warmup + first_step - 1))
            for name, schedule in schedules.items()
        }
        shared = {name: recorded[name] for name in KEPT if name in recorded}
        # The hooks of the run have the schedules that they had there; others measure at all of their steps.
        budget = {"budget": None if any(hooks.values()) else str(self.folder.absolute())}
        return shared | chosen | {"schedules": delayed} | budget

    def _run(self, out: Path, options: Mapping[str, Any], expected: Mapping[Moment, Digest]) -> set[Moment]:
        """Run the command, with a record of this training in ``out``, and return the moments that were compared."""
        with TemporaryDirectory() as temporary:
            started, refusal = Path(temporary, "started"), Path(temporary, "refusal")
            started.touch()
            shared = {"out": str(Path(temporary, "other")), "with_hooks": "none", "display": "none"}
            again = {
                "training": self.origin["training"],
                "options": {**options, "out": str(out), "display": "none"},
                "refusal": str(refusal),
            }
            environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
            environment |= self.origin["variables"] | variables(shared, self.origin, str(started))
            environment |= {"LOOPSCOPE_WATCH_AGAIN": json.dumps(again)}
            compared: set[Moment] = set()
            with self._command(environment) as process:
                status = None
                while status is None:
                    with suppress(TimeoutExpired):
                        status = process.wait(PAUSE)
                    self._require_one_training(started)
                    compared |= self._compare(out, expected)
            if refusal.is_file():
                raise UsageError(refusal.read_text("utf-8"))
        if not (out / SUMMARY).is_file():
            raise LoopscopeError(
                f"The command ended with status {status}, and left no complete record: {shlex.join(self._words)}."
            )
        return compared

    @property
    def _words(self) -> list[str]:
        return list(self.origin["command"])

    @contextmanager
    def _command(self, environment: Mapping[str, str]) -> Iterator["Popen[bytes]"]:
        """Start the command, whose output goes to standard error, and end it with all its children after the body."""
        folder = Path(self.origin["folder"])
        require(folder.is_dir(), f"{folder}, the working directory of the command, does not exist.")
        words = shlex.join(self._words)
        notice(f"Running again in {short_path(folder)}: {words}. Files that it writes are written again.")
        try:
            process = Popen(self._words, cwd=folder, env=environment, stdout=sys.stderr, start_new_session=True)
        except OSError as error:
            raise UsageError(f"The command of the run cannot be started: {words}: {error.strerror}.") from error
        try:
            yield process
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if process.poll() is None:
                    os.killpg(process.pid, number)
                    with suppress(TimeoutExpired):
                        process.wait(PATIENCE)

    def _require_one_training(self, started: Path) -> None:
        """Raise :class:`UsageError` if more processes have started trainings than train together in this run."""
        processes = {*started.read_text("utf-8").split()}
        together = int(self.record.environment.get("processes", 1))
        require(
            len(processes) <= together,
            f"The command trains in {counted(len(processes), 'process', 'processes')} that do not train together, so "
            f"which of them is the run in {short_path(self.folder)} is not known; verify and rewind take one training "
            "per command, in one process or in ranks of one training.",
        )

    def _compare(self, out: Path, expected: Mapping[Moment, Digest]) -> set[Moment]:
        """Return the moments of the digests up to now; raises :class:`DivergedError` at the first difference."""
        digests = read_digests(out)
        common = [moment for moment in expected if moment in digests]
        for epoch, step in common:
            if names := expected[epoch, step].differing_entries(digests[epoch, step]):
                divergence = Divergence(epoch, step, names)
                error = divergence_error(self.folder, self.record, RunRecord.read(out), divergence)
                raise DivergedError(f"{error} {CAUSE}")
        return {*common}
