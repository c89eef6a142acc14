"""The page of ``loopscope report``: one self-contained HTML file with runs, curves and tables."""

import base64
import gzip
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..doctor import WORDS, StepTimes, memory_text, milliseconds_text
from ..errors import listed, shortened
from ..runs import RunRecord
from .comparison import compare_over_seeds, differing_parts, evaluations
from .curves import MetricCurve
from .record_scan import Scan
from .relevance import finding_marks, order_of
from .result_table import result_table
from .run_reader import ShownRun, ThinnedRows
from .sections import alert_section, badge, is_phase, phase_section, run_cards, verdict_of
from .seeds import mean_curve
from .tables import RunStyle, cells, styles_of, table, text, titled

LARGEST_PAGE = 8_000_000
MOST_PIXELS, FEWEST_PIXELS, PIXELS_PER_ROW = 1000, 4, 5
MORE_PIXELS, DIGITS = 8, 6  # a factor for maps and always-on hooks; significant digits of thinned values
MOST_POINTS = 600_000  # about as many as fit into the largest page
LONGEST_SENTENCE, MOST_HOOKS = 1000, 30
TEMPLATES = Path(__file__).with_name("template")
WAITING = '<figure class="waiting"></figure>'  # keeps the place of a chart until it is drawn
MARK = "<!-- A report of loopscope. -->"
SPREAD = ("number", "group", "count", "mean", "deviation", "low", "high", "remark")
SEED_TEST = ("difference", "low", "high", "test", "seeds", "t", "p", "holm", "remark")
COSTS = ("seconds", "calls", "state_bytes", "peak_bytes")


def page_of(runs: Sequence[ShownRun], sentences: Sequence[str], title: str) -> bytes:
    """Return the page, with curves thinned until it fits into ``LARGEST_PAGE`` bytes.

    Args:
        runs: the runs, with their content.
        sentences: a sentence per run about its state.
        title: the heading.
    """
    from plotly.offline import get_plotlyjs

    compared = _compared(runs)
    rewinds, stretches = _rewinds(runs)
    drawn, order = [*runs, *stretches], order_of(runs)
    groups = [row["group"] or row["run"] for row in compared["runs"]] + [shown.label for shown in stretches]
    styles = styles_of(groups, [bool(shown.treatments) for shown in drawn])
    parts = {name: (TEMPLATES / f"page.{name}").read_text("utf-8") for name in ("html", "css", "js")}
    parts |= {"mark": MARK, "title": text(title), "library": packed(get_plotlyjs()), "rewinds": rewinds}
    marks = [*finding_marks(runs, order)]
    parts |= _answer(runs, sentences, styles[: len(runs)], [mark["number"] for mark in marks if mark["metrics"]])
    parts |= {"tables": tables_of(runs), "seeds": _seed_tables(compared)}
    described = [
        {"label": shown.label, "treatments": shortened(shown.treatments), "alerts": shown.alerts, **vars(style)}
        for shown, style in zip(drawn, styles, strict=True)
    ]
    data: dict[str, Any] = {"runs": described, "findings": marks, "main": order.main}
    data |= {"lead": order.lead, "first": order.first}
    opened = len(order.first) - len(order.lead)
    parts |= {"keyplaces": WAITING * len(order.lead), "places": WAITING * opened}
    parts |= {"legend": legend_of(drawn, styles), "marks": marks_key(drawn, marks)}
    names = [*order.names]
    names += dict.fromkeys(name for shown in stretches for name in (*shown.points, *shown.lists) if name not in names)
    return _filled(parts, data, names, drawn, _completed(compared["runs"]))


def legend_of(drawn: Sequence[ShownRun], styles: Sequence[RunStyle]) -> str:
    """Return the legend of all charts, whose boxes hide and show runs."""
    names = [f"{run.label} (treated: {run.treatments})" if run.treatments else run.label for run in drawn]
    return "".join(
        f'<label{titled(run)}><input type="checkbox" checked disabled>{style.swatch}<span>{text(name)}</span></label>'
        for run, name, style in zip(drawn, names, styles, strict=True)
    )


