"""``loopscope plot RUN... --metrics PATTERN...``: draws recorded metrics against steps."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError, listed, require_package
from ..report import Look, Picture, hook_panels, hook_picture, matcher, metric_picture, read_curves, save_picture
from ..runs import require, run_folders
from .parser import NAMES, CommandParser, write_line

SUFFIXES = (".png", ".svg", ".pdf")
LONGEST_STEM = 80
PROVENANCE = "provenance"  # the picture that hooks ask for, and the option that draws it
SWITCHES = {
    f"--{PROVENANCE}": "the two gradients of a tied embedding: norms, ratio, clip threshold, cosine",
    "--overlay": "draw all metrics in one panel, instead of each in its own",
    "--log-x": "a logarithmic axis of steps",
    "--log-y": "logarithmic vertical axes; by default only where positive values span more than three decades",
    "--linear-y": "linear vertical axes",
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
    folders = [folder for path in given["RUN"] for folder in run_folders(Path(path), "plot")]
    runs = [read_curves(folder, wanted) for folder in {folder.resolve(): folder for folder in folders}.values()]
    if given[PROVENANCE]:
        picture = hook_picture(PROVENANCE, runs)
    else:
        known = dict.fromkeys(name for run in runs for name in run.names)
        there = listed(list(known)) or "none"
        require(
            bool(given["metrics"]), f"loopscope plot needs --metrics PATTERN... or --provenance; there are {there}."
        )
        picture = metric_picture(runs, given["metrics"], overlay=given["overlay"])
    path = given["out"] or _default_path(picture)
    _check_writable(path)
    save_picture(picture, Look(given["smooth"], given["log_x"], log_y), path)
    for sentence in (*picture.sentences, f"{path} is written."):
        write_line(sentence)


def _parser() -> CommandParser:
    parser = CommandParser(
        "plot RUN... --metrics PATTERN... [options]\n       loopscope plot RUN... --provenance [options]",
        "Draw metrics of runs against steps, from their record (JSONL or CSV).",
    )
    run = "the folder of a run, OUTPUT_DIR/EXPERIMENT/STRATEGY, or of an experiment: all its strategies"
    parser.add_argument("RUN", nargs="*", help=run)
    metrics = "metrics by their full names, or by patterns in quotes: 'norms/*'"
    parser.add("metrics", NAMES, metrics, default=[], metavar="PATTERN")
    for switch, text in SWITCHES.items():
        parser.add_argument(switch, action="store_true", help=text)
    smooth = "draw the mean of the N points around each, the curve itself faintly behind it"
    parser.add("smooth", int, smooth, default=1)
    out = "where to write, as .png, .svg or .pdf; by default a PNG in the present folder"
    parser.add("out", Path | None, out, metavar="FILE")
    return parser


def _default_path(picture: Picture) -> Path:
    words = [re.sub(r"[^\w.-]+", "_", part).strip("_") for part in (*picture.title.split("/"), picture.subject) if part]
    return Path("_".join(words)[:LONGEST_STEM] + SUFFIXES[0])


def _check(given: Mapping[str, Any]) -> None:
    """Refuse words that do not go together, and values out of range."""
    require(
        bool(given["RUN"]),
        "loopscope plot needs RUN, the folder of a run, before its options: loopscope plot RUN... --metrics PATTERN...",
    )
    require(
        not (given["provenance"] and (given["overlay"] or given["metrics"])),
        "--provenance draws its own panels, and goes with neither --metrics nor --overlay.",
    )
    require(not (given["log_y"] and given["linear_y"]), "--log-y and --linear-y exclude each other.")
    require(given["smooth"] >= 1, f"--smooth is {given['smooth']}; it must be a whole number of points, 1 or more.")
    out = given["out"]
    require(out is None or out.suffix.lower() in SUFFIXES, f"--out is {str(out)!r}; it must end in .png, .svg or .pdf.")


def _check_writable(path: Path) -> None:
    """Raise :class:`UsageError` where a file cannot be written."""
    existing = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir():
        raise UsageError(f"{path} is a folder; --out takes the name of a file.")
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"{path} cannot be written: {existing} is not a writable folder.")
