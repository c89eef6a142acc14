"""The two gradients of a tied embedding matrix, and their clipping, as the hooks about them recorded them."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import listed
from ..runs import require
from .curves import RecordedRun
from .naming import run_labels
from .panels import COLOURS, Panel, Picture, Style, common_title, legend_of, styled

PROVENANCE = "embedding_provenance"
CLIP = "output_projection_clip"
CLIPPED = f"{CLIP}/clipped_fraction"
LEGEND = ("through the input embedding (g_in)", "through the output projection (g_out)", "clip threshold")
IN, OUT, THRESHOLD, ALONE = 0, 1, 2, len(COLOURS) - 1
DASHES_OF = {IN: 1, OUT: 0, THRESHOLD: 2, ALONE: 0}


@dataclass(frozen=True)
class Layout:
    """A panel: its title, label and metrics, each with what it is."""

    title: str
    y_label: str
    metrics: dict[str, int]
    log_y: bool | None = False
    baseline: float | None = None


LAYOUTS = (
    Layout(
        "Gradients of input embedding and output projection",
        "L2 norm",
        {f"{PROVENANCE}/embedding_grad_l2_norm": IN, f"{PROVENANCE}/output_proj_grad_l2_norm": OUT},
        log_y=True,
    ),
    Layout(
        "Ratio of output projection to input embedding",
        "‖g_out‖₂ / ‖g_in‖₂",
        {f"{PROVENANCE}/output_to_embedding_ratio": ALONE},
        log_y=None,
        baseline=1.0,
    ),
    Layout(
        "Gradients before clipping, and the clip threshold",
        "L2 norm",
        {
            f"{CLIP}/embedding_grad_l2_norm": IN,
            f"{CLIP}/output_proj_grad_l2_norm": OUT,
            f"{CLIP}/output_proj_clip_threshold": THRESHOLD,
        },
        log_y=True,
    ),
    Layout("Cosine of the two gradients", "cosine", {f"{PROVENANCE}/cosine": ALONE}, baseline=0.0),
)
WANTED = frozenset({CLIPPED, *(metric for layout in LAYOUTS for metric in layout.metrics)})


def provenance_picture(runs: Sequence[RecordedRun]) -> Picture:
    """Show norms, ratio, clip threshold and cosine, those there are; raises :class:`UsageError` for none."""
    labels = run_labels([run.folder.resolve() for run in runs])
    require(len(runs) <= len(COLOURS), f"These are {len(runs)} runs; --provenance tells at most {len(COLOURS)} apart.")
    drawn = [layout for layout in LAYOUTS if any(metric in run.curves for run in runs for metric in layout.metrics)]
    require(
        bool(drawn),
        f"{listed([str(run.folder) for run in runs])} holds no metric of {PROVENANCE} or {CLIP}; the hooks that "
        "--provenance draws are switched on with --hooks.",
    )
    panels = [_panel(runs, labels, layout) for layout in drawn]
    used = sorted({what for layout in drawn for what in layout.metrics.values()} - {ALONE})
    legend = legend_of(labels, {LEGEND[what]: (Style(what), DASHES_OF[what]) for what in used})
    return Picture("provenance", common_title(runs), panels, legend, _missing(runs, labels))


def _panel(runs: Sequence[RecordedRun], labels: Sequence[str], layout: Layout) -> Panel:
    alone = len(runs) == 1
    traces = styled(runs, layout.metrics, lambda run, what: Style(what) if alone else Style(run, DASHES_OF[what]))
    remark = _clipped(runs, labels) if THRESHOLD in layout.metrics.values() else ""
    return Panel(layout.title, traces, layout.y_label, layout.log_y, layout.baseline, remark)


def _clipped(runs: Sequence[RecordedRun], labels: Sequence[str]) -> str:
    """Say which share of the clip's decisions was to clip."""
    shares = [
        (label, run.curves[CLIPPED].values.mean())
        for run, label in zip(runs, labels, strict=True)
        if CLIPPED in run.curves
    ]
    texts = [f"{share:.0%}" if len(runs) == 1 else f"{label} {share:.0%}" for label, share in shares]
    return f"clipped: {', '.join(texts)}" if texts else ""


def _missing(runs: Sequence[RecordedRun], labels: Sequence[str]) -> list[str]:
    """Say which runs lack what a panel shows."""
    sentences = []
    for layout in LAYOUTS:
        without = [
            label for run, label in zip(runs, labels, strict=True) if run.curves.keys().isdisjoint(layout.metrics)
        ]
        if without:
            source = next(iter(layout.metrics)).partition("/")[0]
            sentences.append(f"{layout.title}: {source} recorded none in {listed(without)}.")
    return sentences
