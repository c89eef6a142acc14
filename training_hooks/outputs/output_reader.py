"""The logits and targets of a step, read from the calls of the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loopscope.errors import UsageError, listed, require
from loopscope.hooks import ForwardCall, RunInfo
from loopscope.option_words import hook_option_text
from torch import Tensor, nn

from ..measures import notice
from .logits import find_logits
from .targets import (
    BatchCursor,
    align,
    arguments_of,
    entry,
    labels_of_arguments,
    labels_of_batch,
    rows_of_call,
    shifts_labels,
)

SHIFTS = ("auto", "yes", "no")


@dataclass(frozen=True)
class Reading:
    """The logits of one call, shape (…, C), their targets, shape (…) with −1 where none counts, and the source tags."""

    logits: Tensor
    targets: Tensor | None
    tags: Any = None


class OutputReader:
    """Reads the calls of a model, or of the module whose output is the logits, and reports what it cannot read once.

    Args:
        hook: name of the hook.
        module: name of the module whose output has the logits; empty: the model.
        labels: name of the labels among the model's arguments or in the batch; empty: by the usual names.
        shift: whether the logits of a token are compared with the next label: yes, no, or auto.
        ignore_index: the label of rows that do not count.
        source: name of the source tags in the batch; empty: none.
        needs_targets: calls without targets cannot be measured.
    """

    def __init__(
        self,
        hook: str,
        *,
        module: str,
        labels: str,
        shift: str,
        ignore_index: int,
        source: str = "",
        needs_targets: bool = False,
    ) -> None:
        if shift not in SHIFTS:
            raise UsageError(f"{hook}.shift is {shift!r}; it must be auto, yes or no.")
        self._hook, self.module, self._labels, self._shift = hook, module, labels, shift
        self._ignore_index, self._source, self._needs_targets = ignore_index, source, needs_targets
        self._target: nn.Module | None = None
        self._shifts = False
        self._has_warned = False
        self.begin_step(None)

    def start(self, run: RunInfo) -> None:
        """Find the module; raises :class:`UsageError` if the model has none of this name."""
        modules = dict(run.model.named_modules())
        require(
            self.module in modules,
            f"{self._hook}.module is {self.module!r}, which is no module of the model; name the module whose output is "
            "the logits.",
        )
        self._target = modules[self.module]
        self._shifts = self._shift == "yes" or (self._shift == "auto" and shifts_labels(self._target, run.model))
        self._has_warned = False

    def begin_step(self, batch: Any) -> None:
        """Start a step with its batch."""
        self._cursor = BatchCursor(batch)
        self._calls = 0
        self._has_extra_calls = False
        self._uses_batch = bool(self._source)
        self.problem = ""
        """Why calls of the step cannot be read; empty if all were read."""
        self.lacks_targets = False
        """Whether a call has no logits, or neither its arguments nor the batch have their targets."""

    def read(self, call: ForwardCall) -> Reading | None:
        """Return the logits and targets of a call, or ``None`` with :attr:`problem` set."""
        self._calls += 1
        logits, are_named = find_logits(call.output)
        if logits is None:
            self.lacks_targets = True
            self.problem = (
                f"the output of {self._place} ({_kind(call.output)}) has no logits, as with a fused loss, which "
                "computes none, or a regression; switch the fused loss off, or name the module whose output is the "
                "logits with "
                f"{hook_option_text(self._hook, module='NAME')}"
            )
            return None
        taken = self._cursor.take(rows_of_call(call, len(logits)))
        self._has_extra_calls |= taken is None
        part, window = taken if taken is not None else (None, slice(None))
        tags = _rows(entry(part, self._source), window, part) if self._source else None
        if self._source and tags is None:
            kind = f"{type(part).__name__} with {listed([*part])}" if isinstance(part, Mapping) else type(part).__name__
            self.problem = f"the batch ({kind}) has no entry {self._source!r}, which {self._hook}.source names"
            return None
        labels, shift = self._labels_of(call, part, window)
        aligned = align(logits, labels, shift=shift, ignore_index=self._ignore_index)
        if aligned is not None:
            return Reading(*aligned, tags)
        is_other = isinstance(labels, Tensor)  # targets that are no classes, as of a regression
        if self._needs_targets or is_other or not (are_named or self.module):
            self.lacks_targets |= taken is not None
            self.problem = (
                f"the logits of {self._place}, of shape {tuple(logits.shape)}, have no known targets: "
                f"{_described(labels)}; name the targets among the model's arguments or in the batch with "
                f"{hook_option_text(self._hook, labels='NAME')}"
            )
            if not self._needs_targets:
                self.problem += ", or, if its output is logits, the module with " + hook_option_text(
                    self._hook, module="NAME"
                )
            return None
        return Reading(logits, None, tags)

    def _labels_of(self, call: ForwardCall, part: Any, window: slice) -> tuple[Any, bool]:
        """Return the labels of a call, and whether they are to be shifted."""
        assert self._target is not None
        arguments = arguments_of(self._target, call)
        if not self._labels and isinstance(shifted := arguments.get("shift_labels"), Tensor):
            return shifted, False
        labels = labels_of_arguments(arguments, self._labels)
        if labels is None:
            self._uses_batch = True
            labels = _rows(labels_of_batch(part, self._labels), window, part)
        return labels, self._shifts

    @property
    def _place(self) -> str:
        kind = type(self._target).__name__
        return f"the module {self.module!r} ({kind})" if self.module else f"the model ({kind})"

    def finish_step(self) -> None:
        """Set :attr:`problem` if there were no calls, or values of the batch cannot have been assigned to them."""
        if not self._calls:
            self.problem = (
                f"{self._place} was not called in the training pass; name the module whose output is the logits with "
                f"{hook_option_text(self._hook, module='NAME')}"
            )
        elif self._uses_batch and (self._has_extra_calls or not (self.problem or self._cursor.is_spent)):
            self.problem = (
                f"{self._place} was called {self._calls} times in a step, which does not account for every row of the "
                "batch once, so targets cannot be assigned to the calls; pass them to the model as an argument"
            )

    def report_problem(self) -> None:
        """Issue a notice of the first problem of the run, which may be one of another rank."""
        if not self._has_warned:
            self._has_warned = True
            problem = self.problem or "another rank cannot read its outputs, and reports why"
            notice(f"Hook {self._hook!r} measures nothing: {problem}.")


def _rows(values: Any, window: slice, part: Any) -> Any:
    """Return the rows of a call among the values of a batch with one entry per row."""
    if values is None or values is part or isinstance(values, str):
        return values
    try:
        is_whole = window.start == 0 and window.stop >= len(values)
        return values if is_whole else values[window]
    except TypeError:  # one value for the whole batch
        return values


def _kind(output: Any) -> str:
    return (
        f"{type(output).__name__} of shape {tuple(output.shape)}"
        if isinstance(output, Tensor)
        else type(output).__name__
    )


def _described(labels: Any) -> str:
    if isinstance(labels, Tensor):
        return f"the labels have shape {tuple(labels.shape)} and dtype {labels.dtype}"
    return "no labels were found" if labels is None else f"the labels are a {type(labels).__name__}"
