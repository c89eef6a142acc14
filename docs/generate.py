"""Generator of docs/hooks/, with a page for every shipped hook made from its class, and of docs/real-models.md."""

import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from loopscope import training_hooks
from loopscope.hooks import (
    ALWAYS,
    STEP_POINTS,
    EpochWindow,
    HookPoint,
    HookRegistry,
    InterventionHook,
    StepSchedule,
    TrainingHook,
    hook_kind,
    hook_options,
    windows_for,
)

FOLDER = Path(__file__).parent / "hooks"
BENCHMARKS = Path(__file__).parent / "benchmarks.md"
PACKAGE = training_hooks.__name__
NOTE = "<!-- Made by `make docs` from the hook's class; edit that instead. -->"
KINDS = {
    "observer": "observer: reads only, and is checked",
    "intervention": "intervention: may do anything, and is rolled back",
    "committing": "committing intervention: changes what it declares, and nothing else",
    "debug": "debug intervention: excluded from every bulk selection, enabled by name",
}
LOOPS = ("epoch", "step")
NEEDS = {
    "needs_grads": "`accumulated_grads`, the mean gradient of the epoch",
    "needs_step_series": "`step_losses` and `step_grad_norms`, one value for each step",
    "needs_prev_step_grads": "`prev_step_grads`, the gradient of the previous step",
    "needs_pre_epoch_state": "a copy of the training state before the epoch",
    "needs_target_grad": "`target_grad`, which the experiment defines",
    "needs_reference_weights": "`reference_weights`, a reference solution (`--reference`)",
    "uses_reference_weights": "`reference_weights` for some of its metrics, if there is a reference (`--reference`)",
}

QUESTIONS = {
    "Grokking: when and how does the model generalise?": "phases fourier attention weight_tracking gradient_projection"
    " parameter_delta path_length",
    "Stability: is the training healthy?": "training_metrics training_diagnostics loss_spikes weight_updates"
    " gradient_flow norms adam_dynamics grad_clip",
    "Curvature: how sharp is the loss, and how large may a step be?": "sharpness hessian lr_probe",
    "Spikes: what caused a step?": "batch_rows step_history what_if",
    "Noise: how noisy is a gradient, and what reduces the noise?": "gradient_noise_scale variance batch_dynamics"
    " subspace_gradient_info weight_average model_smoothing",
    "Data order: what is its effect?": "counterfactual counterfactual_validator consecutive hessian batch_dynamics",
    "Low precision: what are the errors of 4 or 8 bits?": "gradient_overflow range_penalty metis_split",
    "Tied embeddings: which gradients change the matrix?": "embedding_provenance output_projection_clip token_gradient",
}
"""The hooks for each question; a hook's row is under its first question."""
INTRODUCTION = """\
`loopscope hooks` prints every installed hook, `loopscope hooks NAME` the page of one. An *observer* only reads. An
*intervention* may do anything and is rolled back, which requires a copy of the training state; *debug* interventions
are enabled only by name. A *committing* hook changes the run, which is then recorded as treated. *Needs* are values
that the loop computes or keeps only for hooks; a hook's page lists its assumptions about the model. Costs are from
[one run](../benchmarks.md#each-hook) of the quick preset, which did not include the hooks with a dash."""


def shipped_hooks() -> list[type[TrainingHook]]:
    """Return the hooks of this distribution, by name, without those of other installed packages."""
    return [hook for hook in HookRegistry if hook.__module__.startswith(f"{PACKAGE}.")]


def pages(hooks: Iterable[type[TrainingHook]] | None = None) -> dict[str, str]:
    """Return the text of every page by its file name."""
    chosen = shipped_hooks() if hooks is None else list(hooks)
    return {"index.md": index_page(chosen), **{f"{hook.name}.md": hook_page(hook) for hook in chosen}}


