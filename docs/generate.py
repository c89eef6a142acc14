"""Writes docs/hooks/, a page for every hook that comes with loopscope, made from its class, and docs/real-models.md."""

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
    "observer": "observer: reads, and is watched",
    "intervention": "intervention: does what it likes, and is rolled back",
    "committing": "committing intervention: changes what it declares, and nothing else",
    "debug": "debug intervention: left out of every bulk selection, switched on by name",
}
LOOPS = ("epoch", "step")
NEEDS = {
    "needs_grads": "`accumulated_grads`, the mean gradient of the epoch",
    "needs_step_series": "`step_losses` and `step_grad_norms`, one value for each step",
    "needs_prev_step_grads": "`prev_step_grads`, the gradient of the step before",
    "needs_pre_epoch_state": "a copy of the training state before the epoch",
    "needs_target_grad": "`target_grad`, which the experiment defines",
    "needs_reference_weights": "`reference_weights`, a reference solution (`--reference`)",
    "uses_reference_weights": "`reference_weights` for some of its metrics, if there is a reference (`--reference`)",
}

QUESTIONS = {
    "Grokking: when does it generalise, and by what?": "phases fourier attention weight_tracking gradient_projection"
    " parameter_delta path_length",
    "Stability: is the training healthy?": "training_metrics training_diagnostics loss_spikes weight_updates"
    " gradient_flow norms adam_dynamics grad_clip",
    "Curvature: how sharp is the loss, and how long may a step be?": "sharpness hessian lr_probe",
    "Spikes: what is behind a step?": "batch_rows step_history what_if",
    "Noise: how much of a gradient is chance, and what averages it out?": "gradient_noise_scale variance batch_dynamics"
    " subspace_gradient_info weight_average model_smoothing",
    "Data order: what does the order of the data do?": "counterfactual counterfactual_validator consecutive hessian"
    " batch_dynamics",
    "Low precision: what do 4 or 8 bits lose?": "gradient_overflow range_penalty metis_split",
    "Tied embeddings: who pulls at the matrix?": "embedding_provenance output_projection_clip token_gradient",
}
"""The hooks that help with a question; a row stands where a hook is named first."""
INTRODUCTION = """\
`loopscope hooks` prints every installed hook, `loopscope hooks NAME` the page of one. An *observer* only reads. An
*intervention* does what it likes and is rolled back, which takes a copy of the training state; *debug* ones are
switched on by name alone. A *committing* hook changes the run, which is then named as treated. *Needs* are what the
loop computes or keeps for a hook beside its own work; what a hook takes for granted of the model stands on its page.
Costs are those of [one run](../benchmarks.md#each-hook) of the quick preset; it had none of the hooks with a dash."""


def shipped_hooks() -> list[type[TrainingHook]]:
    """Return the hooks of this distribution, by name; those of other installed packages are not documented here."""
    return [hook for hook in HookRegistry if hook.__module__.startswith(f"{PACKAGE}.")]


def pages(hooks: Iterable[type[TrainingHook]] | None = None) -> dict[str, str]:
    """Return the text of every page by its file name."""
    chosen = shipped_hooks() if hooks is None else list(hooks)
    return {"index.md": index_page(chosen), **{f"{hook.name}.md": hook_page(hook) for hook in chosen}}


def index_page(hooks: Sequence[type[TrainingHook]]) -> str:
    """Return the page that lists the hooks by question; one that answers several has its row where it comes first."""
    lines, waiting = [NOTE, "# Hooks by question", "", INTRODUCTION, ""], {hook.name: hook for hook in hooks}
    for question, text in QUESTIONS.items():
        names = text.split()
        rows = [index_row(waiting.pop(name)) for name in names if name in waiting]
        also = [f"[`{name}`]({name}.md)" for name in names if not any(f"({name}.md)" in row[0] for row in rows)]
        lines += [f"## {question}", "", *table(("hook", "what it does", "kind", "needs", "cost"), rows), ""]
        lines += [f"Also: {', '.join(also)}.", ""] if also else []
    if waiting:
        raise ValueError(f"QUESTIONS of docs/generate.py has no place for {', '.join(waiting)}: add it to one of them.")
    return "\n".join(lines)


