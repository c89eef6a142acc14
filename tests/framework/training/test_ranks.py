"""Agreement of ranks: an event on one rank ends or continues the run on all ranks, with one message and no deadlock."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed
from loopscope.data import TensorLoader, fixed_order
from loopscope.engine import HookManager
from loopscope.errors import LoopscopeError, UnsuitableError
from loopscope.hooks import GradientTap, HookPoint, MetricSink, StatePart
from loopscope.loops import epoch_loop
from loopscope.state import RandomStreams, TrainingState
from loopscope.state.digest import digest
from loopscope.training import Ranks, TrainingTask
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support import ActingHook, SpyHook, at, mean_loss
from tests.support.ranks import TIMEOUT, on_ranks, start_on_ranks

RANKS, ROWS, BATCH = 3, 24, 12
FAULTY = 1
STEP = (HookPoint.PRE_STEP, HookPoint.POST_BACKWARD, HookPoint.POST_STEP)


def build(kind: str, **settings: Any) -> tuple[TrainingTask, TrainingState]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    data = (torch.randn(ROWS, 5, dtype=torch.float64), torch.randint(3, (ROWS,)))
    indices = torch.arange(ROWS).view(-1, BATCH // RANKS)[torch.distributed.get_rank() :: RANKS].flatten()
    data = (data[0][indices], data[1][indices])
    if kind == "replicas":
        model = DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0]), fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = TensorLoader(data, BATCH // RANKS, fixed_order(torch.arange(len(data[0]))))
    task = TrainingTask(model, optimizer, loader, mean_loss, snapshot_every=1, **{"length": 2} | settings)
    return task, TrainingState(task.model, optimizer, RandomStreams(7))


def outcome(
    kind: str,
    make: Callable[[], Any] = list,
    on_error: str = "raise",
    sinks: Any = (),
    required: Any = None,
    **settings: Any,
) -> tuple[Any, ...]:
    """Return the error of a run (or an empty text), its number of steps, and the digests of its parameters."""
    task, state = build(kind, **settings)
    message = ""
    try:
        manager = HookManager(make(), task, state, sinks=sinks, on_error=on_error, required=required)  # type: ignore[arg-type]
        epoch_loop(task, manager)
    except (LoopscopeError, KeyboardInterrupt) as error:
        message = f"{type(error).__name__}: {error}"
    return message, state.loop.step, [digest(parameter) for parameter in task.model.parameters()]


def is_faulty() -> bool:
    return torch.distributed.get_rank() == FAULTY


def fail(ctx: Any, *_: Any) -> dict[str, float]:
    if is_faulty() and ctx.step == 1:
        raise ValueError("no luck")
    return {}


def fail_between_passes(ctx: Any, model: Any) -> dict[str, float]:
    model.compute_batch_loss()
    fail(ctx)
    model.compute_batch_gradients()
    model.take_step()
    return {}


def mutate(ctx: Any, *_: Any) -> dict[str, float]:
    if is_faulty() and ctx.step == 1:
        with torch.no_grad():
            next(ctx.model.parameters()).mul_(2)
    return {}


class RaisingTap(SpyHook):
    """Raises in a tap, during the backward pass."""

    hook_points = frozenset({HookPoint.POST_STEP})

    def taps(self, model: nn.Module) -> Any:
        def fail_on_one_rank(gradient: Any) -> None:
            if is_faulty():
                raise ValueError("no luck")

        return [GradientTap("0", "output", fail_on_one_rank)]


class NotStarting(SpyHook):
    """Raises in its start method."""

    error: type[Exception] = UnsuitableError

    def start(self, run: Any) -> None:
        if is_faulty():
            raise self.error("no luck")


class Strided(SpyHook):
    """Observer with an option."""

    def __init__(self, *, stride: int) -> None:
        super().__init__()
        self.stride = stride


class FullDisk(MetricSink):
    """Sink that fails on one rank."""

    name = "full_disk"

    def emit(self, metrics: Any, epoch: int, hook_point: HookPoint, *, step: int) -> None:
        if is_faulty():
            raise OSError(28, "No space left on device")


def observers(point: HookPoint, probe: Any) -> list[Any]:
    return [at(SpyHook, point)(probe)]


def interventions(act: Any, **attributes: Any) -> list[Any]:
    return [at(ActingHook, HookPoint.PRE_STEP, HookPoint.POST_BACKWARD, **attributes)(act)]


def measure_after_failure(ctx: Any) -> dict[str, float]:
    if ctx.hook_point is HookPoint.PRE_STEP:
        return fail(ctx)
    ctx.compute_batch_gradients(ctx.batch_data)
    return {}


CASES: dict[str, Callable[[], list[Any]]] = {
    **{f"observer at {point.name}": lambda point=point: observers(point, fail) for point in STEP},
    "observer at PRE_STEP that measures later": lambda: [at(SpyHook, *STEP)(measure_after_failure)],
    "observer at SNAPSHOT": lambda: observers(HookPoint.SNAPSHOT, lambda ctx: 1 / 0 if is_faulty() else {}),
    "intervention": lambda: interventions(fail),
    "intervention between passes": lambda: interventions(fail_between_passes),
    "committing": lambda: interventions(fail, commits=frozenset({StatePart.GRADIENTS})),
    "tap": lambda: [RaisingTap()],
    "mutation": lambda: observers(HookPoint.PRE_STEP, mutate),
    "mutation, and a hook that measures": lambda: [
        *observers(HookPoint.PRE_STEP, mutate),
        *interventions(lambda ctx, model: {"loss": model.compute_batch_loss()}),
    ],
    "unsuited": lambda: [NotStarting()],
    "start": lambda: [type("Broken", (NotStarting,), {"error": ValueError})()],
}


def stop_on_one(evaluation: Any) -> bool:
    return is_faulty()


def other_hooks() -> list[Any]:
    return observers(HookPoint.POST_STEP, fail) if is_faulty() else []


def other_options() -> list[Any]:
    return [Strided(stride=2 + is_faulty())]


def all_outcomes(kind: str) -> dict[str, Any]:
    results = {name: outcome(kind, make) for name, make in CASES.items()}
    hook_calls = [name for name in CASES if name.startswith(("observer", "intervention"))]
    results |= {f"{name}, skipped": outcome(kind, CASES[name], "skip") for name in hook_calls}
    of_group = [*hook_calls, "committing", "tap", "unsuited", "start"]
    results |= {f"{name}, of a group": outcome(kind, CASES[name], required=()) for name in of_group}
    results["bare"] = outcome(kind)
    results["full disk"] = outcome(
        kind, lambda: observers(HookPoint.POST_STEP, lambda ctx: {"one": 1.0}), sinks=[FullDisk()]
    )
    results["stopped"] = outcome(kind, should_stop=stop_on_one)
    results["other hooks"] = outcome(kind, other_hooks)
    results["other options"] = outcome(kind, other_options)
    results["other length"] = outcome(kind, length=2 + is_faulty())
    return results


def agreements(kind: str, make: Callable[[], Any]) -> int:
    """Count the all-reduces of a single number for the hooks of a run of four steps."""
    counts, all_reduce = [0], torch.distributed.all_reduce

    def counting_all_reduce(value: torch.Tensor, *args: Any, **options: Any) -> Any:
        counts[0] += value.dtype is torch.float32 and value.numel() == 1  # losses are float64
        return all_reduce(value, *args, **options)

    torch.distributed.all_reduce = counting_all_reduce
    try:
        assert outcome(kind, make)[:2] == ("", 4)
    finally:
        torch.distributed.all_reduce = all_reduce
    return counts[0]


def return_no_metrics(*_: Any) -> dict[str, float]:
    return {}


def agreement_counts(kind: str) -> dict[str, int]:
    """Return the agreements of observers and of an intervention, without those of a run that has no due hooks."""
    hooks = {
        "one observer": lambda: observers(HookPoint.POST_STEP, return_no_metrics),
        "at three points": lambda: [at(SpyHook, *STEP)(return_no_metrics)],
        "an intervention": lambda: [at(ActingHook, HookPoint.POST_STEP)(return_no_metrics)],
    }
    baseline = agreements(kind, lambda: observers(HookPoint.PRE_EPOCH, return_no_metrics)) - 2  # fires once an epoch
    return {"kind": kind, **{name: agreements(kind, make) - baseline for name, make in hooks.items()}}  # type: ignore[dict-item]


def replica_results() -> dict[str, Any]:
    return all_outcomes("replicas") | {"agreements": agreement_counts("replicas")}


def shard_results() -> dict[str, Any]:
    return all_outcomes("shards") | {"agreements": agreement_counts("shards")}


@pytest.fixture(scope="module", params=[replica_results, pytest.param(shard_results, marks=pytest.mark.slow)])
def ranks(request, tmp_path_factory):
    """Return the results of each of three processes."""
    return on_ranks(request.param, tmp_path_factory.mktemp("ranks"), RANKS)


@pytest.mark.guarantee("ranks-agree")
@pytest.mark.ranks
def test_error_on_one_rank_ends_all_ranks(ranks):
    """All ranks stop at the same step, and the others name the rank where the error occurred."""
    for name in CASES:
        (first, step, _), (faulty, *_), (third, *_) = [result[name] for result in ranks]
        text = faulty.partition(": ")[2]
        assert first == third
        assert first.endswith(f": {text} (on rank {FAULTY})"), name
        assert "no luck" in text or "division by zero" in text or "changed the training state" in text
        assert [result[name][1] for result in ranks] == [step] * RANKS
        assert step == (2 if "SNAPSHOT" in name else 0 if name in ("unsuited", "start") else 1)


@pytest.mark.guarantee("ranks-agree")
@pytest.mark.ranks
def test_ranks_agree_on_steps_and_commits(ranks):
    """If one rank fails, no other rank keeps the step or the commit."""
    for result in ranks:
        assert result["committing"][2] == result["start"][2] != result["bare"][2]  # no step was made
        for name in CASES:
            if result[name][1] == 1 and name != "committing" and "mutation" not in name:
                assert result[name][2] == result["observer at PRE_STEP"][2], name


@pytest.mark.some_rows(2)
@pytest.mark.guarantee("ranks-agree")
@pytest.mark.ranks
def test_skipped_hook_is_skipped_on_all_ranks(ranks):
    """The result on each rank is that of the run without the hook."""
    for result in ranks:
        skipped = [name for name in result if name.endswith(("skipped", "of a group"))]
        assert len(skipped) > 15
        assert [name for name in skipped if result[name] != result["bare"]] == []


@pytest.mark.ranks
def test_full_disk_on_one_rank_disables_its_sink(ranks):
    """The run continues on every rank with the same result."""
    assert [result["full disk"] == result["bare"] for result in ranks] == [True] * RANKS


@pytest.mark.guarantee("ranks-agree")
@pytest.mark.ranks
def test_stop_on_one_rank_stops_all(ranks):
    """If one rank wants to stop, all ranks stop after the same step."""
    assert [result["stopped"][:2] for result in ranks] == [("", 2)] * RANKS


@pytest.mark.guarantee("ranks-agree")
@pytest.mark.ranks
def test_ranks_started_differently_are_refused(ranks):
    """Differing hooks, options and lengths are each named with the values of the ranks."""
    sentences = {name: {result[name][0] for result in ranks} for name in ranks[0] if name.startswith("other")}
    differs = "The list of hooks differs between the ranks: none on rank 0, spy on rank 1, none on rank 2"
    assert sentences["other hooks"] == {f"UsageError: {differs}; start all ranks with the same settings."}
    (options,), (length,) = sentences["other options"], sentences["other length"]
    assert (
        "The configuration of hook 'spy' differs between the ranks: stride=2 on rank 0, stride=3 on rank 1" in options
    )
    assert "The task's length differs between the ranks: 2 on rank 0, 3 on rank 1" in length
    assert all(result["other length"][1] == 0 for result in ranks)


@pytest.mark.ranks
def test_rank_agreements_are_one_per_step_or_dispatch(ranks):
    """Interventions agree once per visit; observers once per step, but once per visit on shards."""
    for counts in [result["agreements"] for result in ranks]:
        at_three_points = 12 if counts["kind"] == "shards" else 4
        expected = {"one observer": 4, "at three points": at_three_points, "an intervention": 4}
        assert counts == {"kind": counts["kind"], **expected}


def die(number: int, ctx: Any) -> dict[str, float]:
    if is_faulty():
        os.kill(os.getpid(), number)
    return {}


def killed(number: int) -> tuple[Any, ...]:
    result = outcome("replicas", lambda: observers(HookPoint.POST_STEP, partial(die, number)))
    if is_faulty():
        os._exit(1)  # as after an interrupt; otherwise the rank would wait for the results of the others
    return result


def is_unchanged_by_late_rank() -> bool:
    bare = outcome("replicas")
    return bare == outcome("replicas", lambda: observers(HookPoint.POST_STEP, sleep))


def sleep(ctx: Any) -> dict[str, float]:
    if is_faulty() and ctx.step == 1:
        time.sleep(10)
    return {}


@pytest.mark.guarantee("ranks-agree")
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_lost_rank_ends_others_before_timeout(number, tmp_path):
    """A rank that is killed or interrupted gives RankLostError on the others."""
    context = start_on_ranks(partial(killed, number), tmp_path, RANKS)
    deadline = time.monotonic() + TIMEOUT / 2
    results = [tmp_path / f"{rank}.pt" for rank in (0, 2)]
    while time.monotonic() < deadline and not all(result.exists() for result in results):
        time.sleep(0.1)
    for process in context.processes:  # ranks with a result wait for those of the others
        process.kill()
    for result in results:
        message, step, _ = torch.load(result)
        assert (message.partition(":")[0], step) == ("RankLostError", 1)
        assert "Another rank has ended" in message


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_wait_for_a_late_rank(tmp_path):
    assert on_ranks(is_unchanged_by_late_rank, tmp_path, RANKS) == [True] * RANKS


def test_single_rank_returns_its_own_numbers():
    alone, value = Ranks(), torch.tensor(2.0)
    assert alone.mean(value) is value
    assert (alone.rows(5), alone.evaluation({"loss": 1.0})) == (5, {"loss": 1.0})
    assert (alone.is_main, alone.agree(True), alone.agree(False)) == (True, True, False)
