"""Hooks in Hugging Face's Trainer leave training unchanged, report correct numbers, and resume with its checkpoints."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope import read_run
from loopscope.data import TorchLoader
from loopscope.engine import HookManager
from loopscope.errors import UsageError
from loopscope.hooks import HookPoint
from loopscope.hooks.selection import build_hooks, select_hooks
from loopscope.loops import epoch_loop
from loopscope.state import RandomStreams, TrainingState
from loopscope.training import TrainingTask
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from tests.framework.integrations.hf_trainers import (
    ROWS,
    InOrder,
    Rows,
    attached,
    misbehaving_hook,
    model,
    same,
    traced,
    trainer,
)
from tests.support import RecordingSink, SpyHook, run_info
from tests.support.cases import slow_unless, some_of

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
WATCHING = ["norms", "training_metrics", "gradient_flow", "weight_updates", "hessian"]
HOOKS: dict[str, Any] = {"observers": lambda: WATCHING, "misbehaving_hook": lambda: [misbehaving_hook()]}
LOOPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    "bf16": {"bf16": True, "gradient_accumulation_steps": 2},
    "by_epoch": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3, "max_grad_norm": 0},
}


@pytest.mark.slow_rows("misbehaving_hook-plain", "misbehaving_hook-accumulated")
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize(
    ("hooks", "loop"),
    [
        pytest.param(
            hooks, loop, marks=slow_unless(loop == "accumulated" or (hooks, loop) == ("misbehaving_hook", "plain"))
        )
        for hooks in HOOKS
        for loop in LOOPS
    ],
)
def test_trainer_with_hooks_matches_plain_trainer(tmp_path: Path, hooks: str, loop: str) -> None:
    """The traces are equal at every step, for each set of hooks and each loop."""
    assert same(traced(tmp_path / "a", HOOKS[hooks](), **LOOPS[loop]), traced(tmp_path / "b", **LOOPS[loop]))


@pytest.mark.guarantee("attached-loops-keep-their-bytes")
def test_evaluation_with_hooks_leaves_training_unchanged(tmp_path: Path) -> None:
    """The Trainer's evaluation alone changes the training, and with hooks attached it does not."""
    short: dict[str, Any] = {"num_train_epochs": 1}
    evaluating = {"eval_strategy": "steps", "eval_steps": 2, **short}
    bare = traced(tmp_path / "bare", **short)
    assert not same(traced(tmp_path / "theirs", **evaluating), bare)
    assert same(traced(tmp_path / "ours", WATCHING, **evaluating), bare)


@pytest.mark.slow
def test_steps_skipped_by_scaler_are_counted(tmp_path: Path) -> None:
    """The test injects a GradScaler on the CPU, and the tests marked gpu use the Trainer's own scaler."""

    def scaled(folder: str, hooks: Any) -> Any:
        def train(made: Any) -> None:
            made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
            made.train()

        return traced(tmp_path / folder, hooks, train=train)

    spy = SpyHook(lambda ctx: {"scale": ctx.loss_scale or 0.0, "skipped": ctx.skipped_steps})
    assert same(scaled("a", [spy]), scaled("b", None))
    seen = [step for point, _, step in spy.seen if point == "POST_STEP"]
    assert 0 < len(seen) < ROWS
    assert json.loads((tmp_path / "a/loopscope-runs/run_0/summary.json").read_text())["skipped_steps"] == ROWS - len(
        seen
    )


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", some_of([2, 1]))
def test_metrics_match_the_loopscope_loop(tmp_path: Path, accumulate: int) -> None:
    """The match is exact, or within rounding if the losses of several micro-batches are weighted."""
    constant: dict[str, Any] = {
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0,
        "optim": "adamw_torch",
        "weight_decay": 0.0,
    }
    hooks = ["norms", "gradient_flow", "weight_updates", "batch_dynamics", "hessian", "parameter_delta", "path_length"]
    made, theirs = (
        trainer(tmp_path, dropout=0.0, kind=InOrder, gradient_accumulation_steps=accumulate, **constant),
        RecordingSink(),
    )
    attached(made, hooks, seed=7, sinks=[theirs])
    made.train()
    own = _loopscope_record(hooks, accumulate)
    assert [row[:3] for row in theirs.rows()] == [row[:3] for row in own.rows()]
    values = [[row[3] for row in sink.rows()] for sink in (theirs, own)]
    rounding = {"rel": 2e-3, "abs": 1e-6} if accumulate > 1 else {"rel": 0.0, "abs": 0.0}
    assert values[0] == pytest.approx(values[1], nan_ok=True, **rounding)


