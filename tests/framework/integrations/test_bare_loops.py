"""Custom loops have the same bytes after every update with and without hooks."""

import json
from dataclasses import replace
from pathlib import Path

import loopscope
import pytest
import torch
from loopscope.hooks import HookPoint
from loopscope.state.digest import digest

from tests.framework.integrations.custom_loops import Loop, MisbehavingHook, Parts, alone, assert_equal, attached, train
from tests.support import SpyHook, at
from tests.support.cases import matrix

pytestmark = pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert")  # of the health of so small a run
HOOKS = {
    "observers": lambda: ["observers"],
    "interventions": lambda: ["all"],
    "misbehaving_hook": lambda: [MisbehavingHook()],
}
BOTH, AMP, WHEN = [False, True], ["none", "bf16"], ["step", "epoch"]
OVERFLOWING = 2.0**18
"""Loss scale of a float16 loop at which the first step is skipped and a later one is not."""
HALF = Loop(amp="fp16", scale=OVERFLOWING, epochs=3)
HALVES = {
    "plain": HALF,
    "unscaled by its owner": replace(HALF, clips=0.1),
    "clipped while scaled": replace(HALF, clips=0.1, unscales=False),
    "fused": replace(HALF, optimizer="adamw_fused"),
    "fused and clipped": replace(HALF, optimizer="adamw_fused", clips=0.1),
    "accumulated": replace(HALF, accumulate=2, clips=0.1),
}
every_half = pytest.mark.parametrize("half", HALVES)


@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.trainer
@matrix("accelerate, accumulate, clips, amp, scheduler, hooks, audit", BOTH, [1, 2], [0.0, 0.1], AMP, WHEN, HOOKS, BOTH)
def test_hooks_leave_every_byte(tmp_path, accelerate, accumulate, clips, amp, scheduler, hooks, audit):
    """A custom loop with hooks has, at every step, the bytes of the loop without them."""
    loop = Loop(accelerate, accumulate, clips, amp, scheduler)
    assert_equal(alone(loop), attached(loop, tmp_path, HOOKS[hooks](), evaluates=True, audit=audit))


@pytest.mark.longer
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
def test_hooks_preserve_another_model_and_optimizer(tmp_path):
    """All hooks and a misbehaving hook leave the run with the tied model and Adafactor unchanged."""
    loop = Loop(model="tied", optimizer="adafactor", accumulate=2, clips=0.1, epochs=1)
    assert_equal(alone(loop), attached(loop, tmp_path, ["all", MisbehavingHook()]))


def test_evaluation_alone_changes_the_random_state():
    """The evaluation of these tests draws random numbers, so the other tests can detect it."""
    parts = Parts(Loop())
    before = parts.digest()
    parts.evaluate(parts.model.eval())
    assert before["generators/torch"] != parts.digest()["generators/torch"]


def test_misbehaving_hook_changes_an_unprotected_loop():
    """Without rollback no digest equals one of the bare loop."""
    parts, misbehaving_hook = Parts(Loop()), MisbehavingHook()
    misbehaving_hook.parts = parts
    misbehaving_hook.spoil(None, None)
    assert [digest for digest in train(parts).digests if digest in alone(Loop()).digests] == []


@pytest.mark.trainer
@pytest.mark.parametrize("accelerate", [False, True], ids=["bare", "accelerate"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_clipping_hook_matches_manual_clipping(tmp_path, accelerate, accumulate):
    """The summary lists grad_clip as a treatment of the gradients."""
    loop = Loop(accelerate=accelerate, accumulate=accumulate)
    options = {"hook_options": {"grad_clip": {"max_norm": 0.1}}}
    assert_equal(alone(replace(loop, clips=0.1)), attached(loop, tmp_path, ["grad_clip"], **options))
    assert json.loads((tmp_path / "summary.json").read_text())["treatments"] == {"grad_clip": ["gradients"]}


# Float16


@pytest.mark.some_rows(4)
@pytest.mark.longer
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@matrix("half, hooks", HALVES, HOOKS)
def test_hooks_preserve_a_float16_loop(tmp_path, half, hooks):
    """The loops use the half-precision setups of HALVES."""
    assert_equal(
        alone(HALVES[half]), attached(HALVES[half], tmp_path, HOOKS[hooks](), audit=hooks == "misbehaving_hook")
    )


@every_half
def test_steps_that_the_scaler_skips_are_counted(tmp_path, half):
    seen = []
    found = attached(HALVES[half], tmp_path, [at(SpyHook, HookPoint.POST_STEP)(lambda ctx: seen.append(ctx.step))])
    steps = len(found.digests)
    assert 0 < len(found.skipped) < steps
    assert seen == [step for step in range(1, steps + 1) if step not in found.skipped]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["skipped_steps"], summary["steps"]) == (len(found.skipped), steps)


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("optimizer", ["adamw_foreach", "adamw_fused"])
@pytest.mark.parametrize("clips", [0.0, 0.1])
def test_hooks_see_unscaled_gradients(tmp_path, optimizer, clips):
    """The gradients equal those of the same loop without a loss scale."""
    loop = Loop(optimizer=optimizer, clips=clips, accumulate=2)
    assert gradients_seen(replace(loop, scale=2.0**10), tmp_path) == gradients_seen(loop, tmp_path)


def gradients_seen(loop: Loop, out: Path) -> list[int]:
    seen: list[int] = []
    look = lambda ctx: seen.append(digest([each.grad for each in ctx.model.parameters()]))
    attached(loop, out, [at(SpyHook, HookPoint.POST_BACKWARD, HookPoint.PRE_UPDATE)(look)])
    assert len(seen) == 8
    return seen


@pytest.mark.some_rows(2)
@pytest.mark.parametrize("optimizer", ["adamw_foreach", "adamw_fused"])
def test_clipping_hook_clips_unscaled_gradients(tmp_path, optimizer):
    """The loop scales its loss by 1024."""
    loop = Loop(optimizer=optimizer, scale=2.0**10)
    options = {"hook_options": {"grad_clip": {"max_norm": 0.1}}}
    assert_equal(alone(replace(loop, clips=0.1)), attached(loop, tmp_path, ["grad_clip"], **options))


def test_a_notebook_shows_a_scope_as_text(tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with loopscope.attach(model, optimizer, hooks=["norms"], out=tmp_path / "run", display="none") as scope:
        assert "not started" in repr(scope)
        for batch in scope.batches([torch.ones(3, 2)]):
            scope.backward(model(batch).mean())
            optimizer.step()
    assert "closed, epoch 1, step 1" in repr(scope)
    assert "run with the group 'health'" in repr(scope)
