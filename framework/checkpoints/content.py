"""What a durable checkpoint holds: the state of training and of the run around it, as tensors and plain values."""

from collections.abc import Iterator, Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..data import derived_seed
from ..durable_files import read_tensors, write_tensors
from ..errors import UsageError, require
from ..firing import HookManager
from ..isolation import Call
from ..registry import qualified
from ..state import ATOMS, StreamState, TrainingState, seed_everything
from ..training import Ranks
from .format import AFRESH, Checkpoint, open_checkpoint, write_checkpoint
from .writer import Staging

KEYS = {"state", "pre_epoch", "hooks", "metrics", "samples", "errors", "left_out"}


def captured(state: TrainingState, streams: StreamState) -> dict[str, Any]:
    """Return the training state by reference, as tensors and plain values; ``streams`` are those of the run's own."""
    return {part.name: part.stored.read(state, streams) for part in state.parts if part.stored is not None}


def put_back(captured: Any, state: TrainingState, where: Path) -> None:
    """Put a captured training state into a freshly built one, in place.

    Raises :class:`UsageError`, naming ``where`` it comes from, if it was captured from another model, optimizer,
    scheduler or loader, or is not a captured state at all.
    """
    stored = {part.name: part.stored for part in state.parts if part.stored is not None}
    if not isinstance(captured, Mapping) or captured.keys() != stored.keys():
        raise UsageError(f"{where} does not hold a whole training state.")
    try:
        for name, part in stored.items():
            if misfit := part.misfit(state, captured[name]):
                raise UsageError(f"{where} {misfit}.")
        for name, part in stored.items():
            part.load(state, captured[name])
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        text = str(error).strip().partition("\n")[0].rstrip(".")
        raise UsageError(f"{where} does not fit this run: {type(error).__name__}: {text}.") from error


def content_of(checkpoint: Checkpoint, model: nn.Module | None = None, ranks: Ranks | None = None) -> dict[str, Any]:
    """Check the files of a checkpoint and return its content, for one of the ``ranks`` that train ``model``, or whole.

    Raises :class:`UsageError` where one process wrote it and several would go on.
    """
    if not checkpoint.is_of_ranks:
        require(
            ranks is None or not ranks.are_many,
            f"{checkpoint.folder} was written by one process; go on with one, without torchrun and --parallel.",
        )
        return checkpoint.content()
    from .parts import read_parts  # which takes a second to import

    rank, count = (0, 1) if ranks is None else ranks.place
    check = partial(checkpoint.check, [*checkpoint.manifest["files"]][rank::count])
    check() if ranks is None else ranks.together(check)
    return read_parts(checkpoint, model, ranks)


