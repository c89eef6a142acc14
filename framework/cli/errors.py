"""Turns what the argument parser says into one sentence that names the option, the value and what it takes."""

import re
from collections.abc import Mapping
from typing import Any

from ..errors import UsageError, nearest, unknown
from ..runs import choices, in_words


def dashed(name: str) -> str:
    """Spell an option as the help does.

    >>> dashed("train_size")
    '--train-size'
    """
    return "--" + name.lstrip("-").replace("_", "-")


def refusal(message: str, annotations: Mapping[str, Any], source: str = "") -> UsageError:
    """Rewrite a message of jsonargparse.

    Args:
        message: what it said.
        annotations: the options of the parser with their types.
        source: where the value came from, if not from a flag; it ends the sentence's subject.
    """
    if match := re.search(r"unrecognized arguments: (\S+)", message):
        return _unrecognised(match[1], annotations)
    if match := re.search(r'Parser key "([^"]+)":', message):
        return wrong_value(f"{dashed(match[1])}{source}", _given(message), annotations.get(match[1]))
    if match := re.search(r"argument (\S+): invalid choice: '(.*)' \(choose", message):
        return wrong_value(dashed(match[1]), match[2], annotations.get(match[1].lstrip("-")))
    if match := re.search(r"argument (\S+): expected (?:one|at least one) argument", message):
        return UsageError(f"{dashed(match[1])} needs a value.")
    return UsageError(" ".join(message.split()).rstrip(".") + ".")


def wrong_value(option: str, value: str, annotation: Any) -> UsageError:
    """Make the error for a value that an option does not take."""
    words = choices(annotation)
    if words:
        return unknown(f"value of {option}:", value, words)
    return UsageError(f"{option} is {value!r}; it must be {in_words(annotation)}.")


def _given(message: str) -> str:
    """Find the refused value in a message."""
    patterns = (r"Given value: (.*)", r"Got value: (.*)", r'": (.*) not among choices', r": (.*)")
    found = next(match[1] for pattern in patterns if (match := re.search(pattern, message)))
    return found.strip("'")


def _unrecognised(word: str, annotations: Mapping[str, Any]) -> UsageError:
    if not word.startswith("--"):
        return UsageError(f"Unexpected word {word!r}; options begin with two dashes, --help lists them.")
    flag = dashed(word.split("=")[0])
    return UsageError(f"Unknown option {flag!r}.{nearest(flag, map(dashed, annotations))} --help lists all of them.")
