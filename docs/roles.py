"""Markup of docstrings as Markdown, for the generated pages and for the API reference of the site."""

import re
from collections.abc import Mapping
from inspect import cleandoc
from pathlib import Path
from typing import Any

import griffe

REFERENCE = sorted(Path(__file__).parent.glob("reference*.md"))
DIRECTIVE = re.compile(r"^::: ([\w.]*?(\w+))$", re.MULTILINE)
"""A line of a reference page that shows a docstring: the path of the object, and its last part."""
PATHS = {name: path for page in REFERENCE for path, name in DIRECTIVE.findall(page.read_text(encoding="utf-8"))}
"""The path of every name in the reference."""


def markdown(text: str) -> str:
    """Turn the markup of a docstring into Markdown.

    >>> markdown("see :func:`~loopscope.training.loss_probe.central_difference` and ``k``")
    'see `central_difference` and `k`'
    """
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text).replace("``", "`")


def links(text: str, parent: str, paths: Mapping[str, str] = PATHS) -> str:
    """Turn the roles of a docstring into links to the reference; roles of other names stay.

    A name without a class, such as that of a method, is looked up in ``parent``, the path of a class.

    >>> links(":meth:`.Scope.close`, :meth:`start`, :class:`Own`", "a.Hook", {"Scope": "a.Scope"})
    '<autoref identifier="a.Scope.close" optional>`close`</autoref>, \
<autoref identifier="a.Hook.start" optional>`start`</autoref>, :class:`Own`'
    """

    def link(match: re.Match[str]) -> str:
        parts = match[2].split(".")
        known = next((place for place, part in enumerate(parts) if part in paths), None)
        if known is not None:
            path = ".".join([paths[parts[known]], *parts[known + 1 :]])
        elif match[1] in ("meth", "attr") and len(parts) == 1:
            path = f"{parent}.{parts[0]}"
        else:
            return match[0]
        return f'<autoref identifier="{path}" optional>`{parts[-1]}`</autoref>'

    return re.sub(r":(\w+):`[~.]*([\w.]+)`", link, text)


def fenced_examples(text: str) -> str:
    """Put each example of a docstring, up to an empty line, into a code block; drop the marks of literal blocks.

    >>> fenced_examples("The order:\\n\\n::\\n\\n    first\\n    second")
    'The order:\\n\\n    first\\n    second'
    """
    text = re.sub(r"^::\n\n", "", text, flags=re.MULTILINE)
    return re.sub(r"^(>>> .*(?:\n.+)*)", r"```pycon\n\1\n```", text, flags=re.MULTILINE)


class Roles(griffe.Extension):
    """Converts the docstrings of all objects in the API reference."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Convert the docstring of an object, before it is parsed."""
        if obj.docstring is not None:
            owner = obj if obj.is_class or obj.parent is None else obj.parent
            text = links(cleandoc(obj.docstring.value), owner.path)
            obj.docstring.value = fenced_examples(markdown(text))

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Remove private arguments from the signatures of classes, which griffe derives from fields."""
        for path in PATHS.values():
            found = pkg.modules_collection[path]
            target = found.final_target if isinstance(found, griffe.Alias) else found
            init = target.members.get("__init__")
            if isinstance(init, griffe.Function):
                init.parameters = griffe.Parameters(*(one for one in init.parameters if one.name[0] != "_"))
