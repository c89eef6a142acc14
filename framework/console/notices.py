"""Warnings and notes as sentences with a label, handed to whoever shows them."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple, TextIO

from rich.text import Text

from ..errors import RunNotice
from .text import printable

Label = Literal["note", "warning"]
LABEL_STYLES: Mapping[Label, str] = {"note": "bold cyan", "warning": "bold yellow"}


class Notice(NamedTuple):
    """A sentence to the user."""

    label: Label
    sentence: str

    def text(self, remark: str = "") -> Text:
        """Return the notice as one line, its label in its colour."""
        return Text.assemble((f"{self.label}: ", LABEL_STYLES[self.label]), printable(self.sentence), remark)


def without_repeats(notices: Iterable[Notice]) -> list[Text]:
    """Return one line for each notice, those said several times once, with how often.

    >>> [line.plain for line in without_repeats([Notice("note", "A."), Notice("note", "A."), Notice("note", "B.")])]
    ['note: A. (2 times)', 'note: B.']
    """
    return [notice.text(f" ({count} times)" if count > 1 else "") for notice, count in Counter(notices).items()]


@contextmanager
def show_warnings(show: Callable[[Label, str], None]) -> Iterator[None]:
    """Hand every warning to ``show`` as its label and its sentence, instead of printing where it was raised.

    A :class:`RunNotice` is information and labelled ``note``; every other warning is trouble and labelled ``warning``.
    """
    before = warnings.showwarning

    def shown(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        show("note" if issubclass(category, RunNotice) else "warning", " ".join(str(message).split()))

    warnings.showwarning = shown
    try:
        yield
    finally:
        warnings.showwarning = before