def unstorable(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested content, by name, that cannot be read again without executing code from the file."""
    if isinstance(content, Mapping):
        for key, item in content.items():
            yield from unstorable(item, f"{name}/{key}" if name else str(key))
    elif type(content) in (list, tuple, set):
        for index, item in enumerate(content):
            yield from unstorable(item, f"{name}/{index}")
    elif not isinstance(content, Tensor) and type(content) not in ATOMS and not _can_be_read(content):
        yield name, content


def refusals(content: Any) -> list[str]:
    """Return a sentence for each value that checkpoints cannot hold: what it is, and what to do."""
    remedy = (
        "since reading it would execute code from the file: keep tensors, numbers, strings, or lists and dicts of "
        "these there, or, if no later step reads what it holds, call loopscope.state.Transient.register on its class."
    )
    return [
        f"{name.removeprefix('state/')} is a {qualified(type(value))}, which no checkpoint can hold, {remedy}"
        for name, value in unstorable(content)
    ]


def _can_be_read(value: Any) -> bool:
    file = BytesIO()
    try:
        # Tried out, since the list of classes that torch reads safely grows from version to version.
        write_tensors(value, file)
        file.seek(0)
        read_tensors(file)
    except Exception:  # whatever pickling a foreign object raises
        return False
    return True


def save_checkpoint(
    folder: Path, state: TrainingState, hooks: Mapping[str, Any], streams: StreamState, ranks: Ranks | None = None
) -> None:
    """Write training state, random streams and the states of hooks at once: for loops of one's own, and for tests.

    Several ``ranks`` that train the model, ``task.ranks``, write it together. Raises :class:`UsageError` for a value
    that a checkpoint cannot hold.
    """
    content = Staging().copy({"state": captured(state, streams), "hooks": dict(hooks)})
    if sentences := refusals(content):
        raise UsageError(sentences[0])
    manifest = {"step": state.loop.step, "score": None}
    if ranks is None or not ranks.are_many:
        write_checkpoint(folder, content, manifest)
        return
    from .parts import write_parts  # which takes a second to import

    write_parts(folder, content, {**manifest, "ranks": ranks.arrangement(state.model)}, (), None, ranks)


def load_checkpoint(folder: Path, state: TrainingState, ranks: Ranks | None = None) -> dict[str, Any]:
    """Put back what :func:`save_checkpoint` wrote, on as many ranks or others, and return the states of the hooks."""
    content = content_of(open_checkpoint(folder), state.model, ranks)
    put_back(content["state"], state, folder)
    return dict(content["hooks"])


class RunState:
    """Takes the state of a run between two steps, and puts it back into a run that was just built."""

    def __init__(self, manager: HookManager) -> None:
        self._manager = manager
        self._staging, self._pre_epoch_staging = Staging(), Staging()

    def refusals(self) -> list[str]:
        """Return a sentence for each value of the present state that no checkpoint can hold."""
        with self._manager.between_steps():
            return refusals(self._content())

    def refusals_of_the_last(self) -> list[str]:
        """Return a sentence for each value that :meth:`take` could not copy and no checkpoint can hold."""
        return self.refusals() if self._staging.foreign or self._pre_epoch_staging.foreign else []

    def take(self) -> Mapping[str, Any]:
        """Return a copy of everything; the next call writes over it.

        The random streams are those of the run, whatever hooks and sinks draw meanwhile. Within an epoch at whose end
        a hook will ask for the state before it, that state is part of the copy.
        """
        manager, loop = self._manager, self._manager.state.loop
        with manager.between_steps():
            pre_epoch = None
            if manager.is_within_an_epoch() and loop.pre_epoch is not None:
                call = Call("checkpoint", "the start of the epoch", loop.step, "The")
                pre_epoch = manager.isolation.intervene(call, self._take_pre_epoch, mutates=True)
            call = Call("checkpoint", "the loop", loop.step, "The")
            copied: dict[str, Any] = manager.isolation.observe(call, lambda: self._staging.copy(self._content()))
            return copied | {"pre_epoch": pre_epoch}

    def _content(self) -> dict[str, Any]:
        """Return everything, by reference, but the state before the epoch."""
        manager = self._manager
        return {
            "state": captured(manager.state, manager.isolation.run_streams),
            "hooks": manager.hooks.state_dict(),
            "metrics": manager.dispatch.state_dict(),
            "samples": manager.profiler.samples,
            "errors": manager.hooks.failures.errors,
            "left_out": manager.hooks.failures.left_out,
        }

    def _take_pre_epoch(self) -> Mapping[str, Any]:
        state = self._manager.state
        state.loop.pre_epoch.restore(state)
        return dict(self._pre_epoch_staging.copy(captured(state, self._manager.isolation.run_streams)))

    def put_back(self, content: Mapping[str, Any], where: Path) -> None:
        """Make the run what it was; raises :class:`UsageError`, naming ``where`` the content comes from."""
        manager, state = self._manager, self._manager.state
        if content.keys() - {AFRESH} != KEYS:
            raise UsageError(f"{where} does not hold a whole run.")
        if content["pre_epoch"] is not None:
            put_back(content["pre_epoch"], state, where)
            state.loop.pre_epoch = manager.pre_epoch_snapshot
            state.loop.pre_epoch.save(state)
        put_back(content["state"], state, where)
        # first the metrics, which tell which hooks had reported: what these raise is raised
        manager.dispatch.load_state_dict(content["metrics"], {hook.name: hook for hook in manager.hooks})
        manager.hooks.load_state_dict(content["hooks"])
        last = state.loop.step + len(manager.task.loader)
        manager.hooks.failures.reloaded = dict.fromkeys(content["hooks"], last)
        manager.hooks.failures.before = content["errors"], content["left_out"]
        manager.profiler.samples.update(content["samples"])
        if AFRESH in content:  # or ranks that see other rows would draw the same
            seed_everything(derived_seed(state.streams.seed, "rank", manager.task.ranks.index, state.loop.step))
