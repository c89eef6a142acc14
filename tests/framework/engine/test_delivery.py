"""Delivery of metrics from hooks to sinks: names, buffers, transfers and exact values."""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.engine import HookManager
from loopscope.engine.metric_delivery import PendingMetrics
from loopscope.hooks import STEP_POINTS, HookPoint, MetricSink, Series, StepSchedule
from loopscope.loops import epoch_loop, step_loop
from torch import Tensor

from tests.support import ActingHook, Case, Mishap, RecordingSink, SpyHook, assert_same_bytes, at, build, train
from tests.support.transfers import TransferCount

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def returning(*points: HookPoint, name: str = "spy", **metrics) -> SpyHook:
    """Return a spy that always returns the same metrics."""
    return at(SpyHook, *points, name=name)(lambda ctx: metrics)


def test_metrics_are_named_hook_slash_metric():
    hooks = [returning(HookPoint.POST_EPOCH, a=1.0, **{"norm/0.weight": 2.0}),
             returning(HookPoint.POST_EPOCH, name="other", a=3.0)]  # fmt: skip
    ((metrics, epoch, point, step),) = train(Case(), hooks).sink.emitted
    assert metrics == {"spy/a": 1.0, "spy/norm/0.weight": 2.0, "other/a": 3.0}
    assert (epoch, point, step) == (0, HookPoint.POST_EPOCH, 3)


def test_allowed_values_arrive_as_host_values():
    """A hook returns numbers, tensors of several dtypes, lists, nested dicts, NaN and infinity."""
    returned = {
        "float": 0.5,
        "int": torch.tensor(2**40),
        "bool": torch.tensor(True),
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
        "double": torch.tensor(0.1, dtype=torch.float64),
        "list": [torch.tensor(1), 2, torch.tensor(3.0)],
        "nested": {"a": [torch.tensor(1.5)], "b": {"c": torch.tensor(-1)}},
        "nan": torch.tensor(math.nan),
        "inf": -math.inf,
    }
    ((metrics, *_),) = train(Case(), [returning(HookPoint.POST_EPOCH, **returned)]).sink.emitted
    nan = metrics.pop("spy/nan")
    assert math.isnan(nan)
    assert metrics == {
        "spy/float": 0.5, "spy/int": 2**40, "spy/bool": True, "spy/half": 0.5, "spy/double": 0.1,
        "spy/list": [1, 2, 3.0], "spy/nested": {"a": [1.5], "b": {"c": -1}}, "spy/inf": -math.inf,
    }  # fmt: skip
    assert type(metrics["spy/bool"]) is bool
    assert type(metrics["spy/int"]) is int


def test_hook_returning_nothing_emits_nothing():
    assert train(Case(), [returning(*HookPoint)]).sink.emitted == []


def test_step_metrics_arrive_as_series_per_epoch():
    """The sink receives one series per hook point at the end of each epoch."""
    hook = at(SpyHook, HookPoint.PRE_STEP, HookPoint.POST_STEP)(lambda ctx: {"step": torch.tensor(ctx.step)})
    run = train(Case(), [hook], steps=6)
    expected = [
        ({"spy/step": Series(steps, steps)}, epoch, point, steps[-1])
        for epoch, steps in ((0, [1, 2, 3]), (1, [4, 5, 6]))
        for point in (HookPoint.PRE_STEP, HookPoint.POST_STEP)
    ]
    assert run.sink.emitted == expected


def test_occasional_metric_keeps_its_steps():
    """A metric that a hook reports at some steps arrives with exactly these steps."""

    def sometimes(ctx):
        return {"odd": ctx.step, "always": -ctx.step} if ctx.step % 2 else {"always": -ctx.step}

    run = train(Case(), [at(SpyHook, HookPoint.POST_STEP)(sometimes)])
    ((metrics, *_),) = run.sink.emitted
    assert metrics == {"spy/odd": Series([1, 3], [1, 3]), "spy/always": Series([1, 2, 3], [-1, -2, -3])}


def test_step_loop_flushes_periodically_and_at_end():
    """A flush happens every log_every steps."""
    hook = at(SpyHook, HookPoint.POST_STEP)(lambda ctx: {"n": ctx.step})
    run = train(Case(loop="step"), [hook], steps=5, log_every=2)
    assert [metrics["spy/n"].steps for metrics, *_ in run.sink.emitted] == [[1, 2], [3, 4], [5]]


def test_early_end_delivers_buffered_metrics():
    """The sink receives the metrics of steps 1 and 2 when a hook raises at step 3."""

    def raise_at_three(ctx):
        if ctx.step == 3:
            raise Mishap("too late for the flush")
        return {"n": ctx.step}

    run = train(Case(), [at(SpyHook, HookPoint.POST_STEP)(raise_at_three)], raises=Exception)
    ((metrics, *_),) = run.sink.emitted
    assert metrics == {"spy/n": Series([1, 2], [1, 2])}


