"""Hooks report the same numbers in an attached loop as in loopscope's loop."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.engine import HookManager
from loopscope.hooks import HookRegistry, TrainingHook
from loopscope.integrations import Scope
from loopscope.loops import epoch_loop, step_loop
from loopscope.sinks import JSONLSink
from loopscope.training import TrainingTask

from tests.contracts.test_hooks import COMMITTING, QUIET, make, refusal
from tests.support import LOOPS, MODELS, Case, build, run_info
from tests.support.cases import slow_unless
from tests.support.processes import own_process

pytestmark = pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert")  # of the health of so small a run
NAMES = {"quiet": QUIET, "committing": COMMITTING}
SHORT = {"consecutive": {"interval": 2}, "loss_spikes": {"window": 2}, "variance": {"window": 2}}
INDEX = r',?"(batch_rows/)?index":(\{"steps":.*?"values":\[\[.*?\]\]\}|\[.*?\])'
"""The metric with row numbers in the data set, which only loopscope's loop knows."""
QUICK = [Case(loop="epoch"), Case("transformer", loop="epoch"), Case("tied", loop="step")]
CASES = [Case(model, loop=loop) for model in MODELS for loop in LOOPS]


def record_of_ours(case: Case, hooks: list[TrainingHook], out: Path, steps: int) -> list[str]:
    """Return the lines of the record of loopscope's loop."""
    task, state = build(case, steps=steps, **fields_of(case))
    manager = HookManager(hooks, task, state, loop=case.loop, required=(), sinks=[JSONLSink()])
    out.mkdir()
    manager.start(replace(run_info(task, manager, case.loop), output_dir=out, strategy="ours"))
    (epoch_loop if case.loop == "epoch" else step_loop)(task, manager)
    manager.end("completed")
    return (out / "ours.jsonl").read_text().splitlines()


def attach(task: TrainingTask, case: Case, hooks: list[Any], out: Path, **options: Any) -> Scope:
    """Attach hooks to the same training, with everything that they may need."""
    given = {name: getattr(task, name) for name in ("scheduler", "loader", "evaluate", "length", "log_every")}
    given |= {"loss": task.compute_loss, "snapshot_every": task.snapshot_every, "config": vars(task.config)}
    given |= {"loop": case.loop, "seed": 7, "display": "none"} | options
    return loopscope.attach(task.model, task.optimizer, hooks=hooks, out=out, **given)


def record_of_theirs(
    case: Case, hooks: list[TrainingHook], out: Path, steps: int, *, where: str = "", kept: Any = None
) -> list[str]:
    """Return the lines of the record of the same training in a custom loop.

    The loop saves a state at ``where`` and is interrupted later, or resumes from the state ``kept``.
    """
    task, _ = build(case, steps=steps, **fields_of(case))
    owned = {name: each for name in ("model", "optimizer", "scheduler") if (each := getattr(task, name)) is not None}

    def keep(at: str) -> None:
        if at == where:
            states = {name: each.state_dict() for name, each in owned.items()}
            torch.save([states, torch.get_rng_state(), scope.state_dict()], out / "state.pt")
        elif (out / "state.pt").exists() and kept is None:  # so that some steps follow the saved state
            raise Interrupted

    with attach(task, case, hooks, out) as scope:
        if kept is not None:
            for name, each in owned.items():
                each.load_state_dict(kept[0][name])
            torch.set_rng_state(kept[1])
            scope.load_state_dict(kept[2])
        run_theirs(task, case, scope, range(kept[2]["loop"]["step"] if kept else 0, steps), keep)
    return (out / f"{out.name}.jsonl").read_text().splitlines()