def index_page(hooks: Sequence[type[TrainingHook]]) -> str:
    """Return the page that lists the hooks by question; a hook with several questions has its row under the first."""
    lines, waiting = [NOTE, "# Hooks by question", "", INTRODUCTION, ""], {hook.name: hook for hook in hooks}
    for question, text in QUESTIONS.items():
        names = text.split()
        rows = [index_row(waiting.pop(name)) for name in names if name in waiting]
        also = [f"[`{name}`]({name}.md)" for name in names if not any(f"({name}.md)" in row[0] for row in rows)]
        lines += [f"## {question}", "", *table(("hook", "what it does", "kind", "needs", "cost"), rows), ""]
        lines += [f"Also: {', '.join(also)}.", ""] if also else []
    if waiting:
        raise ValueError(f"QUESTIONS of docs/generate.py lacks {', '.join(waiting)}: add it to one of the questions.")
    return "\n".join(lines)


def index_row(hook: type[TrainingHook]) -> tuple[str, ...]:
    """Return the row of a hook in the list."""
    cost_text = measured_costs().get(hook.name, "").partition(", ")[0]
    return f"[`{hook.name}`]({hook.name}.md)", documentation(hook)[0], hook_kind(hook), needs(hook), cost_text or "-"


def hook_page(hook: type[TrainingHook]) -> str:
    """Return the page of one hook."""
    summary, body, arguments = documentation(hook)
    parts = [NOTE, f"# {hook.name}", "", summary, ""]
    if body:
        parts += [body, ""]
    parts += treatment(hook)
    parts += [*table(("", ""), facts(hook)), "", "## Metrics", "", *metric_table(hook), "", "## Options", ""]
    parts += [*option_table(hook, arguments), ""]
    return "\n".join(parts)


def treatment(hook: type[TrainingHook]) -> list[str]:
    """Return the notice on a hook that changes the run."""
    if not (issubclass(hook, InterventionHook) and hook.commits):
        return []
    changed = " and ".join(sorted(part.value for part in hook.commits))
    return [
        f"> **Treatment.** A run with this hook is another run: it changes the {changed}. No group and no keyword "
        f"switches it on, only `--hooks {hook.name}`, and `experiment_config.json`, `summary.json` and the console "
        "name it as a treatment.",
        "",
    ]


def facts(hook: type[TrainingHook]) -> list[tuple[str, str]]:
    """Return the facts needed to choose a hook, as (label, text)."""
    rows = [("kind", KINDS[hook_kind(hook)])]
    for loop in LOOPS:
        points_text = ", ".join(
            f"`{point.name}`{epochs(window)}" for point, window in sorted(windows(hook, loop).items())
        )
        rows.append((f"fires in the {loop} loop at", points_text or "no point: it is dropped"))
    if any(point in STEP_POINTS for loop in LOOPS for point in windows(hook, loop)):
        hook_object = hook()
        rows.append(("steps", schedule(hook_object.step_schedule)))
        rows += [
            (f"steps at {point.name}", schedule(rule)) for point, rule in sorted(hook_object.point_schedules.items())
        ]
    rows.append(("needs", needs(hook) or "nothing beyond the loop's own values"))
    if issubclass(hook, InterventionHook):
        rows.append(("memory", cost(hook)))
    if hook.name in (costs := measured_costs()):
        rows.append(("measured cost", f"{costs[hook.name]} ([how](../benchmarks.md#each-hook))"))
    return rows


def measured_costs(page: Path = BENCHMARKS) -> dict[str, str]:
    """Return the cost of each hook in the latest `make bench`, by name, from its table in docs/benchmarks.md."""
    _, _, section = page.read_text(encoding="utf-8").partition("\n## Each hook\n")
    rows = [[cell.strip() for cell in line.split("|")] for line in section.partition("\n## ")[0].splitlines()]
    return {row[1]: f"{row[3]} a call; {row[2]}" for row in rows if len(row) > 4 and row[3].endswith(" ms")}


def cost(hook: type[InterventionHook]) -> str:
    """Return the memory that the rollback of an intervention requires, as text."""
    if not hook.mutates:
        return "no copy of the training state"
    rollback = "a copy of the training state for the rollback, which all interventions share"
    return f"{rollback}, and a copy of the state before the epoch" if hook.needs_pre_epoch_state else rollback


def windows(hook: type[TrainingHook], loop: str) -> dict[HookPoint, EpochWindow]:
    """Return the points of a hook in one loop with their epoch windows."""
    return windows_for(hook.hook_points, hook.loop_points, loop)


def needs(hook: type[TrainingHook]) -> str:
    """Return the values that a hook requests from the loop, as text, or an empty string."""
    return "; ".join(text for need, text in NEEDS.items() if getattr(hook, need))


