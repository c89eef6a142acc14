"""Annotations of options: whether a value fits one, and how to say in words what would."""

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    type(None): "null",
    None: "null",
}


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself.

    >>> alternatives(int | None)
    (<class 'int'>, <class 'NoneType'>)
    """
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def choices(annotation: Any) -> list[str]:
    """Return the words that an annotation allows, if it allows nothing but words (and perhaps null).

    >>> choices(Literal["exact", "finite_difference"]), choices(int | Literal["auto"])
    (['exact', 'finite_difference'], [])
    """
    members = [member for member in alternatives(annotation) if member not in (None, type(None))]
    literal = all(get_origin(member) is Literal for member in members)
    return [str(word) for member in members for word in get_args(member)] if literal else []


def fits(value: Any, annotation: Any) -> bool:
    """Tell whether a value is of the annotated type; an integer is a number, a boolean is neither.

    >>> fits(3, float), fits(True, int), fits(None, int | None), fits("a", Literal["a", "b"])
    (True, False, True, True)
    """
    members = alternatives(annotation)
    if len(members) > 1:
        return any(fits(value, member) for member in members)
    origin = get_origin(annotation) or annotation
    if origin is Literal:
        return any(type(value) is type(word) and value == word for word in get_args(annotation))
    if isinstance(value, bool) and origin in (int, float):
        return False
    if origin is float:
        return isinstance(value, (int, float))
    return origin is Any or not isinstance(origin, type) or isinstance(value, origin)


def in_words(annotation: Any) -> str:
    """Say what an annotation accepts.

    >>> in_words(int | None), in_words(Literal["raise", "skip"]), in_words(list[int])
    ('an integer or null', 'raise or skip', 'list[int]')
    """
    members = alternatives(annotation)
    if len(members) > 1:
        return " or ".join(in_words(member) for member in members)
    if get_origin(annotation) is Literal:
        words = [str(word) for word in get_args(annotation)]
        return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    if annotation in WORDS:
        return WORDS[annotation]
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
