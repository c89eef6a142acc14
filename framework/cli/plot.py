"""The command ``loopscope plot``: recorded metrics against steps or epochs."""

import hashlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..console import printable
from ..durable_files import path_exists
from ..errors import listed
from ..optional_packages import require_package
from ..report import LOSSES, Look, hook_panels, hook_picture, matcher, picture_of, read_runs, save_picture
from ..runs import require
from .parser import NAMES, CommandParser, dashed, write_lines

FORMATS = ("png", "svg", "pdf")
LONGEST_STEM = 80
PROVENANCE = "provenance"  # a picture that hooks define, and the option that draws it
SIDES = 2, 40  # smallest and largest side of a picture, in inches
# Options that are part of the file name, and options that do not change the picture.
LOOKS = ("overlay", "seeds", "log_x", "log_y", "linear_y", "smooth", "x", "size")
NO_LOOK = ("RUN", "out", "overwrite", "format")
SWITCHES = {
    f"--{PROVENANCE}": "the two gradients of a tied embedding: norms, ratio, clip threshold, cosine",
    "--overlay": "draw all metrics in one panel instead of one panel each",
    "--seeds": "draw the mean over runs that differ only in their seeds, with its 95 %% t-interval as a band",
    "--log-x": "use a logarithmic horizontal axis",
    "--log-y": "use logarithmic vertical axes (default: if positive values span more than three decades)",
    "--linear-y": "use linear vertical axes",
    "--overwrite": "overwrite an existing file at --out",
}


def plot(words: Sequence[str]) -> None:
    """Draw the requested picture; raises :class:`UsageError` before anything is written."""
    parser = plot_parser()
    given = parser.defaults | parser.parse(words)
    _check(given)
    log_y = True if given["log_y"] else False if given["linear_y"] else None
    require_package("matplotlib", "loopscope plot")
    panels = hook_panels(PROVENANCE) if given[PROVENANCE] else []
    patterns = given["metrics"] or LOSSES
    wanted = matcher([*patterns, *(name for panel in panels for name in (*panel.curves, *panel.shares))])
    runs, unit = read_runs(map(Path, given["RUN"]), wanted, given["x"])
    if given[PROVENANCE]:
        picture = hook_picture(PROVENANCE, runs)
    else:
        names = listed(list(dict.fromkeys(name for run in runs for name in run.names))) or "none"
        problem = f"loopscope plot needs --metrics PATTERN... or --provenance; recorded metrics: {names}."
        losses = {name: max(len(run.curves[name].steps) for run in runs if name in run.curves)
                  for name in LOSSES if any(name in run.curves for run in runs)}  # fmt: skip
        require(bool(given["metrics"] or losses), problem)
        metrics = given["metrics"] or [max(losses, key=losses.__getitem__)]
        picture = picture_of(runs, metrics, seeds=given["seeds"], overlay=given["overlay"])
    options = {name: value for name, value in given.items() if value != parser.defaults.get(name, False)}
    about = _origin(options)
    path = _path(picture.words, options, about[1])
    look = Look(given["smooth"], given["log_x"], log_y, unit, _size(given["size"]), given["title"])
    save_picture(picture, look, path, about)
    write_lines(*picture.sentences, f"Wrote {path}.")


def _origin(options: Mapping[str, Any]) -> tuple[str, str]:
    """Return the command that draws a picture, stored in the picture, and a mark unique to that command."""
    words = []
    for name, value in sorted(options.items()):
        if name not in NO_LOOK:
            words += [dashed(name), *(value if isinstance(value, list) else [] if value is True else [str(value)])]
    resolved = [str(Path(run).resolve()) for run in options["RUN"]]
    digest = hashlib.sha256(shlex.join([*resolved, *words]).encode(errors="surrogatepass")).hexdigest()
    return printable(shlex.join(["loopscope", "plot", *options["RUN"], *words])), f"loopscope plot {digest[:16]}"