def marks_key(drawn: Sequence[ShownRun], findings: Sequence[Mapping[str, Any]]) -> str:
    """Return the meanings of the marks that the charts have; empty without marks."""
    names = [name for shown in drawn for name in shown.points]
    pairs = [pair for shown in drawn for pair in shown.points.values()]
    present = {
        "│ first step of a finding, with its number": any(finding["step"] > 0 for finding in findings),
        "▼ alert": any(shown.alerts for shown in drawn),
        "┊ change of phase": any(map(is_phase, names)),
        "× value that is not finite": not all(np.isfinite(np.asarray(values)).all() for _, values in pairs),
    }
    items = "".join(f"<li>{meaning}</li>" for meaning, is_present in present.items() if is_present)
    return f'<ul class="marks" aria-label="Marks in the charts">{items}</ul>' if items else ""


def _answer(
    runs: Sequence[ShownRun], sentences: Sequence[str], styles: Sequence[RunStyle], charted: Sequence[int]
) -> dict[str, str]:
    """Return the parts of the page that tell what happened: verdict, findings, results, alerts, phases, problems."""
    kind, verdict = verdict_of(runs)
    problems = [f"{shown.label}: {problem}" for shown in runs for problem in shown.problems]
    lines = "".join(f"<li>{text(line, LONGEST_SENTENCE)}</li>" for line in problems)
    phases = [name for shown in runs for name in shown.points if is_phase(name)]
    return {
        "kind": kind,
        "verdict": badge(kind, verdict),
        "cards": run_cards(runs, sentences, styles, charted),
        "results": result_table(runs, styles),
        "alerts": alert_section(runs, styles),
        "phases": phase_section(runs, styles, explained(phases)),
        "problems": f'<section><h2>Not shown</h2><ul id="problems">{lines}</ul></section>' if problems else "",
    }


