"""The page of ``loopscope report``: one file with runs, curves and tables, which fetches nothing."""

import base64
import gzip
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import listed
from ..hooks import HookRegistry, MetricInfo
from .curves import Curve
from .found import FoundRun
from .panels import COLOURS, run_labels
from .recording import Recording, look_carefully, read_alerts, read_recording

LARGEST_PAGE = 8_000_000
MOST_PIXELS, FEWEST_PIXELS = 1000, 4
MOST_POINTS = 600_000  # in a page, which has to be drawn by a browser
TEMPLATES = Path(__file__).with_name("template")
MARK = "<!-- A report of loopscope. -->"
FIRST = 4  # so many charts are open at first


@dataclass(frozen=True)
class ShownRun:
    """A run with what a page shows of it."""

    label: str
    run: FoundRun
    recording: Recording
    alerts: Sequence[Mapping[str, Any]]
    problems: Sequence[str]

    @property
    def treatments(self) -> str:
        """The treatments in words, empty where there are none."""
        return self.run.record.treatments_text if self.run.record and self.run.record.treatments else ""


def shown_runs(folders: Sequence[Path], most: int) -> list[ShownRun]:
    """Read the folders of runs; of their records those of at most ``most`` bytes."""
    found = []
    for folder, label in zip(folders, run_labels([folder.resolve() for folder in folders]), strict=True):
        run = look_carefully(folder)
        recording, (alerts, missing) = read_recording(run, most), read_alerts(folder)
        problems = [text for text in (run.problem, *recording.problems, missing) if text]
        found.append(ShownRun(label, run, recording, alerts, problems))
    return found