@pytest.mark.parametrize("point", [HookPoint.PRE_STEP, HookPoint.POST_BACKWARD])
def test_returned_live_tensor_is_copied(point):
    """The metric keeps the weight's value at the time of the call."""
    truth: list[float] = []

    def corner(ctx) -> dict[str, Tensor]:
        weight = ctx.model[0].weight
        truth.append(weight[0, 0].item())
        return {"live": weight[0, 0]}

    ((metrics, *_),) = train(Case(), [at(SpyHook, point)(corner)]).sink.emitted
    assert metrics["spy/live"].values == truth
    assert len(set(truth)) == 3


def test_a_hook_may_reuse_the_containers_it_returns():
    metrics: dict = {"plain": 0, "list": [0], "mixed": {"tensor": None, "plain": 0}}

    def refill(ctx):
        metrics["plain"] = metrics["list"][0] = metrics["mixed"]["plain"] = ctx.step
        metrics["mixed"]["tensor"] = torch.tensor(ctx.step)
        return metrics

    ((emitted, *_),) = train(Case(), [at(SpyHook, HookPoint.POST_STEP)(refill)]).sink.emitted
    assert emitted["spy/plain"].values == [1, 2, 3]
    assert emitted["spy/list"].values == [[1], [2], [3]]
    assert emitted["spy/mixed"].values == [{"tensor": step, "plain": step} for step in (1, 2, 3)]


@pytest.mark.guarantee("interventions-are-undone")
def test_intervention_metrics_survive_rollback():
    """A returned view of a changed weight keeps the changed value after the rollback."""

    def zero_everything(run_ctx, model_ctx) -> dict[str, Tensor]:
        for parameter in model_ctx.model.parameters():
            parameter.data.fill_(7)
        return {"corner": model_ctx.model[0].weight[0, 0]}

    run = train(Case(), [at(ActingHook, HookPoint.POST_STEP)(zero_everything)])
    assert run.sink.emitted[0][0] == {"acting/corner": Series([1, 2, 3], [7.0] * 3)}
    assert_same_bytes(run, Case())


def test_last_metrics_do_not_follow_weight_updates():
    """The value from PRE_STEP stays the same at POST_STEP, while the weight changes."""
    seen: list[float] = []

    def look(ctx):
        if ctx.hook_point is HookPoint.PRE_STEP:
            return {"live": ctx.model[0].weight[0, 0]}
        seen.append((float(ctx.get_last_metrics()["spy/live"]), ctx.model[0].weight[0, 0].item()))
        return {}

    train(Case(), [at(SpyHook, HookPoint.PRE_STEP, HookPoint.POST_STEP)(look)])
    assert all(before != after for before, after in seen)


def test_last_metrics_keep_their_tensors() -> None:
    """A hook reads tensors of the dtypes that another has returned, also where the numbers were read at once."""
    returned = {"half": torch.tensor(0.1, dtype=torch.bfloat16), "double": torch.tensor(0.1, dtype=torch.float64)}
    seen: list[dict] = []

    def look(ctx) -> dict:
        seen.append(dict(ctx.get_last_metrics()))
        return {"plain": 0.5, **returned}

    train(Case(), [at(SpyHook, HookPoint.POST_STEP)(look)], steps=2)
    newest = seen[-1]
    assert newest.pop("spy/plain") == 0.5
    assert all(torch.equal(newest[f"spy/{name}"], value) for name, value in returned.items())
    assert [value.dtype for value in newest.values()] == [value.dtype for value in returned.values()]


def transfers(hooks: list[SpyHook], loop: str = "epoch", **options) -> int:
    task, state = build(Case(loop=loop), evaluate=lambda model: {}, snapshot_every=100, **options)
    manager = HookManager(hooks, task, state, loop=loop, sinks=[RecordingSink()])
    with TransferCount() as counter:
        (epoch_loop if loop == "epoch" else step_loop)(task, manager)
    return counter.count


def many(*points: HookPoint) -> list[SpyHook]:
    """Return three hooks that return eight tensors each."""
    metrics = {f"m{index}": torch.tensor(float(index)) for index in range(4)} | {"l": [torch.ones(())] * 4}
    return [returning(*points, name=name, **metrics) for name in ("one", "two", "three")]


@pytest.mark.longer
def test_one_delivery_is_one_transfer():
    """The number of hooks and tensors does not matter."""
    bare = transfers([])
    assert transfers(many(HookPoint.PRE_EPOCH)) == bare + 1
    assert transfers(many(HookPoint.PRE_EPOCH, HookPoint.POST_EPOCH)) == bare + 2