def _path(words: Sequence[str], options: Mapping[str, Any], mark: str) -> Path:
    """Return the path to write to; it never overwrites another command's picture or an unrelated file."""
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
    require(may_write, f"{path} exists and this command did not draw it; use --overwrite, or another --out.")
    return path


def is_free(path: Path, mark: str) -> bool:
    """Return whether ``path`` is free or has a picture with the mark; raises :class:`UsageError` if not writable."""
    exists = path_exists(path)
    above = next(folder for folder in path.absolute().parents if folder.exists())
    require(not path.is_dir(), f"{path} is a folder; --out must name a file.")
    writable = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
    require(writable, f"{path} cannot be written: {above} is not a writable folder.")
    return not exists or (path.is_file() and os.access(path, os.R_OK) and mark.encode() in path.read_bytes())


def plot_parser() -> CommandParser:
    """Build the parser of ``loopscope plot``."""
    parser = CommandParser(
        "plot RUN... [--metrics PATTERN...] [options]\n       loopscope plot RUN... --provenance [options]",
        "Draw metrics of runs against steps or epochs, from their records.",
    )
    parser.add_argument("RUN", nargs="*", help="the folder of a run, or of an experiment for all its strategies")
    levels = "full names of metrics, or quoted patterns: 'norms/*', or 'norms/**' for all levels"
    metrics = f"{levels} (default: the training loss)"
    parser.add("metrics", NAMES, metrics, default=[], metavar="PATTERN")
    for switch, text in SWITCHES.items():
        parser.add_argument(switch, action="store_true", help=text)
    smooth = "draw the moving mean over N points, with the original curve faintly behind it"
    parser.add("smooth", int, smooth, default=1)
    axis = "the horizontal axis (default: epoch if all runs recorded epochs, else step)"
    parser.add("x", Literal["step", "epoch"] | None, axis)
    parser.add("size", str | None, "size in inches, such as 8x5 (default: fits the panels)", metavar="WIDTHxHEIGHT")
    parser.add("title", str | None, "the title (default: experiment and strategy)")
    parser.add("out", Path | None, "a .png, .svg or .pdf file (default: a PNG in the current folder)", metavar="FILE")
    parser.add("format", Literal["png", "svg", "pdf"] | None, "the file format if --out is not given")
    return parser


def _check(given: Mapping[str, Any]) -> None:
    """Refuse conflicting options, and values out of range."""
    usage = "the folder of a run, before its options: loopscope plot RUN... --metrics PATTERN..."
    require(bool(given["RUN"]), f"loopscope plot needs RUN, {usage}")
    conflicts = given["provenance"] and (given["overlay"] or given["metrics"] or given["seeds"])
    problem = "--provenance draws fixed panels; remove --metrics, --overlay and --seeds."
    require(not conflicts, problem)
    require(not (given["seeds"] and given["smooth"] > 1), "--seeds cannot be combined with --smooth.")
    require(not (given["log_y"] and given["linear_y"]), "--log-y and --linear-y exclude each other.")
    require(given["smooth"] >= 1, f"--smooth is {given['smooth']}; it must be a whole number of points, 1 or more.")
    out, kinds = given["out"], [given["format"]] if given["format"] else FORMATS
    fits = out is None or out.suffix.lower()[1:] in kinds
    require(fits, f"--out is {str(out)!r}; it must end in {' or '.join(map('.{}'.format, kinds))}.")
    _size(given["size"])


def _size(text: str | None) -> tuple[float, float] | None:
    """Parse ``WIDTHxHEIGHT`` in inches; raises :class:`UsageError` for another form, and for sides out of range."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)x(\d+(?:\.\d+)?)", text or "0x0", re.ASCII)
    sides = (float(match[1]), float(match[2])) if match else (0.0, 0.0)
    least, most = SIDES
    fits = text is None or least <= min(sides) <= max(sides) <= most
    require(fits, f"--size is {text!r}; it must be WIDTHxHEIGHT, each from {least} to {most} inches, such as 8x5.")
    return sides if text else None
