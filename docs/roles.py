"""Markup of docstrings as Markdown, for the generated pages and for the API reference of the site."""

import re
from inspect import cleandoc
from typing import Any

import griffe


def markdown(text: str) -> str:
    """Turn the markup of a docstring into Markdown.

    >>> markdown("see :func:`~loopscope.training.loss_probe.central_difference` and ``k``")
    'see `central_difference` and `k`'
    """
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text).replace("``", "`")


def fenced_examples(text: str) -> str:
    """Put each example of a docstring, which ends at an empty line, into a code block."""
    return re.sub(r"^(>>> .*(?:\n.+)*)", r"```pycon\n\1\n```", text, flags=re.MULTILINE)


class Roles(griffe.Extension):
    """Converts the docstrings of all objects in the API reference."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Convert the docstring of an object, before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = fenced_examples(markdown(cleandoc(obj.docstring.value)))