@pytest.mark.longer
@pytest.mark.parametrize(("loop", "options", "flushes"), [("epoch", {}, 1), ("step", {"log_every": 3}, 1)])
def test_one_flush_is_one_transfer(loop, options, flushes):
    """The number of steps, hook points and hooks does not matter, in both loops."""
    bare = transfers([], loop, **options)
    assert transfers(many(*STEP_POINTS), loop, **options) == bare + flushes


@pytest.mark.parametrize("read", [float, bool, Tensor.item, Tensor.tolist, np.asarray, Tensor.cpu, Tensor.neg])
def test_transfer_count_sees_every_tensor_read(read):
    """The counter detects item, tolist, float, bool, cpu and NumPy conversion, but not arithmetic."""
    with TransferCount() as counter:
        read(torch.ones(()))
    assert counter.count == (read is not Tensor.neg)


def test_transfer_count_ignores_host_copies():
    """Reads of a tensor that is already on the host do not count."""
    with TransferCount() as counter:
        host = torch.ones(2).to("cpu")
        assert (host[0].item(), host.tolist()) == (1.0, [1.0, 1.0])
    assert counter.count == 1


def of_every_dtype(shift: int = 0) -> dict[str, Tensor | list[Tensor]]:
    """Return a metric of every dtype, each with a value that few other dtypes represent exactly."""
    return {
        "double": torch.tensor(0.1, dtype=torch.float64),
        "int64": torch.tensor(2**62 + 1 + shift),
        "float": torch.tensor(0.1),
        "bool": torch.tensor(True),
        "bfloat16": torch.tensor(3.3895e38, dtype=torch.bfloat16),
        "half": [torch.tensor(5.9605e-08, dtype=torch.float16), torch.tensor(65504.0, dtype=torch.float16)],
        "int32": torch.tensor(-(2**31), dtype=torch.int32),
        "uint8": torch.tensor(255, dtype=torch.uint8),
        "int16": torch.tensor(-(2**15), dtype=torch.int16),
        "nan": torch.tensor(math.nan, dtype=torch.float16),
        "inf": torch.tensor(-math.inf, dtype=torch.bfloat16),
    }


@pytest.mark.longer
def test_values_of_many_dtypes_are_one_transfer():
    assert transfers([returning(HookPoint.PRE_EPOCH, **of_every_dtype())]) == transfers([]) + 1
    hooks = [*many(*STEP_POINTS), returning(*STEP_POINTS, name="mixed", **of_every_dtype())]
    assert transfers(hooks) == transfers([]) + 1


def test_values_of_many_dtypes_arrive_exactly():
    """Each value keeps its name and position over several calls."""
    pending = PendingMetrics()
    calls = [of_every_dtype(shift) for shift in range(3)]
    for metrics in calls:
        pending.add(None, metrics)
    expected = [
        {name: [item.item() for item in value] if isinstance(value, list) else value.item()
         for name, value in metrics.items()}
        for metrics in calls
    ]  # fmt: skip
    assert [list(map(repr, row.values())) for _, row in pending.drain_to_host()] == [
        list(map(repr, row.values())) for row in expected
    ]


@pytest.mark.longer
@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from(DTYPES), max_size=8), max_size=5), st.randoms(use_true_random=False))
def test_random_dtype_mixtures_arrive_bit_exact(calls, draw):
    """Random bits of random dtypes survive the transfer to the host."""
    pending, expected = PendingMetrics(), []
    for dtypes in calls:
        bits = [torch.tensor([draw.getrandbits(8) for _ in range(dtype.itemsize)], dtype=torch.uint8)
                for dtype in dtypes]  # fmt: skip
        tensors = {str(index): raw.view(dtype)[0] for index, (raw, dtype) in enumerate(zip(bits, dtypes, strict=True))}
        pending.add(None, tensors)
        expected.append({name: repr(tensor.item()) for name, tensor in tensors.items()})
    assert [{name: repr(value) for name, value in row.items()} for _, row in pending.drain_to_host()] == expected


def test_host_numbers_are_not_transferred():
    assert transfers([returning(HookPoint.PRE_EPOCH, a=1.0, b=2, c=[True])]) == transfers([])


def test_pending_metrics_return_to_their_places_in_order():
    pending = PendingMetrics()
    pending.add("first", {"a": torch.tensor(1.0), "b": [torch.tensor(2), torch.tensor(3.0)], "c": np.float64(0.5)})
    pending.add("second", {"a": torch.tensor(4.0)})
    assert pending.drain_to_host() == [("first", {"a": 1.0, "b": [2, 3.0], "c": 0.5}), ("second", {"a": 4.0})]
    assert pending.drain_to_host() == []


