"""Content of a durable checkpoint: the states of training and of the run, as tensors and plain values."""

from collections.abc import Iterator, Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..data import derived_seed
from ..durable_files import read_tensors, write_tensors
from ..engine import HookManager
from ..errors import UsageError, require
from ..isolation import Call
from ..registry import qualified
from ..state import TrainingState, seed_everything
from ..state.generators import StreamState
from ..state.values import ATOMS, STORED_DICTS
from ..training import Ranks
from .format import FRESH_STREAMS, Checkpoint, open_checkpoint, write_checkpoint
from .writer import Staging

MAX_BITS = 2000
"""Larger integers are stored as well, but torch refuses to read them from about 2040 bits on."""
KEYS = {"state", "pre_epoch", "hooks", "metrics", "samples", "errors", "left_out"}


def capture_state(state: TrainingState, streams: StreamState) -> dict[str, Any]:
    """Return the training state by reference, as tensors and plain values, with the run's random ``streams``."""
    return {part.name: part.store(state, streams) for part in state.parts if part.is_stored}


def restore_state(captured: Any, state: TrainingState, where: Path) -> None:
    """Load a captured training state into a newly built one, in place.

    Raises:
        UsageError: if it belongs to another model, optimizer, scheduler or loader, or is no complete training state.
            The message names its source, ``where``.
    """
    parts = [part for part in state.parts if part.is_stored]
    if not isinstance(captured, Mapping) or captured.keys() != {part.name for part in parts}:
        raise UsageError(f"{where} does not contain a complete training state.")
    try:
        for part in parts:
            if misfit := part.misfit(state, captured[part.name]):  # checked for all parts before any is loaded
                raise UsageError(f"{where} {misfit}.")
        for part in parts:
            part.load(state, captured[part.name])
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        text = str(error).strip().partition("\n")[0].rstrip(".")
        raise UsageError(f"{where} does not fit this run: {type(error).__name__}: {text}.") from error


def read_content(checkpoint: Checkpoint, model: nn.Module | None = None, ranks: Ranks | None = None) -> dict[str, Any]:
    """Check the files of a checkpoint and return its content.

    With ``ranks`` that train ``model`` the content is that of this rank; without them it is complete.

    Raises:
        DamagedCheckpointError: if the bytes of a file are not those that were written.
        UsageError: if one process wrote the checkpoint and several are resuming.
    """
    if not checkpoint.is_of_ranks:
        require(
            ranks is None or not ranks.are_many,
            f"{checkpoint.folder} was written by one process; resume it with one, without torchrun.",
        )
        return checkpoint.content()
    from .rank_checkpoints import read_parts  # imported here, as it takes a second

    rank, count = (0, 1) if ranks is None else ranks.rank_and_count
    check = partial(checkpoint.check, [*checkpoint.manifest["files"]][rank::count])
    check() if ranks is None else ranks.call_on_all(check)
    return read_parts(checkpoint, model, ranks)


