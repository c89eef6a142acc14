"""``loopscope plot RUN... --metrics PATTERN...``: draws recorded metrics against steps."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import UsageError, listed, require_package
from ..report import (
    WANTED,
    Look,
    Picture,
    RecordedRun,
    file_stem,
    matcher,
    metric_picture,
    provenance_picture,
    read_run,
)
from ..runs import require, run_folders
from .words import Words, parted

SUFFIXES = (".png", ".svg", ".pdf")
PLOT_USAGE = """usage: loopscope plot RUN... --metrics PATTERN... [options]
       loopscope plot RUN... --provenance [options]

  draws metrics of runs against steps, from the record that --hook-jsonl or --hook-csv wrote

  RUN                   the folder of a run, OUTPUT_DIR/EXPERIMENT/STRATEGY, or of an experiment: all its strategies
  --metrics PATTERN...  metrics by their full names, or by patterns in quotes: 'norms/*'
  --provenance          the two gradients of a tied embedding: norms, ratio, clip threshold, cosine
  --overlay             draw all metrics in one panel, instead of each in its own
  --smooth N            draw the mean of the N points around each, the curve itself faintly behind it
  --log-x               a logarithmic axis of steps
  --log-y, --linear-y   vertical axes; by default logarithmic where positive values span more than three decades
  --out FILE            where to write, as .png, .svg or .pdf; by default a PNG in the present folder
"""
SWITCHES = ("provenance", "overlay", "log-x", "log-y", "linear-y")


def plot(words: Sequence[str], show: Callable[[str], None]) -> None:
    """Run the command; raises :class:`UsageError` before anything is written."""
    given = parted(words, switches=SWITCHES, values=("smooth", "out"), lists=("metrics",))
    patterns = given.lists.get("metrics", [])
    _check(given)
    look = _look(given)
    out = _out(given)
    require_package("matplotlib", "loopscope plot", "plot")
    wanted = WANTED.__contains__ if "provenance" in given.switches else matcher(patterns)
    runs = [read_run(folder, wanted) for folder in _folders(given.plain)]
    if "provenance" in given.switches:
        picture = provenance_picture(runs)
    else:
        picture = metric_picture(runs, _named(patterns, runs), overlay="overlay" in given.switches)
    path = out or default_name(picture)
    _check_writable(path)
    _write(picture, look, path)
    show("".join(f"{sentence}\n" for sentence in (*picture.sentences, f"{path} is written.")))


def default_name(picture: Picture) -> Path:
    """Return a name in the present folder that says what is drawn, and of what."""
    return Path(file_stem([*picture.title.split("/"), picture.subject]) + SUFFIXES[0])


def _write(picture: Picture, look: Look, path: Path) -> None:
    from ..report import figure_of, save

    save(figure_of(picture, look), path)


def _folders(paths: Sequence[str]) -> list[Path]:
    """Return the folders of runs, each once."""
    folders = [folder for path in paths for folder in run_folders(Path(path), "plot")]
    return list({folder.resolve(): folder for folder in folders}.values())


def _check(given: Words) -> None:
    """Refuse words that do not go together."""
    switches = given.switches
    require(
        bool(given.plain),
        "loopscope plot needs RUN, the folder of a run, before its options: loopscope plot RUN... --metrics PATTERN...",
    )
    require(
        not ("provenance" in switches and ("overlay" in switches or given.lists)),
        "--provenance draws its own panels, and goes with neither --metrics nor --overlay.",
    )
    require(not {"log-y", "linear-y"} <= switches, "--log-y and --linear-y exclude each other.")


def _named(patterns: Sequence[str], runs: Sequence[RecordedRun]) -> Sequence[str]:
    """Return the patterns; raises :class:`UsageError` that names what could be drawn if there are none."""
    known = list(dict.fromkeys(name for run in runs for name in run.names))
    require(
        bool(patterns),
        f"loopscope plot needs --metrics PATTERN... or --provenance; there are {listed(known) or 'none'}.",
    )
    return patterns


def _look(given: Words) -> Look:
    log_y = {"log-y": True, "linear-y": False}
    text = given.values.get("smooth", "1")
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(f"--smooth is {text!r}; it must be a whole number of points, 1 or more.")
    chosen = [wanted for switch, wanted in log_y.items() if switch in given.switches]
    return Look(int(text), "log-x" in given.switches, chosen[0] if chosen else None)


def _out(given: Words) -> Path | None:
    text = given.values.get("out")
    if text is None:
        return None
    path = Path(text)
    require(path.suffix.lower() in SUFFIXES, f"--out is {text!r}; it must end in {', '.join(SUFFIXES[:-1])} or .pdf.")
    return path


def _check_writable(path: Path) -> None:
    """Raise :class:`UsageError` where a file cannot be written."""
    existing = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir():
        raise UsageError(f"{path} is a folder; --out takes the name of a file.")
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"{path} cannot be written: {existing} is not a writable folder.")