def run_theirs(task: TrainingTask, case: Case, scope: Scope, steps: range, pause: Callable[[str], None]) -> None:
    """Train like loopscope's loops; ``pause`` is called between two steps with the position."""
    done = steps.start
    while done < steps.stop:
        for batch in scope.batches(task.loader):
            task.optimizer.zero_grad()
            scope.backward(task.compute_loss(task.model, batch))
            task.optimizer.step()
            done += 1
            if case.loop == "step" and (done % task.eval_every == 0 or done == steps.stop):
                scope.evaluate(task.evaluate, task.model)
            pause(f"step {done}")
            if done == steps.stop:
                break
        if case.loop == "epoch":
            task.scheduler.step()
            scope.epoch_end(**scope.evaluate(task.evaluate, task.model))
            pause(f"epoch after step {done}")


class Interrupted(Exception):
    """Interrupts a loop."""


def fields_of(case: Case) -> dict[str, Any]:
    """Return the case's fields without a per-step scheduler, which only loopscope's loops step before POST_STEP."""
    return {"scheduler": None, "snapshot_every": 4} if case.loop == "step" else {"log_every": 100}


def able(names: list[str], case: Case) -> list[str]:
    """Return the hooks that suit a case, without those that need loopscope's loop or a reference solution."""
    kinds = [HookRegistry.get(name) for name in names if not refusal(name, case)]
    return [
        kind.name for kind in dict.fromkeys(kinds) if not (kind.needs_experiment_loop or kind.needs_reference_weights)
    ]


def made(names: list[str], case: Case) -> list[TrainingHook]:
    """Create the hooks, with short windows for the few steps of a case."""
    hooks = list(map(make, able(["training_metrics", *names], case)))
    return hooks + [HookRegistry.get(name)(**options) for name, options in SHORT.items() if name in names]


@pytest.mark.slow_rows(
    "transformer-adamw_foreach-epoch-quiet",
    "batchnorm_mlp-adamw_foreach-epoch-quiet",
    "transformer-adamw_foreach-epoch-committing",
    "tied-adamw_foreach-step-committing",
    "batchnorm_mlp-adamw_foreach-epoch-committing",
)
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("case", [pytest.param(each, id=str(each), marks=slow_unless(each in QUICK)) for each in CASES])
@own_process
def test_attached_loop_reports_the_same_metrics(tmp_path, case, names):
    """Every hook records the same lines as in the loops of loopscope."""
    steps = 5 if case.loop == "step" else 6
    ours = record_of_ours(case, made(names, case), tmp_path / "ours", steps)
    theirs = record_of_theirs(case, made(names, case), tmp_path / "theirs", steps)
    assert len(ours) > 2
    assert theirs == [re.sub(INDEX, "", line) for line in ours]


@pytest.mark.longer
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
def test_fast_cases_cover_every_attachable_hook():
    """The hooks left out are those that no attached loop can serve."""
    met = {name for case in QUICK for name in able(QUIET + COMMITTING, case)}
    left = {"counterfactual", "counterfactual_validator", "gradient_projection", "metis_split"}
    assert met == {*QUIET, *COMMITTING} - left - set(SHORT)


PLACES = [("epoch", place) for place in ("step 1", "step 6", "step 4", "epoch after step 6")] + [("step", "step 3")]
ROWS = [
    pytest.param(
        *place, NAMES[kind], id=f"{place}-{kind}", marks=slow_unless((row, kind) in ((1, "quiet"), (4, "committing")))
    )
    for row, place in enumerate(PLACES)
    for kind in NAMES
]


@pytest.mark.slow
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize(("loop", "where", "names"), ROWS)
@own_process
def test_resumed_attached_loop_writes_uninterrupted_record(tmp_path, loop, where, names):
    """An interrupted custom training loop continues from its saved state."""
    case, steps, run = Case("tied", loop=loop), 5 if loop == "step" else 9, tmp_path / "run"
    whole = record_of_theirs(case, made(names, case), tmp_path / "whole", steps)
    with pytest.raises(Interrupted):
        record_of_theirs(case, made(names, case), run, steps, where=where)
    kept = torch.load(run / "state.pt", weights_only=True)
    assert record_of_theirs(case, made(names, case), run, steps, kept=kept) == whole