class Checking(SpyHook):
    """Records the arguments of check."""

    hook_points = frozenset({HookPoint.POST_STEP, HookPoint.POST_EPOCH})

    def __init__(self, probe: Callable) -> None:
        super().__init__(probe)
        self.checked: list = []

    def check(self, values, step):
        self.checked.append((dict(values), step, list(self.seen)))


def test_check_receives_host_values_after_transfer():
    """The check method receives Python numbers together with their step."""
    hook = Checking(lambda ctx: {"n": torch.tensor(ctx.step), "loss": [ctx.loss]})
    train(Case(), [hook])
    assert [(values["n"], step) for values, step, _ in hook.checked] == [(1, 1), (2, 2), (3, 3), (3, 3)]
    assert all(type(value) in (int, float) for values, *_ in hook.checked for value in (values["n"], *values["loss"]))
    assert [len(seen) for *_, seen in hook.checked] == [3, 3, 3, 4]


def test_check_may_draw_without_changing_run():
    """Random numbers that check draws leave the run unchanged."""

    class Warning_(Checking):
        def check(self, values, step):
            torch.rand(3)
            np.random.rand()
            self.checked.append(random.random())

    hook = Warning_(lambda ctx: {"n": 1.0})
    assert_same_bytes(train(Case(), [hook]), Case())
    assert len(hook.checked) == 4


def test_a_schedule_thins_out_series():
    hook = at(SpyHook, HookPoint.POST_STEP, step_schedule=StepSchedule(mode="stride", every_n_steps=2))(
        lambda ctx: {"n": ctx.step}
    )
    ((metrics, *_),) = train(Case(), [hook]).sink.emitted
    assert metrics["spy/n"] == Series([1, 3], [1, 3])


class Failing(MetricSink):
    """A sink whose second emit raises."""

    name = "failing"

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.calls: list[str] = []

    def emit(self, metrics, epoch, hook_point, *, step):
        self.calls.append("emit")
        if len(self.calls) == 2:
            raise self.error

    def close(self, status):
        self.calls.append("close")


@pytest.mark.longer
@pytest.mark.guarantee("errors-are-contained")
@pytest.mark.parametrize("error", [OSError("disk full"), SystemExit(0)], ids=repr)
def test_failing_sink_is_closed_with_warning(error):
    """The other sinks continue, the run is unchanged, and SystemExit counts as a failure."""
    failing, description = Failing(error), f"{type(error).__name__}: {error}"
    with pytest.warns(UserWarning, match=f"Sink 'failing' failed .* for the rest of the run: {description}"):
        run = train(Case(), [returning(HookPoint.POST_EPOCH, n=1.0)], steps=9, sinks=[failing])
    assert failing.calls == ["emit", "emit", "close"]
    assert len(run.sink.emitted) == 3
    assert_same_bytes(run, Case(), 9)


class Including(RecordingSink):
    """Writes the files of the sink ``other``, too."""

    includes = ("other",)

    def share_files(self, writer):
        self.events.append(f"share with {writer.name}")


def test_included_files_have_one_writer():
    """A sink whose files another one writes is left out, and of several such others, the first writes them."""
    included, first, second = RecordingSink("other"), Including("first"), Including("second")
    train(Case(), [returning(HookPoint.POST_EPOCH, n=1.0)], steps=3, sinks=[included, first, second])
    assert included.events == []
    assert first.events == ["start", "flush", "close completed"]
    assert second.events == ["share with first", "start", "flush", "close completed"]
    assert len(first.emitted) == len(second.emitted) == 1


class Drawing(MetricSink):
    """Draws from every generator in every call, like writers of temporary files."""

    name = "drawing"

    def emit(self, metrics, epoch, hook_point, *, step):
        torch.rand(2)
        random.random()
        np.random.standard_normal()

    def flush(self):
        self.emit({}, 0, HookPoint.POST_EPOCH, step=0)


@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_drawing_sink_leaves_run_unchanged(loop):
    case = Case(loop=loop)
    assert_same_bytes(train(case, [returning(*HookPoint, n=1.0)], sinks=[Drawing()]), case)


def test_sinks_are_closed_with_run_status():
    """The manager starts, flushes and closes each sink, with status failed if a hook raises."""
    assert train(Case(), []).sink.events == ["start", "flush", "close completed"]
    failed = train(Case(), [at(SpyHook, HookPoint.PRE_STEP)(lambda ctx: 1 / 0)], raises=Exception)
    assert failed.sink.events == ["start", "flush", "close failed"]