def page_of(runs: Sequence[ShownRun], sentences: Sequence[str], title: str) -> bytes:
    """Return the page, with as many points of each curve as leave it within its size."""
    from plotly.offline import get_plotlyjs

    curves = [shown.recording.curves() for shown in runs]
    lengths = np.array([len(curve.steps) for of_run in curves for curve in of_run.values()])
    library, pixels = packed(get_plotlyjs()), MOST_PIXELS
    while pixels > FEWEST_PIXELS and np.minimum(lengths, 2 * pixels).sum() > MOST_POINTS:
        pixels //= 2
    names = list(dict.fromkeys(name for of_run in curves for name in of_run))
    while True:
        content = page_content(runs, curves, names, pixels)
        page = _filled(runs, sentences, title, library, content)
        if len(page) <= LARGEST_PAGE or (pixels <= FEWEST_PIXELS and not names):
            return page
        if pixels > FEWEST_PIXELS:
            pixels //= 2
        else:
            names = names[: len(names) // 2]


def page_content(
    runs: Sequence[ShownRun], curves: Sequence[Mapping[str, Curve]], names: Sequence[str], pixels: int
) -> dict[str, Any]:
    """Return what the scripts of the page draw, in plain values."""
    infos = explained(names)
    metrics = []
    for name in names:
        found = [(index, of_run[name]) for index, of_run in enumerate(curves) if name in of_run]
        info = infos.get(name)
        about = {"formula": info.formula, "range": info.range, "reading": info.reading} if info else {}
        metrics.append({"name": name, **about, "curves": [_curve(index, curve, pixels) for index, curve in found]})
    left_out = len({name for of_run in curves for name in of_run}) - len(names)
    return {
        "runs": [
            {
                "label": shown.label,
                "colour": COLOURS[index % len(COLOURS)],
                "treatments": shown.treatments,
                "alerts": shown.alerts,
            }
            for index, shown in enumerate(runs)
        ],
        "metrics": metrics,
        "first": first_metrics(names),
        "leftOut": left_out,
    }


def _curve(index: int, curve: Curve, pixels: int) -> dict[str, Any]:
    kept = thinned(curve, pixels)
    return {
        "run": index,
        "steps": [int(step) for step in curve.steps[kept]],
        "values": [value if math.isfinite(value) else repr(value) for value in curve.values[kept].tolist()],
        "points": len(curve.steps),
    }


def thinned(curve: Curve, pixels: int) -> NDArray[np.intp]:
    """Return which points of a curve to draw on so many pixels: least, largest and not finite ones of each, the ends.

    >>> thinned(Curve.of_points(range(9), [0, 5, 1, 1, 1, 1, 1, -5, 1]), 2).tolist()
    [0, 1, 4, 7, 8]
    """
    count = len(curve.steps)
    if count <= 2 * pixels:
        return np.arange(count)
    places = (curve.steps - curve.steps[0]) / (curve.steps[-1] - curve.steps[0])
    pixel = np.minimum(places * pixels, pixels - 1).astype(np.intp)
    finite = np.flatnonzero(curve.finite)
    order = finite[np.lexsort((curve.values[finite], pixel[finite]))]
    begins = np.flatnonzero(np.diff(pixel[order], prepend=-1))
    ends = np.flatnonzero(np.diff(pixel[order], append=pixels))
    kept = [np.array([0, count - 1]), order[begins], order[ends]]
    for is_odd in (np.isnan, np.isposinf, np.isneginf):
        odd = np.flatnonzero(is_odd(curve.values))
        kept.append(odd[np.unique(pixel[odd], return_index=True)[1]])
    return np.unique(np.concatenate(kept))


def explained(names: Iterable[str]) -> dict[str, MetricInfo]:
    """Return what the hooks say of their metrics, by full name, as far as hooks of these names are registered."""
    known = set(HookRegistry.names())
    tables: dict[str, dict[str, MetricInfo]] = {}
    found = {}
    for name in names:
        hook, _, metric = name.partition("/")
        if hook in known and hook not in tables:
            infos = HookRegistry.get(hook)().describe_metrics()
            tables[hook] = {info.name.partition("/<")[0]: info for info in infos}
        while metric and hook in tables:  # a metric of a dict, or of a parameter, is explained as a whole
            if metric in tables[hook]:
                found[name] = tables[hook][metric]
                break
            metric = metric.rpartition("/")[0]
    return found


def first_metrics(names: Sequence[str]) -> list[str]:
    """Return the metrics whose charts are open at first: those of hooks that are always on, then the others."""
    always = {hook.name for hook in HookRegistry if hook.always}
    return sorted(names, key=lambda name: name.partition("/")[0] not in always)[:FIRST]


def _filled(
    runs: Sequence[ShownRun], sentences: Sequence[str], title: str, library: str, content: Mapping[str, Any]
) -> bytes:
    """Put everything into the page's template; what comes from runs is escaped, or compressed."""
    parts = {name: (TEMPLATES / f"page.{name}").read_text("utf-8") for name in ("html", "css", "js")}
    problems = [f"{shown.label}: {problem}" for shown in runs for problem in shown.problems]
    hooks = {shown.label: listed(list(shown.run.record.hooks)) or "none" for shown in runs if shown.run.record}
    page = Template(parts["html"]).substitute(
        mark=MARK,
        title=text(title),
        css=parts["css"],
        js=parts["js"],
        runs="".join(f"<li>{text(sentence)}</li>" for sentence in sentences),
        problems="".join(f"<li>{text(problem)}</li>" for problem in problems),
        hooks=table(("run", "hooks"), hooks.items()),
        library=library,
        data=packed(json.dumps(content, allow_nan=False)),
    )
    return page.encode("utf-8", "replace")


def packed(content: str) -> str:
    """Compress a text into letters that mean nothing to HTML."""
    return base64.b64encode(gzip.compress(content.encode(), 6, mtime=0)).decode()


def text(value: object) -> str:
    r"""Return any value as text in HTML, without control characters.

    >>> text("<script>\0")
    '&lt;script&gt;?'
    """
    return html.escape("".join(letter if letter.isprintable() else "?" for letter in str(value)))


def table(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in HTML, or a sentence where it is empty."""
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    head = "".join(f'<th scope="col">{text(cell)}</th>' for cell in heading)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>" if body else ""
