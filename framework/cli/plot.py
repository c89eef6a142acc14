"""``loopscope plot RUN... --metrics PATTERN...``: draws recorded metrics against steps or epochs."""

import hashlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..console import printable
from ..durable_files import is_there
from ..errors import listed, require_package
from ..report import Look, hook_panels, hook_picture, matcher, metric_picture, read_runs, save_picture, seeds_picture
from ..runs import require
from .parser import NAMES, CommandParser, dashed, write_line

FORMATS = ("png", "svg", "pdf")
LONGEST_STEM = 80
PROVENANCE = "provenance"  # the picture that hooks ask for, and the option that draws it
SIDES = 2, 40  # inches of a picture, at least and at most
# Options that are in the name of a file, and those on which a picture does not depend, but for the runs.
LOOKS = ("overlay", "seeds", "log_x", "log_y", "linear_y", "smooth", "x", "size")
NO_LOOK = ("RUN", "out", "overwrite", "format")
SWITCHES = {
    f"--{PROVENANCE}": "the two gradients of a tied embedding: norms, ratio, clip threshold, cosine",
    "--overlay": "draw all metrics in one panel, instead of each in its own",
    "--seeds": "draw the mean of runs that differ in their seeds alone, with its 95 %% t-interval as a band",
    "--log-x": "a logarithmic axis of steps or epochs",
    "--log-y": "logarithmic vertical axes; by default only where positive values span more than three decades",
    "--linear-y": "linear vertical axes",
    "--overwrite": "write over whatever lies at --out",
}


def plot(words: Sequence[str]) -> None:
    """Draw what the words ask for; raises :class:`UsageError` before anything is written."""
    parser = _parser()
    given = parser.defaults | parser.parse(words)
    _check(given)
    log_y = True if given["log_y"] else False if given["linear_y"] else None
    require_package("matplotlib", "loopscope plot", "plot")
    panels = hook_panels(PROVENANCE) if given[PROVENANCE] else []
    wanted = matcher([*given["metrics"], *(name for panel in panels for name in (*panel.curves, *panel.shares))])
    runs, unit = read_runs(map(Path, given["RUN"]), wanted, given["x"])
    if given[PROVENANCE]:
        picture = hook_picture(PROVENANCE, runs)
    else:
        there = listed(list(dict.fromkeys(name for run in runs for name in run.names))) or "none"
        needed = f"loopscope plot needs --metrics PATTERN... or --provenance; there are {there}."
        require(given["metrics"] != [], needed)
        draw = seeds_picture if given["seeds"] else metric_picture
        picture = draw(runs, given["metrics"], overlay=given["overlay"])
    options = {name: value for name, value in given.items() if value != parser.defaults.get(name, False)}
    about = _origin(options)
    path = _path(picture.words, options, about[1])
    look = Look(given["smooth"], given["log_x"], log_y, unit, _size(given["size"]), given["title"])
    save_picture(picture, look, path, about)
    for sentence in (*picture.sentences, f"{path} is written."):
        write_line(sentence)


def _origin(options: Mapping[str, Any]) -> tuple[str, str]:
    """Return the command that draws a picture, for the picture to carry, and a mark that no other command has."""
    words = []
    for name, value in sorted(options.items()):
        if name not in NO_LOOK:
            words += [dashed(name), *(value if isinstance(value, list) else [] if value is True else [str(value)])]
    resolved = [str(Path(run).resolve()) for run in options["RUN"]]
    digest = hashlib.sha256(shlex.join([*resolved, *words]).encode(errors="surrogatepass")).hexdigest()
    return printable(shlex.join(["loopscope", "plot", *options["RUN"], *words])), f"loopscope plot {digest[:16]}"