def _loopscope_record(hooks: list[str], accumulate: int) -> RecordingSink:
    ours = model(dropout=0.0).train()
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2, weight_decay=0.0)

    def loss(trained: Any, batch: Any) -> torch.Tensor:
        return trained(**batch, num_items_in_batch=(batch["labels"] != -100).sum()).loss

    loader = TorchLoader(DataLoader(Rows(), batch_size=2 * accumulate), 7)
    task = TrainingTask(ours, optimizer, loader, loss, length=2, snapshot_every=1, accumulation_steps=accumulate)
    sink = RecordingSink()
    made = [item.hook for item in build_hooks(select_hooks(None, hooks, {}, ""), {}, {}, [])]
    manager = HookManager(made, task, TrainingState(ours, optimizer, RandomStreams(7)), sinks=[sink])
    manager.start(run_info(task, manager, "epoch"))
    epoch_loop(task, manager)
    manager.end("completed")
    return sink


@pytest.mark.slow
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("step", [3, pytest.param(7, marks=pytest.mark.slow)])
def test_resumed_trainer_records_like_uninterrupted_trainer(tmp_path: Path, step: int) -> None:
    """Step 3 is within the first epoch and step 7 at its end, and a damaged state file is refused."""

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == step

    saving = {"save_strategy": "steps", "save_steps": step}
    for name, callbacks in (("whole", []), ("parts", [Stop()])):
        made = trainer(tmp_path / name, *callbacks, **saving)
        attached(made, WATCHING)
        made.train()
    made = trainer(tmp_path / "parts", **saving)
    attached(made, WATCHING)
    made.train(resume_from_checkpoint=str(tmp_path / f"parts/checkpoint-{step}"))
    whole, parts = (tmp_path / f"{name}/loopscope-runs/run_0/{name}.jsonl" for name in ("whole", "parts"))
    assert whole.read_text() == parts.read_text()
    (state,) = tmp_path.glob(f"parts/checkpoint-{step}/loopscope/*/state.pt")
    state.write_bytes(state.read_bytes()[:-1])
    made = trainer(tmp_path / "parts", **saving)
    attached(made, WATCHING)
    with pytest.raises(UsageError, match=r"state\.pt has \d+ bytes instead of \d+: it is damaged"):
        made.train(resume_from_checkpoint=str(tmp_path / f"parts/checkpoint-{step}"))


