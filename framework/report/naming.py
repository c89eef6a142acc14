"""How runs, metrics and files of pictures are called."""

import posixpath
import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from pathlib import Path

NEAREST = 4
LONGEST_STEM = 80


def run_labels(folders: Sequence[Path]) -> list[str]:
    """Return the shortest names that tell runs apart: of their paths' last parts, those in which they differ.

    >>> run_labels([Path("/out/mod/stride"), Path("/out/mod/target")])
    ['stride', 'target']
    >>> run_labels([Path("/seed1/mod/stride"), Path("/seed2/mod/stride")])
    ['seed1', 'seed2']
    >>> run_labels([Path("/a/mod/stride"), Path("/a/mod/target"), Path("/b/mod/stride")])
    ['a/stride', 'a/target', 'b/stride']
    """
    tails = [folder.parts[::-1] for folder in folders]
    chosen: list[list[str]] = [[] for _ in folders]
    for depth in range(max(map(len, tails))):
        parts = [tail[depth] if depth < len(tail) else "" for tail in tails]
        if len(set(parts)) > 1 or len(folders) == 1:
            chosen = [[part, *rest] if part else rest for part, rest in zip(parts, chosen, strict=True)]
        if chosen[0] and len(set(map(tuple, chosen))) == len(folders):
            break
    return ["/".join(parts) for parts in chosen]


def near_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names nearest to a pattern, by their whole or by their last part.

    >>> near_names("los", ["norms/total_grad_norm", "training_metrics/loss"])
    ['training_metrics/loss']
    """
    word = re.sub(r"[*?\[\]]", "", pattern)

    def nearness(name: str) -> float:
        parts = (name, name.rpartition("/")[2], name.partition("/")[0])
        inside = 0.9 if word and word in name else 0.0
        return max(inside, *(SequenceMatcher(None, word, part).ratio() for part in parts))

    nearest = sorted(names, key=lambda name: (-nearness(name), name))[:NEAREST]
    return [name for name in nearest if nearness(name) >= 0.6]


def shared_beginning(names: Sequence[str]) -> str:
    """Return the parts with which all names begin, none of them being whole.

    >>> shared_beginning(["norms/grad_norm/a", "norms/grad_norm/b"]), shared_beginning(["a/b", "a/b/c"])
    ('norms/grad_norm', 'a')
    """
    return posixpath.commonpath([posixpath.dirname(name) for name in names])


def wrapped(name: str, width: int) -> str:
    r"""Break a long name behind slashes, dots and underscores.

    >>> wrapped("norms/weight_norm/blocks.0.weight", 20)
    'norms/weight_norm/\nblocks.0.weight'
    """
    lines = [""]
    for piece in re.findall(r"[^/._]*[/._]?", name):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def file_stem(parts: Iterable[str]) -> str:
    """Return the name of a file, made of words.

    >>> file_stem(["mod", "", "norms/grad norm"])
    'mod_norms_grad_norm'
    """
    return "_".join(re.sub(r"[^\w.-]+", "_", part).strip("_") for part in parts if part)[:LONGEST_STEM]