def epochs(window: EpochWindow) -> str:
    """Return the epochs in which a point is used, as text; an empty string means all epochs.

    >>> epochs((None, 49)), epochs((50, None)), epochs((2, 3)), epochs((None, None))
    (' (epochs 0 to 49)', ' (from epoch 50 on)', ' (epochs 2 to 3)', '')
    """
    first, last = window
    if window == ALWAYS:
        return ""
    return f" (from epoch {first} on)" if last is None else f" (epochs {first or 0} to {last})"


def schedule(steps: StepSchedule) -> str:
    """Return the steps at which a schedule is due, as text.

    >>> schedule(StepSchedule(mode="burst", every_n_steps=1000, burst_length=11))
    'a burst of 11 steps every 1000 steps, from step 1 on'
    """
    rule = {
        "continual": "every step",
        "stride": f"one step in {steps.every_n_steps}",
        "burst": f"a burst of {steps.burst_length} steps every {steps.every_n_steps} steps",
    }[steps.mode]
    return f"{rule}, from step {steps.warmup + 1} on"


def metric_table(hook: type[TrainingHook]) -> list[str]:
    """Return the lines of the table of a hook's metrics."""
    rows = [
        (f"`{hook.name}/{info.name}`", info.formula, info.range, markdown(info.reading))
        for info in hook().describe_metrics()
    ]
    return table(("metric", "formula", "range", "reading"), rows)


def option_table(hook: type[TrainingHook], meanings: Mapping[str, str]) -> list[str]:
    """Return the lines of the table of a hook's options."""
    rows = [
        (
            f"`{hook.name}.{name}`",
            f"`{inspect.formatannotation(option.annotation).replace('typing.', '')}`",
            f"`{option.default!r}`",
            meanings.get(name, ""),
        )
        for name, option in hook_options(hook).items()
    ]
    if not rows:
        return ["None."]
    return ["For `--hook-config`.", "", *table(("option", "type", "default", "meaning"), rows)]


def documentation(hook: type[TrainingHook]) -> tuple[str, str, dict[str, str]]:
    """Split a class's docstring into its first line, its other paragraphs and its arguments, as Markdown."""
    first, _, rest = (inspect.getdoc(hook) or "").partition("\n")
    body, arguments = [], {}
    for paragraph in re.split(r"\n\s*\n", rest.strip("\n")):
        if paragraph.startswith("Args:"):
            arguments = parse_arguments(paragraph.partition("\n")[2])
        elif paragraph:
            body.append(" ".join(markdown(paragraph).split()))
    return markdown(first), "\n\n".join(body), arguments


def parse_arguments(text: str) -> dict[str, str]:
    """Parse the ``Args:`` of a docstring.

    >>> parse_arguments("    k: the count\\n        of it.\\n    j: another.")
    {'k': 'the count of it.', 'j': 'another.'}
    """
    items = re.split(r"^(\w+): ", inspect.cleandoc(text), flags=re.MULTILINE)[1:]
    return {name: " ".join(markdown(meaning).split()) for name, meaning in zip(items[::2], items[1::2], strict=True)}


def markdown(text: str) -> str:
    """Turn the markup of a docstring into Markdown.

    >>> markdown("see :func:`~loopscope.training.loss_probe.central_difference` and ``k``")
    'see `central_difference` and `k`'
    """
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text).replace("``", "`")


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [heading, ["---"] * len(heading), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def write(folder: Path = FOLDER) -> list[str]:
    """Write the changed pages, remove the pages of deleted hooks, and return the names of both."""
    folder.mkdir(exist_ok=True)
    wanted = pages()
    changed = []
    for path in folder.glob("*.md"):
        if path.name not in wanted:
            path.unlink()
            changed.append(path.name)
    for name, text in wanted.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            changed.append(name)
    return sorted(changed)


def main() -> int:
    """Write the pages and print the changes."""
    changed = write()
    print(f"docs/hooks: {', '.join(changed) or 'nothing'} changed, {len(pages())} pages.")
    real_models = import_module("docs.real_models")  # it imports this module, and transformers
    print(f"docs/real-models.md: {'changed' if real_models.write() else 'unchanged'}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