def unstorable_values(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested content, by name, that can be loaded only by executing code from the file."""
    kind = type(content)
    if kind in STORED_DICTS:
        for key, item in content.items():
            yield from unstorable_values(item, f"{name}/{key}" if name else str(key))
            if type(key) is not str:
                yield from unstorable_values(key, f"a key of {name}")
    elif kind in (list, tuple, set):
        for index, item in enumerate(content):
            yield from unstorable_values(item, f"{name}/{index}")
    elif not isinstance(content, Tensor) and not _is_plain(content) and not _is_loadable(content):
        yield name, content


def _is_plain(value: Any) -> bool:
    return type(value) in ATOMS and (type(value) is not int or value.bit_length() <= MAX_BITS)


def storage_errors(content: Any) -> list[str]:
    """Return an error sentence for each value that a checkpoint cannot store, with the remedy."""
    advice = (
        "because loading it would execute code from the file. Use tensors, numbers, strings, or lists and dicts of "
        "these; if no later step reads the value, call loopscope.state.Transient.register on its class."
    )
    return [
        f"{name.removeprefix('state/')} is a {qualified(type(value))}, which a checkpoint cannot store {advice}"
        for name, value in unstorable_values(content)
    ]


def _is_loadable(value: Any) -> bool:
    file = BytesIO()
    try:
        # A round trip, since the list of classes that torch.load accepts with weights_only grows with each version.
        write_tensors(value, file)
        file.seek(0)
        read_tensors(file)
    except Exception:  # pickling a user's object may raise anything
        return False
    return True


def save_checkpoint(
    folder: Path, state: TrainingState, hooks: Mapping[str, Any], streams: StreamState, ranks: Ranks | None = None
) -> None:
    """Write training state, random streams and hook states synchronously, for custom training loops and tests.

    If several ``ranks`` train the model (``task.ranks``), all of them call this and write the checkpoint together.

    Raises:
        UsageError: for a value that a checkpoint cannot store.
    """
    content = Staging().copy({"state": capture_state(state, streams), "hooks": dict(hooks)})
    if sentences := storage_errors(content):
        raise UsageError(sentences[0])
    manifest = {"step": state.loop.step, "score": None}
    if ranks is None or not ranks.are_many:
        write_checkpoint(folder, content, manifest)
        return
    from .rank_checkpoints import write_parts  # imported here, as it takes a second

    write_parts(folder, content, {**manifest, "ranks": ranks.arrangement(state.model)}, (), None, ranks)


def load_checkpoint(folder: Path, state: TrainingState, ranks: Ranks | None = None) -> dict[str, Any]:
    """Restore a checkpoint of :func:`save_checkpoint`, on any number of ranks, and return the states of the hooks."""
    content = read_content(open_checkpoint(folder), state.model, ranks)
    restore_state(content["state"], state, folder)
    return dict(content["hooks"])


class RunState:
    """Copies the state of a run between two steps, and restores it into a newly built run."""

    def __init__(self, manager: HookManager) -> None:
        self._manager = manager
        self._staging, self._pre_epoch_staging = Staging(), Staging()

    def storage_errors(self) -> list[str]:
        """Return an error sentence for each value of the current state that a checkpoint cannot store."""
        with self._manager.between_steps():
            return storage_errors(self._content())

    def last_storage_errors(self) -> list[str]:
        """Return an error sentence for each value that :meth:`take` did not copy and a checkpoint cannot store."""
        return self.storage_errors() if self._staging.uncopied_types or self._pre_epoch_staging.uncopied_types else []

    def take(self) -> Mapping[str, Any]:
        """Return a copy of the run's complete state; the next call overwrites it.

        The random streams in it are the run's, not those that hooks and sinks draw from. If a hook needs the state
        before the current epoch at the end of that epoch, the copy contains that state too.
        """
        manager, loop = self._manager, self._manager.state.loop
        with manager.between_steps():
            pre_epoch = None
            if manager.is_mid_epoch() and loop.pre_epoch is not None:
                call = Call("checkpoint", "the start of the epoch", loop.step, "The")
                pre_epoch = manager.isolation.intervene(call, self._take_pre_epoch, mutates=True)
            call = Call("checkpoint", "the loop", loop.step, "The")
            copied: dict[str, Any] = manager.isolation.observe(call, lambda: self._staging.copy(self._content()))
            return copied | {"pre_epoch": pre_epoch}

    def _content(self) -> dict[str, Any]:
        """Return the complete state by reference, without the state before the epoch."""
        manager = self._manager
        return {
            "state": capture_state(manager.state, manager.isolation.run_streams),
            "hooks": manager.hooks.state_dict(),
            "metrics": manager.delivery.state_dict(),
            "samples": manager.profiler.samples,
            "errors": manager.hooks.failures.errors,
            "left_out": manager.hooks.failures.left_out,
        }

    def _take_pre_epoch(self) -> Mapping[str, Any]:
        state = self._manager.state
        state.loop.pre_epoch.restore(state)
        return dict(self._pre_epoch_staging.copy(capture_state(state, self._manager.isolation.run_streams)))

    def restore(self, content: Mapping[str, Any], where: Path) -> None:
        """Restore the run from the content of a checkpoint.

        Raises:
            UsageError: if the content does not fit this run; the message names its source, ``where``.
        """
        manager, state = self._manager, self._manager.state
        if content.keys() - {FRESH_STREAMS} != KEYS:
            raise UsageError(f"{where} does not contain the complete state of a run.")
        if content["pre_epoch"] is not None:
            restore_state(content["pre_epoch"], state, where)
            state.loop.pre_epoch = manager.pre_epoch_copy
            state.loop.pre_epoch.save(state)
        restore_state(content["state"], state, where)
        manager.delivery.load_state_dict(content["metrics"], manager.origins)
        manager.hooks.load_state_dict(content["hooks"])
        last = state.loop.step + len(manager.task.loader)
        manager.hooks.failures.reloaded = dict.fromkeys(content["hooks"], last)
        manager.hooks.failures.earlier = content["errors"], content["left_out"]
        manager.profiler.samples.update(content["samples"])
        if FRESH_STREAMS in content:  # a rank without stored streams must not draw the same numbers as another rank
            seed_everything(derived_seed(state.streams.seed, "rank", manager.task.ranks.index, state.loop.step))
