"""Warnings and notes as sentences with a label, handed to whoever shows them."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from rich.text import Text

from ..errors import RunNotice
from .text import printable

Label = Literal["note", "warning"]
LABEL_STYLES: Mapping[Label, str] = {"warning": "bold yellow", "note": "bold cyan"}


class Notice(NamedTuple):
    """A sentence to the user."""

    label: Label
    sentence: str

    def text(self, remark: str = "") -> Text:
        """Return the notice as one line, its label in its colour."""
        return Text.assemble((f"{self.label}: ", LABEL_STYLES[self.label]), printable(self.sentence), remark)


@contextmanager
def show_warnings(show: Callable[[Label, str], None]) -> Iterator[None]:
    """Hand every warning to ``show`` as its label and its sentence, instead of printing where it was raised.

    A :class:`RunNotice` is information and labelled ``note``; every other warning is trouble and labelled ``warning``.
    """
    before = warnings.showwarning

    def shown(message: Warning | str, category: type[Warning], *where: Any, **rest: Any) -> None:
        show("note" if issubclass(category, RunNotice) else "warning", " ".join(str(message).split()))

    warnings.showwarning = shown
    try:
        yield
    finally:
        warnings.showwarning = before
