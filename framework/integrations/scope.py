"""What a loop of one's own holds of its hooks: the calls that tell of batches, backward passes, evaluations, epochs."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rich.console import Group
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ..checkpoints import allocate_saved, flatten_state
from ..console import number_text, printable
from ..data import Loader
from ..errors import UsageError, require
from ..hooks import HookPoint
from .attach_options import steps_in
from .attached_run import AttachedRun
from .custom_loop import CustomLoop
from .model_wrappers import kept

Item = TypeVar("Item")
Result = TypeVar("Result")


class AttachedScope(JupyterMixin):
    """Hooks that are attached to somebody else's training, to be looked at; a notebook shows it as a table."""

    def __init__(self, run: AttachedRun) -> None:
        self._run = run

    @property
    def folder(self) -> Path:
        """The folder of the run, in the form that ``loopscope ls``, ``show`` and ``plot`` read."""
        return self._run.folder.path

    @property
    def hooks(self) -> list[str]:
        """The names of the hooks that are on, as far as the run has come to know what they are to watch."""
        return [hook.name for hook in self._run.manager.hooks] if self._run.is_built else []

    def last_metrics(self, point: HookPoint | None = None) -> dict[str, Any]:
        """Return the newest metrics by full name, of one hook point or of all, as numbers."""
        newest = self._run.manager.dispatch.last(point) if self._run.is_built else {}
        return {name: value.item() if isinstance(value, Tensor) else value for name, value in newest.items()}

    def __rich__(self) -> Group:
        """Return where the run stands, and its newest numbers, as a table."""
        run, told = self._run, "not begun"
        if run.is_started:
            loop = run.manager.state.loop
            told = f"{'over' if run.is_over else 'running'}, epoch {loop.epoch}, step {loop.step}"
        table = Table("metric", "value")
        for name, value in self.last_metrics().items():
            if isinstance(value, (int, float)):
                table.add_row(Text(printable(name)), number_text(value))
        title = Text(printable(f"{told}: {self.folder}"))
        return Group(title, table) if table.rows else Group(title)


class Scope(AttachedScope):
    """Hooks attached to a loop of one's own, which tells by these calls what it does.

    ::

        with loopscope.attach(model, optimizer, hooks=["norms"]) as scope:
            for batch in scope.batches(loader):
                loss = loss_fn(model, batch)
                scope.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    """

    def __init__(self, run: AttachedRun, loop: CustomLoop, accumulate: int) -> None:
        super().__init__(run)
        self._loop, self._accumulate = loop, accumulate

    def batches(self, loader: Iterable[Item]) -> Iterator[Item]:
        """Yield the batches of ``loader`` as they are, and take them for one epoch of the training.

        With ``accumulate`` above 1 they are micro-batches, so many to a step. A loader of loopscope's gives the batches
        of the epoch that has come, and goes on within it where the loop is resumed. The epoch ends as
        :meth:`epoch_end` says so, or as the next one begins.
        """
        self._require_open()
        if self._run.is_started:
            self._loop.end_epoch({})
        steps = steps_in(loader, self._accumulate)
        if isinstance(loader, Loader):
            loader = loader.batches(*self._loop.first())
        for batch in loader:
            self._loop.micro_batch(batch, steps)
            yield batch
        self._loop.pass_over(steps)

    def backward(self, loss: Tensor, *, last: bool = False, retain_graph: bool = False) -> None:
        """Run ``loss.backward()`` (scaled where there is a scaler, through the Accelerator where there is one).

        Nothing is divided: the losses of the micro-batches of a step add up, as their gradients do. With ``last`` the
        step is complete though it has fewer micro-batches than ``accumulate``; ``retain_graph`` is that of torch.
        Raises :class:`UsageError` for what is no loss.
        """
        self._require_open()
        self._loop.backward(loss, last=last, retain_graph=retain_graph)

    def evaluate(self, function: Callable[..., Result], *inputs: Any, **options: Any) -> Result:
        """Return what ``function`` returns, called so that it cannot change the training.

        It runs in eval mode, without gradients, on random streams of its own; modes, buffers and generators are put
        back. Named numbers that it returns are shown to hooks as the newest evaluation; ranks that train together all
        call this, and are shown the means.
        """
        self._require_open()
        run = self._run
        with kept(run.driver.task.replica):
            found = run.manager.in_eval_mode("evaluation", lambda model: function(*inputs, **options))
        if isinstance(found, Mapping) and found and all(isinstance(each, (int, float)) for each in found.values()):
            run.driver.evaluated(found)
        return found

    def epoch_end(self, **metrics: float | Tensor) -> None:
        """End the epoch; ``metrics`` are the numbers of its evaluation, such as ``val_loss=0.5``."""
        self._require_open()
        numbers: dict[str, float] = {}
        for name, value in metrics.items():
            number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if not isinstance(number, (int, float)):
                raise UsageError(f"{name} is a {type(value).__name__}; the metrics of an epoch are numbers.")
            numbers[name] = number
        self._loop.end_epoch(numbers)

    def state_dict(self, of: Any = None, key: str = "scope") -> dict[str, Any]:
        """Return what hooks and sinks know, between two steps, for the loop's own checkpoint.

        On several ranks it consists of tensors alone, for ``torch.distributed.checkpoint.save``, and all ranks call it.
        With ``of``, the metadata of such a checkpoint, it is the room into which to load what was saved under ``key``.
        """
        task = self._run.driver.task
        if of is None and not task.ranks.are_many:
            return self._loop.state_dict()
        if of is not None:
            return allocate_saved(of, key, task.model, task.ranks)
        return flatten_state(self._loop.state_dict(), task.model, task.ranks)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned; called before the first step, in the folder of that run.

        On another number of ranks each goes on from what the first one had, with what belongs to parameters laid out
        as these are now.
        """
        self._run.load_state_dict(state)

    def close(self, status: str = "completed", error: BaseException | None = None) -> None:
        """End the run: deliver all metrics and write the summary; called again it does nothing."""
        self._loop.close(status, error)

    def _require_open(self) -> None:
        require(not self._run.is_over, "This scope is closed; attach a new one for more training.")

    def __enter__(self) -> Self:
        """Close the scope after the body."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        failed = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        self.close("completed" if error is None else failed, error)
