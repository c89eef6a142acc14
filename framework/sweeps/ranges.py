"""Ranges of whole numbers on the command line, such as ``--seeds 0-19``."""

import re
from collections.abc import Sequence

from ..errors import require

MOST_NUMBERS = 10_000


def numbers_of(word: str) -> list[str]:
    """Return the numbers of a range, or the word itself.

    >>> numbers_of("0-3"), numbers_of("7"), numbers_of("1e-3")
    (['0', '1', '2', '3'], ['7'], ['1e-3'])

    Raises:
        UsageError: for a range that is empty, or has more than 10,000 numbers.
    """
    bounds = re.fullmatch(r"(\d+)-(\d+)", word)
    if bounds is None:
        return [word]
    first, last = map(int, bounds.groups())
    count = f"{max(0, last + 1 - first):,}"
    problem = f"The range {word} has {count} numbers; it must have 1 to {MOST_NUMBERS:,}, as in --seeds 0-19."
    require(0 <= last - first < MOST_NUMBERS, problem)
    return [*map(str, range(first, last + 1))]


def with_all_seeds(words: Sequence[str], *, of_experiment: bool = False) -> list[str]:
    """Replace ranges of seeds by the seeds, and ``--seeds`` by ``--seed``, unless the experiment has such an option.

    >>> with_all_seeds(["--seeds", "0-2", "7", "--epochs", "2"]), with_all_seeds(["--seed=4-5"])
    (['--seed', '0', '1', '2', '7', '--epochs', '2'], ['--seed', '4', '5'])
    """
    flags = ("--seed",) if of_experiment else ("--seed", "--seeds")
    result, in_seeds = list[str](), False
    for word in words:
        flag, equals, value = word.partition("=")
        if word.startswith("--"):
            in_seeds = flag in flags
            result += ["--seed"] if in_seeds else [word]
            result += numbers_of(value) if in_seeds and equals else []
        else:
            result += numbers_of(word) if in_seeds else [word]
    return result