def _path(words: Sequence[str], options: Mapping[str, Any], mark: str) -> Path:
    """Return where to write: never over another command's picture, nor over a file that is no picture of ours."""
    path: Path | None = options.get("out")
    if not path:
        looks = [f"{name}-{options[name]}".removesuffix("-True") for name in LOOKS if name in options]
        parts = [re.sub(r"[^\w.-]+", "_", part).strip("_.") for part in (*words, *looks)]
        name, suffix = "_".join(filter(None, parts)), f".{options.get('format', FORMATS[0])}"
        stem = name.encode()[:LONGEST_STEM].decode(errors="ignore")
        path = Path(stem + suffix)
        if stem != name or not is_free(path, mark):
            path = Path(f"{stem}_{mark[-8:]}{suffix}")
    may_write = is_free(path, mark) or "overwrite" in options
    require(may_write, f"{path} is not what this command drew before; --overwrite writes over it, --out names another.")
    return path


def is_free(path: Path, mark: str) -> bool:
    """Return whether nothing lies at ``path``, or a picture with the mark; raises :class:`UsageError` for no place."""
    there = is_there(path)
    above = next(folder for folder in path.absolute().parents if folder.exists())
    require(not path.is_dir(), f"{path} is a folder; --out takes the name of a file.")
    writable = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
    require(writable, f"{path} cannot be written: {above} is not a writable folder.")
    return not there or (path.is_file() and os.access(path, os.R_OK) and mark.encode() in path.read_bytes())


def _parser() -> CommandParser:
    parser = CommandParser(
        "plot RUN... --metrics PATTERN... [options]\n       loopscope plot RUN... --provenance [options]",
        "Draw metrics of runs against steps or epochs, from their records.",
    )
    parser.add_argument("RUN", nargs="*", help="the folder of a run, or of an experiment: all its strategies")
    metrics = "metrics by their full names, or by patterns in quotes: 'norms/*', 'norms/**' with all below"
    parser.add("metrics", NAMES, metrics, default=[], metavar="PATTERN")
    for switch, text in SWITCHES.items():
        parser.add_argument(switch, action="store_true", help=text)
    parser.add("smooth", int, "draw the mean of N points around each, the curve itself faintly behind it", default=1)
    parser.add("x", Literal["step", "epoch"] | None, "by default epochs, where all runs recorded their ends")
    parser.add("size", str | None, "in inches, as in 8x5; by default as the panels need it", metavar="WIDTHxHEIGHT")
    parser.add("title", str | None, "by default experiment and strategy")
    parser.add("out", Path | None, "a .png, .svg or .pdf; by default a PNG in the present folder", metavar="FILE")
    parser.add("format", Literal["png", "svg", "pdf"] | None, "of the picture without --out")
    return parser


def _check(given: Mapping[str, Any]) -> None:
    """Refuse words that do not go together, and values out of range."""
    require(
        bool(given["RUN"]),
        "loopscope plot needs RUN, the folder of a run, before its options: loopscope plot RUN... --metrics PATTERN...",
    )
    with_others = given["provenance"] and (given["overlay"] or given["metrics"] or given["seeds"])
    own = "--provenance draws its own panels, and goes with neither --metrics nor --overlay nor --seeds."
    require(not with_others, own)
    require(not (given["seeds"] and given["smooth"] > 1), "--seeds draws means by themselves, without --smooth.")
    require(not (given["log_y"] and given["linear_y"]), "--log-y and --linear-y exclude each other.")
    require(given["smooth"] >= 1, f"--smooth is {given['smooth']}; it must be a whole number of points, 1 or more.")
    out, kinds = given["out"], [given["format"]] if given["format"] else FORMATS
    fits = out is None or out.suffix.lower()[1:] in kinds
    require(fits, f"--out is {str(out)!r}; it must end in {' or '.join(map('.{}'.format, kinds))}.")
    _size(given["size"])


def _size(text: str | None) -> tuple[float, float] | None:
    """Return ``WIDTHxHEIGHT`` in inches; raises :class:`UsageError` for another text, and for sides out of range."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)x(\d+(?:\.\d+)?)", text or "0x0", re.ASCII)
    sides = (float(found[1]), float(found[2])) if found else (0.0, 0.0)
    fits = text is None or SIDES[0] <= min(sides) <= max(sides) <= SIDES[1]
    require(fits, f"--size is {text!r}; it must be WIDTHxHEIGHT, each from {SIDES[0]} to {SIDES[1]} inches, as in 8x5.")
    return sides if text else None