def index_row(hook: type[TrainingHook]) -> tuple[str, ...]:
    """Return the row of a hook in the list."""
    measured = measured_costs().get(hook.name, "").partition(", ")[0]
    return f"[`{hook.name}`]({hook.name}.md)", documentation(hook)[0], hook_kind(hook), needs(hook), measured or "-"


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
    """Return what one wants to know before switching a hook on, as (label, text)."""
    rows = [("kind", KINDS[hook_kind(hook)])]
    for loop in LOOPS:
        shown = ", ".join(f"`{point.name}`{epochs(window)}" for point, window in sorted(windows(hook, loop).items()))
        rows.append((f"fires in the {loop} loop at", shown or "no point: it is left out"))
    if any(point in STEP_POINTS for loop in LOOPS for point in windows(hook, loop)):
        made = hook()
        rows.append(("steps", schedule(made.step_schedule)))
        rows += [(f"steps at {point.name}", schedule(rule)) for point, rule in sorted(made.point_schedules.items())]
    rows.append(("needs", needs(hook) or "nothing that the loop would not compute anyway"))
    if issubclass(hook, InterventionHook):
        rows.append(("memory", cost(hook)))
    if hook.name in (costs := measured_costs()):
        rows.append(("measured cost", f"{costs[hook.name]} ([how](../benchmarks.md#each-hook))"))
    return rows


def measured_costs(page: Path = BENCHMARKS) -> dict[str, str]:
    """Return what each hook cost when `make bench` was last run, by name, from its table in docs/benchmarks.md."""
    _, _, section = page.read_text(encoding="utf-8").partition("\n## Each hook\n")
    rows = [[cell.strip() for cell in line.split("|")] for line in section.partition("\n## ")[0].splitlines()]
    return {row[1]: f"{row[3]} a call; {row[2]}" for row in rows if len(row) > 4 and row[3].endswith(" ms")}


def cost(hook: type[InterventionHook]) -> str:
    """Say what memory an intervention takes for being undone."""
    if not hook.mutates:
        return "no copy of the training state"
    rollback = "a copy of the training state for the rollback, which all interventions share"
    return f"{rollback}, and one of the state before the epoch" if hook.needs_pre_epoch_state else rollback


def windows(hook: type[TrainingHook], loop: str) -> dict[HookPoint, EpochWindow]:
    """Return the points of a hook in one loop with their epoch windows."""
    return windows_for(hook.hook_points, hook.loop_points, loop)


def needs(hook: type[TrainingHook]) -> str:
    """Say what a hook asks of the loop, or nothing."""
    return "; ".join(text for need, text in NEEDS.items() if getattr(hook, need))


def epochs(window: EpochWindow) -> str:
    """Say within which epochs a point is used, if not in all.

    >>> epochs((None, 49)), epochs((50, None)), epochs((2, 3)), epochs((None, None))
    (' (epochs 0 to 49)', ' (from epoch 50 on)', ' (epochs 2 to 3)', '')
    """
    first, last = window
    if window == ALWAYS:
        return ""
    return f" (from epoch {first} on)" if last is None else f" (epochs {first or 0} to {last})"


def schedule(steps: StepSchedule) -> str:
    """Say at which steps a schedule is due.

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
    """Read the ``Args:`` of a docstring.

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
    """Write the pages that differ from what is there, remove those of hooks that are gone; return their names."""
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
    """Write the pages and say what changed."""
    changed = write()
    print(f"docs/hooks: {', '.join(changed) or 'nothing'} changed, {len(pages())} pages.")
    real_models = import_module("docs.real_models")  # which imports from here, and transformers
    print(f"docs/real-models.md: {'changed' if real_models.write() else 'as it was'}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