def _filled(
    parts: dict[str, str],
    data: dict[str, Any],
    names: list[str],
    drawn: Sequence[ShownRun],
    seeds: Mapping[str, Sequence[int]],
) -> bytes:
    """Return the page with as many metrics, of the most relevant first, and points as fit into ``LARGEST_PAGE``."""
    count, pixels = len(names), MOST_PIXELS
    lengths = [len(values) for shown in drawn for _, values in shown.points.values()]
    while pixels > FEWEST_PIXELS and sum(min(length, 2 * pixels) for length in lengths) > MOST_POINTS:
        pixels //= 2
    while True:
        data |= {"metrics": metrics_of(names, drawn, seeds, pixels), "leftOut": count - len(names)}
        filled = parts | {"data": packed(json.dumps(data, allow_nan=False))}
        page = Template(parts["html"]).substitute(filled).encode("utf-8", "replace")
        if len(page) <= LARGEST_PAGE or not names:
            return page
        names = names if pixels > FEWEST_PIXELS else names[: len(names) // 2]
        pixels = max(FEWEST_PIXELS, pixels // 2)


def _rewinds(runs: Sequence[ShownRun]) -> tuple[str, list[ShownRun]]:
    """Return HTML sections about rewinds, and the rewinds with curves, which are drawn after all ``runs``."""
    sections, drawn = "", list[ShownRun]()
    for shown in runs:
        articles = ""
        for rewind in shown.rewinds:
            if isinstance(rewind, ShownRun):
                has_curves = bool(rewind.points or rewind.lists)
                articles += _stretch(rewind, len(runs) + len(drawn) if has_curves else None)
                drawn += [rewind] if has_curves else []
            else:  # the HTML of an explanation
                articles += rewind
        sections += f"<section><h2>Rewinds of {text(shown.label)}</h2>{articles}</section>" if articles else ""
    return sections, drawn


def _stretch(rewind: ShownRun, number: int | None) -> str:
    """Return the HTML of a rewind, with a button for its curves if it is the ``number``-th drawn run."""
    error = rewind.run.summary.get("error")
    ended = f"State: {rewind.run.state}{f' ({error})' if error else ''}."
    hooks = f"Added hooks, or hooks with other options: {listed(rewind.added, MOST_HOOKS) or 'none'}."
    button = f'<button type="button" data-run="{number}" hidden>Show its curves</button>'
    line = f"<p>{text(f'{ended} {hooks}', LONGEST_SENTENCE)}</p>"
    return f"<article><h3>{text(rewind.label)}</h3>{line}{'' if number is None else button}</article>"


def _compared(runs: Sequence[ShownRun]) -> dict[str, list[Any]]:
    """Compare the numbers of the evaluation over seeds."""
    wanted, scans = evaluations(), {}
    for shown in [shown for shown in runs if shown.run.record]:
        scans[shown.label] = scan = Scan(shown.run.path, "")
        for name in filter(wanted, shown.points):
            steps, values = shown.points[name]
            scan.add(name, [int(step) for step in steps], values)
    return compare_over_seeds({shown.label: shown.run for shown in runs}, scans)


def _completed(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return the runs of each group over seeds: completed runs, one per seed."""
    groups: dict[str, dict[int, int]] = {}
    for index, row in enumerate(rows):
        if row["group"] and row["state"] == "completed" and row["seed"] is not None:
            groups.setdefault(row["group"], {}).setdefault(row["seed"], index)
    return {group: [*seeds.values()] for group, seeds in groups.items()}


def _seed_tables(compared: Mapping[str, list[Any]]) -> str:
    """Return HTML tables of spreads and tests; empty if no group has two seeds."""
    spreads, tests = compared["spreads"], compared["tests"]
    if not spreads:
        return ""
    tested = sum(test["p"] is not None for test in tests)
    paragraphs = "".join(f"<p>{text(sentence, LONGEST_SENTENCE)}</p>" for sentence in compared["sentences"])
    pairs = [(row["number"], f"{row['a']} − {row['b']}", *cells(row, SEED_TEST)) for row in tests]
    means = table("Over seeds", SPREAD, [cells(row, SPREAD) for row in spreads])
    title = f"Do groups differ? {tested} tests; holm is p after Holm's correction"
    return means + paragraphs + table(title, ("number", "groups", *SEED_TEST), pairs)


def metrics_of(
    names: Sequence[str], runs: Sequence[ShownRun], groups: Mapping[str, Sequence[int]], pixels: int
) -> list[dict[str, Any]]:
    """Return the drawings of each metric in plain values: curves of numbers, maps of lists."""
    infos, metrics, wide = explained(names), [], min(MOST_PIXELS, pixels * MORE_PIXELS)
    for name in names:
        info = infos.get(name, {})
        width = wide if info.get("first") else pixels
        curves = [_curve(index, *run.points[name], width) for index, run in enumerate(runs) if name in run.points]
        means = [_mean(group, seeds, runs, name, width) for group, seeds in groups.items()]
        maps = [_map(index, run.lists[name], wide) for index, run in enumerate(runs) if name in run.lists]
        shared = [mean for mean in means if mean and mean["steps"]]
        metrics.append({**info, "name": name, "curves": curves, "means": shared, "maps": maps})
    return metrics


def _curve(index: int, steps: Sequence[float], values: Sequence[float], pixels: int) -> dict[str, Any]:
    curve = MetricCurve.of_points(steps, values)
    kept = thinned(curve, pixels)
    drawn = plain_values(curve.values[kept].tolist(), is_whole=len(kept) == len(curve.steps))
    return {"run": index, "steps": [*map(int, curve.steps[kept])], "values": drawn, "points": len(curve.steps)}


def _mean(group: str, seeds: Sequence[int], runs: Sequence[ShownRun], name: str, pixels: int) -> dict[str, Any] | None:
    """Return the mean over seeds that have a metric, with its interval at each step; none of a single seed."""
    seeds = [index for index in seeds if name in runs[index].points]
    if len(seeds) < 2:
        return None
    curve = mean_curve([MetricCurve.of_points(*runs[index].points[name]) for index in seeds])
    assert curve.half is not None
    kept = thinned(curve, pixels)
    values, half = curve.values[kept], curve.half[kept]
    drawn = {"low": values - half, "values": values, "high": values + half}
    plain = {part: plain_values(numbers.tolist(), is_whole=False) for part, numbers in drawn.items()}
    steps = [*map(int, curve.steps[kept])]
    return {"group": group, "runs": seeds, "steps": steps, **plain, "points": len(curve.steps)}


def _map(index: int, metric: ThinnedRows, pixels: int) -> dict[str, Any]:
    stride = math.ceil(len(metric.rows) / max(1, pixels // PIXELS_PER_ROW))
    rows = [plain_values(row, is_whole=False) for row in metric.rows[::stride]]
    return {"run": index, "steps": metric.steps[::stride], "rows": rows, "seen": metric.seen, "longest": metric.longest}


def plain_values(values: Sequence[float], *, is_whole: bool) -> list[float | str]:
    """Return numbers for JSON, with six digits unless the curve is whole; those that are not finite are words."""
    exact: Sequence[float] = values if is_whole else [float(f"{value:.{DIGITS}g}") for value in values]
    return [value if math.isfinite(value) else repr(value) for value in exact]


def thinned(curve: MetricCurve, pixels: int) -> NDArray[np.intp]:
    """Return the points to draw on ``pixels`` columns: minimum, maximum and non-finite values of each, and the ends.

    >>> thinned(MetricCurve.of_points(range(9), [0, 5, 1, 1, 1, 1, 1, -5, 1]), 2).tolist()
    [0, 1, 7, 8]
    """
    count = len(curve.steps)
    if count <= 2 * pixels:
        return np.arange(count)
    places = (curve.steps - curve.steps[0]) / (curve.steps[-1] - curve.steps[0])
    pixel = np.minimum(places * pixels, pixels - 1).astype(np.intp)
    finite = np.flatnonzero(curve.finite)
    # In order of columns, then values, the first point of a column is its minimum and the last its maximum.
    order = finite[np.lexsort((curve.values[finite], pixel[finite]))]
    begins = np.flatnonzero(np.diff(pixel[order], prepend=-1))
    ends = np.flatnonzero(np.diff(pixel[order], append=pixels))
    kept = [np.array([0, count - 1]), order[begins], order[ends]]
    for is_kind in (np.isnan, np.isposinf, np.isneginf):
        points = np.flatnonzero(is_kind(curve.values))
        kept.append(points[np.unique(pixel[points], return_index=True)[1]])
    return np.unique(np.concatenate(kept))


def explained(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the descriptions of metrics by registered hooks, by full name, and whether the hook is always on."""
    from ..hooks import HookRegistry  # needs torch, unlike the rest of this module

    hooks = {hook.name: hook for hook in HookRegistry}
    tables: dict[str, dict[str, Any]] = {}
    descriptions: dict[str, dict[str, Any]] = {}
    for name in names:
        hook, _, metric = name.partition("/")
        if hook in hooks and hook not in tables:
            tables[hook] = {info.name.partition("/<")[0]: info for info in hooks[hook]().describe_metrics()}
        while metric and metric not in tables.get(hook, {}):  # an entry of a dict has the description of the dict
            metric = metric.rpartition("/")[0]
        if metric:
            descriptions[name] = {**vars(tables[hook][metric]), "first": hooks[hook].always}
    return descriptions


def tables_of(runs: Sequence[ShownRun]) -> str:
    """Return HTML tables: time of a step, differences between the runs, cost of hooks, and environments."""
    records = {shown.label: shown.run.record for shown in runs if shown.run.record}
    parts = differing_parts(records) if records else []
    differ = [(f"{row['part']} {row['name']}", *row["values"].values()) for row in parts]
    costs = [(shown.label, hook, *cells(cost, COSTS)) for shown in runs for hook, cost in shown.costs.items()]
    differences = table("Differences between the runs", ("", *records), differ)
    profile = table("Cost by hook, of runs with --profile-hooks", ("run", "hook", *COSTS), costs, folded=True)
    return step_time_table(runs) + differences + profile + environment_table([*records.values()])


def environment_table(records: Sequence[RunRecord]) -> str:
    """Return the table of the values of any run in each entry of its environment."""
    environments = [record.surroundings for record in records]
    names = dict.fromkeys(name for environment in environments for name in environment)
    values = [
        (name, "; ".join(dict.fromkeys(str(environment[name]) for environment in environments if name in environment)))
        for name in names
    ]
    return table("Environment", ("", "of any run"), values, folded=True)


def step_time_table(runs: Sequence[ShownRun]) -> str:
    """Return the table of the mean time of a step by phase, and of the largest memory; empty if both are unknown."""
    rows = []
    for shown in runs:
        summary = shown.run.summary
        times, memory = StepTimes.of(summary.get("step_time")), memory_text(summary.get("peak_memory"))
        shares = ["" if times is None else f"{times.share(name):.0%}" for name in WORDS]
        if times is not None or memory:
            rows.append((shown.label, "" if times is None else milliseconds_text(times.total), *shares, memory))
    return table("Time of a step, and memory", ("run", "step", *WORDS.values(), "peak memory"), rows)


def packed(content: str) -> str:
    """Compress a text into base64, which the browser's ``DecompressionStream`` unpacks (all browsers since 2023).

    plotly's script of 4.8 MB becomes 2.0 MB, so that 6 MB of a page remain for data; its smaller bundles are not in its
    Python package. Base64 has no character with a meaning in HTML, so no metric name, ``</script>`` included, can close
    the element that contains it.
    """
    # mtime=0: otherwise the result would contain the time.
    return base64.b64encode(gzip.compress(content.encode(), 6, mtime=0)).decode()