@pytest.mark.slow
def test_metrics_go_through_the_loggers_of_the_trainer(tmp_path: Path) -> None:
    logged: list[tuple[int, dict[str, float]]] = []

    class Logger(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            logged.append((state.global_step, logs))

    made = trainer(tmp_path, Logger())
    attached(made, ["norms", SpyHook(lambda ctx: {"step": ctx.step})], sinks=["jsonl", "trainer"])
    made.train()
    ours = [(step, name) for step, logs in logged for name in logs if "/" in name]
    assert {step for step, name in ours if name.startswith("norms/")} == {7, 14}
    assert {step for step, name in ours if name == "spy/step"} == set(range(15))


def test_unknown_sink_of_a_trainer_is_refused(tmp_path: Path) -> None:
    """The names include that of the trainer's own loggers."""
    with pytest.raises(UsageError, match=r"Unknown sink 'trainr'. Did you mean 'trainer'\? Known: .*trainer, wandb"):
        attached(trainer(tmp_path), ["norms"], sinks=["jsonl", "trainr"])


def test_a_training_that_fails_is_recorded_as_failed(tmp_path: Path) -> None:
    class Failing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                raise ValueError("as planned")

    made = trainer(tmp_path, Failing())
    attached(made, ["norms"])
    with pytest.raises(ValueError, match="as planned"):
        made.train()
    summary = json.loads((tmp_path / "loopscope-runs/run_0/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 3)
    assert "get_batch_samples" not in vars(made)


def test_clipping_happens_between_backward_and_update_points(tmp_path: Path) -> None:
    """POST_BACKWARD sees the full gradient norm, and PRE_UPDATE sees the clipped one."""
    norms: dict[str, list[float]] = {"POST_BACKWARD": [], "PRE_UPDATE": []}

    def note(ctx: Any) -> None:
        if ctx.hook_point.name in norms:
            squares = [
                parameter.grad.square().sum() for parameter in ctx.model.parameters() if parameter.grad is not None
            ]
            norms[ctx.hook_point.name].append(float(torch.stack(squares).sum().sqrt()))

    made = trainer(tmp_path, max_grad_norm=0.01, num_train_epochs=1)
    attached(made, [SpyHook(note)])
    made.train()
    assert min(norms["POST_BACKWARD"]) > 0.02
    assert norms["PRE_UPDATE"] == pytest.approx([0.01] * 7, rel=1e-3)


def _twice(made: Any) -> None:
    attached(made, [])
    attached(made, [])


def _without(name: str, made: Any) -> None:
    setattr(made, name, None)
    attached(made, [])


MISTAKES: dict[str, tuple[Any, str]] = {
    "attach twice": (_twice, "already attached to this Trainer"),
    "another version": (partial(_without, "get_batch_samples"), "no get_batch_samples, .* transformers 5.23"),
    "a hook for our loop": (lambda made: attached(made, ["counterfactual"]), "trains additional epochs"),
    "a hook that reads data": (lambda made: attached(made, ["attention"]), "give loader="),
    "a training that may restart": (
        lambda made: setattr(made.args, "auto_find_batch_size", True) or attached(made, []),
        "auto_find_batch_size may restart the training",
    ),
    "DeepSpeed": (
        lambda made: setattr(made, "is_deepspeed_enabled", True) or attached(made, []),
        "trains with DeepSpeed; use DDP, or fsdp_version 2",
    ),
    "FSDP version 1": (
        lambda made: setattr(made, "is_fsdp_enabled", True) or attached(made, []),
        "FSDP version 1; set fsdp_version 2",
    ),
    "a separate optimizer": (
        lambda made: __import__("loopscope").attach(made, torch.optim.SGD([torch.zeros(1)])),
        "The trainer has its own optimizer",
    ),
}


@pytest.mark.guarantee("mistakes-are-refused-early")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_usage_mistakes_raise_specific_errors(tmp_path: Path, mistake: str) -> None:
    """Common mistakes with a Trainer of Hugging Face raise errors that name them."""
    do, sentence = MISTAKES[mistake]
    with pytest.raises(UsageError, match=sentence):
        do(trainer(tmp_path, num_train_epochs=1))


@pytest.mark.guarantee("mistakes-are-refused-early")
def test_optimizer_with_closure_is_refused(tmp_path: Path) -> None:
    """LBFGS is refused by name before the first step."""
    made = trainer(tmp_path, num_train_epochs=1)
    made.optimizer = torch.optim.LBFGS(made.model.parameters())
    attached(made, ["norms"])
    with pytest.raises(UsageError, match="LBFGS needs a closure, which a Trainer does not provide"):
        made.train()


def test_hook_points_follow_the_loop_order(tmp_path: Path) -> None:
    """The Trainer visits every hook point in the order of the loopscope loop."""
    spy = SpyHook()
    made = trainer(tmp_path, num_train_epochs=1, max_steps=2)
    attached(made, [spy])
    made.train()
    step = ["PRE_STEP", "POST_BACKWARD", "PRE_UPDATE", "POST_STEP"]
    assert [point for point, _, _ in spy.seen] == ["PRE_EPOCH", *step, *step, "POST_EPOCH", "SNAPSHOT"]
    assert {HookPoint[point] for point, _, _ in spy.seen} == set(HookPoint)


@pytest.mark.slow_rows("step")
@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_every_evaluation_of_the_trainer_is_recorded(tmp_path: Path, loop: str) -> None:
    """The record has each evaluation at its step, and the arguments of the Trainer."""
    made = trainer(tmp_path / "out", eval_strategy="steps", eval_steps=2, max_steps=5)
    attached(made, ["norms"], loop=loop, out=tmp_path / "run")
    made.train()
    name = "training_metrics/evaluation/eval_loss"
    assert [step for _, step, _, metric, _ in read_run(tmp_path / "run").points if metric == name] == [2, 4, 5]
    training = json.loads((tmp_path / "run/experiment_config.json").read_text())["training"]
    assert training.items() >= {"seed": 1, "learning_rate": 1e-2, "per_device_train_batch_size": 2}.items()


def test_logged_numbers_are_recorded(tmp_path: Path) -> None:
    """What the Trainer logs is in the record as ``reported/NAME``, without times."""
    made = trainer(tmp_path, logging_strategy="steps", logging_steps=2, num_train_epochs=1)
    scope = loopscope.attach(made, hooks=["norms"], out=tmp_path / "run", display="none")
    made.train()
    names = {name for name in scope.last_metrics() if name.startswith("reported/")}
    assert {"reported/loss", "reported/grad_norm", "reported/learning_rate"} <= names
    assert not any(name.endswith(("_runtime", "_per_second")) for name in names)
