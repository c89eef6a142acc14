"""What is said in the end of several runs: of one for each strategy row by row, of several seeds by mean and spread."""

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ..errors import counted, listed
from ..runs import seed_name
from .tables import alerts_in, comparison_rows, comparison_table, distances, final_numbers, results_text
from .text import cleaned, duration_text, number_text, printable

Summaries = Sequence[Mapping[str, Any]]


def conclusion(
    summaries: Summaries, compared_to: Mapping[str, str], width: int, plotted: str = ""
) -> Iterator[RenderableType]:
    """Yield the comparison of runs, where everything lies, and what to do next; ``plotted`` is a metric of theirs."""
    of_seeds = any(map(_seed_of, summaries))
    if len(summaries) > 1:
        rows = seed_rows if of_seeds else comparison_rows
        yield comparison_table(rows(cleaned(summaries), compared_to), width)
    yield (_seeds_text if of_seeds and len(summaries) > 1 else results_text)(summaries, plotted)


def _seed_of(summary: Mapping[str, Any]) -> str:
    """Return the name of the folder that a run of one of several seeds lies in, or nothing for another run."""
    name = Path(summary["output_dir"]).name
    return name if re.fullmatch(seed_name(r"\d+"), name) and name != summary["strategy"] else ""


def seed_rows(summaries: Summaries, compared_to: Mapping[str, str]) -> list[dict[str, str]]:
    """Return a row of text for each strategy, its numbers as mean ± standard deviation over its seeds.

    A distance from another strategy is that between runs of the same seed.
    """
    by_seed: dict[str, list[Mapping[str, Any]]] = {}
    for summary in summaries:
        by_seed.setdefault(_seed_of(summary), []).append(summary)
    rows = []
    for strategy in dict.fromkeys(summary["strategy"] for summary in summaries):
        runs = [summary for summary in summaries if summary["strategy"] == strategy]
        numbers: dict[str, list[float]] = {}
        for run in runs:
            metrics = {name.partition("/")[2]: value for name, value in run["metrics"].items()}
            found = {**final_numbers(run), **distances(run, by_seed[_seed_of(run)], compared_to), **metrics}
            for name, value in found.items():
                numbers.setdefault(name, []).append(value)
        reached = sum(run["target_reached"] is not None for run in runs)
        failed = [error["hook"] for run in runs for error in run["hook_errors"]]
        rows.append(
            {
                "strategy": strategy,
                "seeds": str(len(runs)),
                "target": f"{reached} of {len(runs)}" if any(each["target_reached"] for each in summaries) else "",
                "epochs": spread(run["epochs"] for run in runs),
                **{name: spread(values) for name, values in numbers.items()},
                "time": duration_text(sum(run["seconds"]["training"] for run in runs) / len(runs)),
                "treatments": ", ".join(runs[0]["treatments"]),
                "failed hooks": ", ".join(dict.fromkeys(failed)),
            }
        )
    return rows


def spread(values: Iterable[float]) -> str:
    """Return mean and sample standard deviation; of a single value, or of equal ones, the value.

    >>> spread([1.0, 2.0, 3.0]), spread([155, 155]), spread([1.0, float("inf")])
    ('2 ± 1', '155', 'inf ± nan')
    """
    first, *others = values
    if all(value == first for value in others):
        return number_text(first)
    numbers = list(map(_float, (first, *others)))
    mean = sum(numbers) / len(numbers)
    deviations = [number - mean for number in numbers]
    variance = sum(deviation * deviation for deviation in deviations) / len(others)
    return f"{number_text(mean)} ± {number_text(math.sqrt(variance))}"


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer may be larger than any float
        return math.copysign(math.inf, 1 if value > 0 else -1)


def _seeds_text(summaries: Summaries, plotted: str) -> Text:
    """Say where the runs of several seeds lie, and what to do next."""
    folders = {f"{each['strategy']} {_seed_of(each)}": Path(each["output_dir"]) for each in summaries}
    strategies, seeds = dict.fromkeys(each["strategy"] for each in summaries), {*map(_seed_of, summaries)}
    experiment = next(iter(folders.values())).parent.parent
    alerts = [f"{count:,} of {name}" for name, folder in folders.items() if (count := alerts_in(folder))]
    lines = [
        f"Results: {experiment}/ with {', '.join(strategies)}, {counted(len(seeds), 'seed')} each in STRATEGY/seed-N",
        *([f"  alerts   {listed(alerts)}"] if alerts else ()),
        f"Next: loopscope show {shlex.quote(str(experiment))}",
        *([f"      loopscope plot {shlex.quote(str(experiment))} --metrics {plotted}"] if plotted else ()),
    ]
    return Text("\n".join(map(printable, lines)), no_wrap=True)  # a command is copied as one line
