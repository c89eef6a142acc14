"""What hooks report of an attached loop is what they report of the same training in a loop of ours."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.firing import HookManager
from loopscope.hooks import HookRegistry, TrainingHook
from loopscope.integrations import Scope
from loopscope.loops import epoch_loop, step_loop
from loopscope.sinks import JSONLSink
from loopscope.training import TrainingTask

from tests.contracts.test_hooks import COMMITTING, QUIET, make, refusal
from tests.support import LOOPS, MODELS, Case, build, run_info

pytestmark = pytest.mark.filterwarnings("ignore:Step [0-9,]+")
CASES = [Case(model, loop=loop) for model in MODELS for loop in LOOPS]


def record_of_ours(case: Case, hooks: list[TrainingHook], out: Path, steps: int, **fields: Any) -> list[str]:
    """Return the lines of the record of a loop of ours."""
    task, state = build(case, steps=steps, **fields)
    manager = HookManager(hooks, task, state, loop=case.loop, required=(), sinks=[JSONLSink()])
    out.mkdir()
    manager.start(replace(run_info(task, manager, case.loop), output_dir=out, strategy="ours"))
    (epoch_loop if case.loop == "epoch" else step_loop)(task, manager)
    manager.end("completed")
    return (out / "ours.jsonl").read_text().splitlines()


def attach(task: TrainingTask, case: Case, hooks: list[Any], out: Path, **options: Any) -> Scope:
    """Attach hooks to the same training, with all that they may ask for."""
    given = {name: getattr(task, name) for name in ("scheduler", "loader", "evaluate", "length", "log_every")}
    given |= {"loss": task.compute_loss, "snapshot_every": task.snapshot_every, "config": vars(task.config)}
    given |= {"loop": case.loop, "seed": 7, "display": "none"} | options
    return loopscope.attach(task.model, task.optimizer, hooks=hooks, out=out, **given)


def record_of_theirs(case: Case, hooks: list[TrainingHook], out: Path, steps: int, **fields: Any) -> list[str]:
    """Return the lines of the record of the same training in a loop that its owner wrote."""
    task, _ = build(case, steps=steps, **fields)
    with attach(task, case, hooks, out) as scope:
        run_theirs(task, case, scope, steps)
    return (out / f"{out.name}.jsonl").read_text().splitlines()


def run_theirs(
    task: TrainingTask,
    case: Case,
    scope: Scope,
    steps: int,
    done: int = 0,
    pause: Callable[[str], None] = lambda at: None,
) -> None:
    """Train from a step on, as the loops of ours do it; ``pause`` is told between two steps where that is."""
    while done < steps:
        for batch in scope.batches(task.loader):
            task.optimizer.zero_grad()
            scope.backward(task.compute_loss(task.model, batch))
            task.optimizer.step()
            done += 1
            if case.loop == "step" and (done % task.eval_every == 0 or done == steps):
                scope.evaluate(task.evaluate, task.model)
            pause(f"step {done}")
            if done == steps:
                break
        if case.loop == "epoch":
            task.scheduler.step()
            scope.epoch_end(**scope.evaluate(task.evaluate, task.model))
            pause(f"epoch after step {done}")


def fields_of(case: Case) -> dict[str, Any]:
    """Leave out a scheduler that steps with every update: at POST_STEP our loops have stepped it, theirs have not."""
    return {"scheduler": None, "snapshot_every": 4} if case.loop == "step" else {"log_every": 100}


def able(names: list[str], case: Case) -> list[str]:
    """Return the hooks that suit a case, without those that no loop of others' can serve, or only with a solution."""
    kinds = [HookRegistry.get(name) for name in names if not refusal(name, case)]
    return [kind.name for kind in dict.fromkeys(kinds) if not (kind.needs_own_loop or kind.needs_reference_weights)]


@pytest.mark.parametrize("names", [QUIET, COMMITTING], ids=["quiet", "committing"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_hook_reports_the_same_as_in_a_loop_of_ours(tmp_path, case, names):
    hooks, steps = able(["training_metrics", *names], case), 5 if case.loop == "step" else 6
    ours = record_of_ours(case, list(map(make, hooks)), tmp_path / "ours", steps, **fields_of(case))
    theirs = record_of_theirs(case, list(map(make, hooks)), tmp_path / "theirs", steps, **fields_of(case))
    assert len(ours) > 2
    assert theirs == ours


def test_the_cases_meet_every_hook_that_an_attached_loop_can_serve():
    met = {name for case in CASES for name in able(QUIET + COMMITTING, case)}
    short = {"consecutive", "loss_spikes", "variance"}
    left = {"counterfactual", "counterfactual_validator", "gradient_projection", "metis_split"}
    assert met == set(HookRegistry.names()) - left - short


# State


class Interrupted(Exception):
    """Breaks a loop off."""


def interrupted(case: Case, hooks: list[TrainingHook], out: Path, steps: int, where: str) -> dict[str, Any]:
    """Train, break off at a place, and return what the owner keeps of it, through a file."""
    task, _ = build(case, steps=steps, **fields_of(case))
    kept: dict[str, Any] = {}

    def pause(at: str) -> None:
        if at == where:
            owned = {name: getattr(task, name).state_dict() for name in ("model", "optimizer")}
            owned["scheduler"] = task.scheduler and task.scheduler.state_dict()
            torch.save(owned | {"random": torch.get_rng_state(), "scope": scope.state_dict()}, out / "state.pt")
            kept.update(torch.load(out / "state.pt", weights_only=True))
        elif kept:  # so that there are steps of which the state knows nothing
            raise Interrupted

    with pytest.raises(Interrupted), attach(task, case, hooks, out) as scope:
        run_theirs(task, case, scope, steps, pause=pause)
    return kept


def resumed(case: Case, hooks: list[TrainingHook], out: Path, steps: int, kept: dict[str, Any]) -> list[str]:
    """Go on from there with everything built anew."""
    task, _ = build(case, steps=steps, **fields_of(case))
    task.model.load_state_dict(kept["model"])
    task.optimizer.load_state_dict(kept["optimizer"])
    if task.scheduler is not None:
        task.scheduler.load_state_dict(kept["scheduler"])
    with attach(task, case, hooks, out) as scope:
        scope.load_state_dict(kept["scope"])
        torch.set_rng_state(kept["random"])
        run_theirs(task, case, scope, steps, kept["scope"]["loop"]["step"])
    return (out / f"{out.name}.jsonl").read_text().splitlines()


PLACES = [("epoch", place) for place in ("step 1", "step 4", "step 6", "epoch after step 6")]
PLACES += [("step", "step 3")]


@pytest.mark.parametrize(("loop", "where"), PLACES)
@pytest.mark.parametrize("names", [QUIET, COMMITTING], ids=["quiet", "committing"])
def test_a_loop_that_goes_on_from_a_state_leaves_the_record_of_one_that_was_not_broken_off(
    tmp_path, loop, where, names
):
    case, steps = Case("tied", loop=loop), 5 if loop == "step" else 9
    hooks = able(["training_metrics", *names], case)
    whole = record_of_theirs(case, list(map(make, hooks)), tmp_path / "whole", steps, **fields_of(case))
    kept = interrupted(case, list(map(make, hooks)), tmp_path / "run", steps, where)
    assert resumed(case, list(map(make, hooks)), tmp_path / "run", steps, kept) == whole
