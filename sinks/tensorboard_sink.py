"""TensorBoard sink: curves, distributions and hyper-parameters."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from loopscope.errors import require
from loopscope.hooks import STEP_POINTS, HookPoint, Series, SinkRegistry
from loopscope.optional_packages import require_package
from loopscope.runs import Record, ReplaySink, RunRecord, forward_emits

from .jsonl import read_jsonl, recorded_run

if TYPE_CHECKING:
    from loopscope.hooks import RunInfo

    from .event_file import EventFile

FOLDER = "tensorboard"


@SinkRegistry.register
class TensorBoardSink(ReplaySink):
    """Write every metric to tensorboard/, for TensorBoard.

    A number becomes a scalar at its step, a series a scalar at the step of each value, a ``key: value`` pair a scalar
    named ``metric/key``, and a list a histogram of its finite values, all in float32. The HPARAMS and TEXT tabs show
    the options of the experiment, the strategy and the treatments. Writing needs no thread, no random numbers and no
    TensorFlow; every emit has reached the operating system when it returns.
    """

    name: ClassVar[str] = "tensorboard"
    flag: ClassVar[str | None] = "--hook-tensorboard"

    def __init__(self) -> None:
        self.check_installed()
        self._events: EventFile | None = None
        self._step = 0

    @classmethod
    def check_installed(cls) -> None:
        """Raise :class:`UsageError` if tensorboard or google_crc32c is missing."""
        for package in ("tensorboard", "google_crc32c"):
            require_package(package, f"Sink {cls.name!r}")

    @classmethod
    def file_names(cls, strategy: str) -> Sequence[str]:
        """Return the name of the folder of event files."""
        return [FOLDER]

    def set_run_context(self, run: "RunInfo") -> None:
        """Start the strategy's event file."""
        self._begin(run.output_dir, RunRecord.of_run(run))

    def position(self) -> dict[str, Any]:
        """Return size and digest of the event file, and the newest step."""
        return {**self._opened().file.position(), "step": self._step}

    def files(self) -> Sequence[Path]:
        """Return the path of the strategy's event file."""
        return [] if self._events is None else [self._events.file.path]

    def resume(self, run: "RunInfo", position: Mapping[str, Any]) -> None:
        """Reopen the strategy's event file at the position."""
        self._open(run.output_dir, run.strategy, position["step"], position)

    def _begin(self, folder: Path, run: RunRecord) -> None:
        (folder / FOLDER).mkdir(exist_ok=True)
        head = {"experiment": run.experiment, "strategy": run.strategy, "treatments": run.treatments_text}
        self._open(folder, run.strategy, 0).write_options(head | dict(flat(run.config)))

    def _open(self, folder: Path, strategy: str, step: int, position: Mapping[str, Any] | None = None) -> "EventFile":
        from .event_file import EventFile

        self._release()
        self._events, self._step = EventFile(folder / FOLDER / f"events.out.tfevents.{strategy}", position), step
        return self._events

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Write the metrics at their steps."""
        events = self._opened()
        by_step: dict[int, list[tuple[str, Any]]] = {}
        for name, value in metrics.items():
            if isinstance(value, Series) and hook_point in STEP_POINTS:
                for value_step, item in zip(value.steps, value.values, strict=True):
                    by_step.setdefault(value_step, []).append((name, item))
            else:
                by_step.setdefault(step, []).append((name, value))
        self._step = max(self._step, step)
        events.write(by_step)

    def _opened(self) -> "EventFile":
        if self._events is None:
            raise RuntimeError(
                "No event file is open: call emit and position after set_run_context(run) and before close."
            )
        return self._events

    def flush(self) -> None:
        """Force everything emitted so far onto the disk."""
        if self._events is not None:
            self._events.file.flush()

    def close(self, status: str) -> None:
        """Write the status of the strategy, unless it failed before its first emit, and close its file."""
        try:
            if self._events is not None and not (status == "failed" and self._events.file.needs_cut):
                self._events.write_status(status, self._step)
        finally:
            self._release()

    def _release(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            events.file.close()

    @classmethod
    def replay(cls, folder: Path, **options: str) -> Callable[[], str]:
        """Write the event file of a finished run; an existing folder of event files is never overwritten."""
        run, record, status = recorded_run(folder)
        target = folder / FOLDER
        require(not target.exists(), f"{target} already exists; remove it to write it again.")

        sink = cls()

        def take(emit: Record) -> None:
            sink.emit(emit.metrics, emit.epoch, emit.hook_point, step=emit.step)

        def send() -> str:
            try:
                sink._begin(folder, run)
                forward_emits(record, read_jsonl(record), take)
                sink.close(status)
            except BaseException:
                sink._release()
                shutil.rmtree(target, ignore_errors=True)
                raise
            return f"Wrote {target}; to view it: tensorboard --logdir {folder}"

        return send


def flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the options of a configuration as pairs; nested options are named by their path.

    >>> flat({"lr": 0.1, "adam": {"betas": [0.9, 0.99]}})
    [('lr', 0.1), ('adam.betas', [0.9, 0.99])]
    """
    options: list[tuple[str, Any]] = []
    for name, value in config.items():
        nested = isinstance(value, Mapping)
        options += flat(value, f"{prefix}{name}.") if nested else [(f"{prefix}{name}", value)]
    return options
