"""The pictures that hooks ask for: panels of their metrics, told apart by what they show."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..errors import listed
from ..hooks import HookRegistry, MetricPanel
from ..runs import require
from .curves import RecordedRun
from .panels import COLOURS, DASHES, Panel, Picture, Style, common_title, legend_of, run_labels, styled

ALONE = len(COLOURS) - 1
"""The colour of a curve that needs no explanation."""


def hook_panels(picture: str) -> list[MetricPanel]:
    """Gather the panels of a picture from all hooks, in the order of their places, metrics under their full names."""
    panels = [
        replace(
            panel,
            curves={f"{hook.name}/{metric}": text for metric, text in panel.curves.items()},
            shares={f"{hook.name}/{metric}": word for metric, word in panel.shares.items()},
        )
        for hook in HookRegistry
        for panel in hook.panels
        if panel.picture == picture
    ]
    return sorted(panels, key=lambda panel: panel.place)


def hook_picture(picture: str, runs: Sequence[RecordedRun]) -> Picture:
    """Show the panels of a picture that hooks ask for, those there are; raises :class:`UsageError` for none."""
    panels = hook_panels(picture)
    by_label = dict(zip(run_labels([run.folder.resolve() for run in runs]), runs, strict=True))
    require(len(runs) <= len(COLOURS), f"These are {len(runs)} runs; --{picture} tells at most {len(COLOURS)} apart.")
    texts = [text for text in dict.fromkeys(text for panel in panels for text in panel.curves.values()) if text]
    require(len(texts) <= len(DASHES), f"--{picture} tells at most {len(DASHES)} kinds apart; hooks ask for {texts}.")
    drawn = [panel for panel in panels if any(metric in run.curves for run in runs for metric in panel.curves)]
    hooks = dict.fromkeys(metric.partition("/")[0] for panel in panels for metric in panel.curves)
    require(
        bool(drawn),
        f"{listed([str(run.folder) for run in runs])} holds no metric of {' or '.join(hooks)}; the hooks that "
        f"--{picture} draws are switched on with --hooks.",
    )
    shown = {text for panel in drawn for text in panel.curves.values()}
    legend = legend_of(list(by_label), {text: (Style(n), n) for n, text in enumerate(texts) if text in shown})
    figure = [_panel(panel, by_label, {text: number for number, text in enumerate(texts)}) for panel in drawn]
    return Picture(picture, common_title(runs), figure, legend, _missing(panels, by_label))


def _panel(panel: MetricPanel, runs: Mapping[str, RecordedRun], numbers: Mapping[str, int]) -> Panel:
    """Tell the curves of one run apart by colour; those of several by dashes, and the runs by colour."""

    def style(run: int, metric: str) -> Style:
        text = panel.curves[metric]
        return Style(numbers.get(text, ALONE)) if len(runs) == 1 else Style(run, numbers.get(text, 0))

    remarks = []
    for metric, word in panel.shares.items():
        means = {
            label: f"{run.curves[metric].values.mean():.0%}" for label, run in runs.items() if metric in run.curves
        }
        texts = list(means.values()) if len(runs) == 1 else [f"{label} {mean}" for label, mean in means.items()]
        remarks += [f"{word}: {', '.join(texts)}"] if texts else []
    traces = styled(list(runs.values()), panel.curves, style)
    return Panel(panel.title, traces, panel.y_label, panel.log_y, panel.baseline, "; ".join(remarks))


def _missing(panels: Sequence[MetricPanel], runs: Mapping[str, RecordedRun]) -> list[str]:
    """Say which runs lack what a panel shows."""
    sentences = []
    for panel in panels:
        without = [label for label, run in runs.items() if run.curves.keys().isdisjoint(panel.curves)]
        hook = next(iter(panel.curves)).partition("/")[0]
        sentences += [f"{panel.title}: {hook} recorded none in {listed(without)}."] if without else []
    return sentences
