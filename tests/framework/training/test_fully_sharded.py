"""Hooks under FSDP2: on every mesh, each rank ends with the bytes of the run without hooks."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle, product
from typing import Any

import pytest
import torch
import torch.distributed
from loopscope import training_hooks
from loopscope.data import TensorLoader, fixed_order
from loopscope.engine import HookManager
from loopscope.errors import HookError, StateMutationError
from loopscope.hooks import GradientTap, HookPoint, HookRegistry
from loopscope.isolation import StateCopy
from loopscope.loops import epoch_loop, step_loop
from loopscope.state import RandomStreams, TrainingState, without_on_demand
from loopscope.tensors import local_shards
from loopscope.training import TrainingTask, forward_backward, is_skipped, update
from torch import nn

from tests.support import ActingHook, SpyHook, at, mean_loss, raising, run_info
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.ranks

assert training_hooks.__all__
ROWS, BATCH = 96, 48
POINTS = set(HookPoint) - {HookPoint.PRE_UPDATE}
SHARPNESS = {"k": 1, "iterations": 2, "probes": 1, "density_probes": 1, "batches": 1, "critical_passes": 2}
MEASURING: dict[str, dict[str, Any]] = {
    "hessian": {"method": "finite_difference"},
    "sharpness": {"method": "finite_difference", **SHARPNESS},
    **{name: {} for name in ("lr_probe", "adam_dynamics", "norms", "path_length", "weight_average", "batch_dynamics")},
    **{name: {} for name in ("gradient_noise_scale", "consecutive", "parameter_delta", "weight_updates")},
}
QUICK = ("hessian", "adam_dynamics", "norms", "weight_average", "gradient_noise_scale")


class Block(nn.Module):
    """A separately sharded module, like a transformer block, with dropout and a norm."""

    def __init__(self, *, narrow: bool) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 12), nn.Linear(12, 8), nn.Dropout(0.2)
        # Batch norm does not support bfloat16 inputs with the float64 buffers, which FSDP2 does not cast.
        self.norm = nn.LayerNorm(8) if narrow else nn.BatchNorm1d(8)

    def forward(self, x):
        return x + self.norm(self.drop(self.down(torch.tanh(self.up(x)))))


def build(
    kind: str, *, device: str = "cpu", length: int = 2, narrow: bool = False, accumulate: int = 1, **options: Any
) -> tuple[TrainingTask, TrainingState]:
    """Build a run on a mesh of this ``kind``, whose data-parallel ranks share the rows of each batch."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    blocks = [Block(narrow=narrow), Block(narrow=narrow)]
    model = nn.Sequential(nn.Linear(5, 8), *blocks, nn.Linear(8, 3)).double()
    mesh, tensor_mesh, rank, ranks = meshes(kind, device)
    if tensor_mesh is not None:
        for block in blocks:
            parallelize_module(block, tensor_mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if narrow:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, **options)
    indices = torch.arange(ROWS).view(-1, BATCH // ranks)[rank::ranks].flatten()
    data = (
        torch.randn(ROWS, 5, dtype=torch.float64)[indices].to(device),
        torch.randint(3, (ROWS,))[indices].to(device),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    task = TrainingTask(
        model,
        optimizer,
        TensorLoader(data, BATCH // ranks, fixed_order(torch.arange(len(indices)))),
        mean_loss,
        evaluate=lambda model: {"val_loss": float(mean_loss(model, data))},
        length=length,
        snapshot_every=1,
        accumulation_steps=accumulate,
    )
    return task, TrainingState(model, optimizer, RandomStreams(7))


def meshes(kind: str, device: str) -> tuple[Any, Any, int, int]:
    """Return the FSDP mesh, the tensor-parallel mesh, the data-parallel rank and the data-parallel world size."""
    from torch.distributed.device_mesh import init_device_mesh

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if kind == "fsdp":
        return init_device_mesh(device, (ranks,)), None, rank, ranks
    mesh = init_device_mesh(device, (2, ranks // 2), mesh_dim_names=("outer", "inner"))
    if kind == "hsdp":
        return mesh, None, rank, ranks
    return mesh["outer"], mesh["inner"], mesh["outer"].get_local_rank(), 2


def trained(make: Callable[[], Any], hooks: Sequence[Any] = (), loop: str = "epoch", **kinds: Any) -> dict[str, int]:
    """Train and return the digests of this rank's final state."""
    task, state = make()
    manager = HookManager(hooks, task, state, loop=loop, **kinds)
    manager.start(run_info(task, manager, loop))
    {"epoch": epoch_loop, "step": step_loop}[loop](task, manager)
    manager.end("completed")
    return without_on_demand(state.digest())


# Changes by interventions, which are rolled back.


def first_batch(model: Any) -> Any:
    return next(iter(model.loader.batches(0)))


def step_and_zero_weights(run: Any, ctx: Any) -> None:
    torch.rand(3)
    ctx.compute_batch_gradients(first_batch(ctx))
    ctx.take_step(first_batch(ctx))
    with torch.no_grad():
        for parameter in ctx.model.parameters():
            parameter.to_local().zero_()


def replace_gathered_weights(run: Any, ctx: Any) -> None:
    ctx.model.unshard()
    ctx.model[1].unshard()
    for parameter in ctx.model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.register_hook(torch.zeros_like)
    ctx.model[1].up.bias.data = torch.zeros_like(ctx.model[1].up.bias.data)


def change_fsdp_settings(run: Any, ctx: Any) -> None:
    ctx.model.set_requires_gradient_sync(False)
    ctx.model.set_reshard_after_backward(False)
    ctx.model.set_gradient_divide_factor(7.0)
    ctx.model.set_is_last_backward(False)
    ctx.model(first_batch(ctx)[0])


def branch_while_gathered(run: Any, ctx: Any) -> None:
    ctx.model(first_batch(ctx)[0])
    with ctx.branch():
        ctx.take_step(first_batch(ctx))


def raise_in_forward_pass(run: Any, ctx: Any) -> None:
    ctx.model[2].drop.register_forward_pre_hook(raising)
    ctx.model(first_batch(ctx)[0])


def raise_in_backward_pass(run: Any, ctx: Any) -> None:
    ctx.model[1].register_full_backward_hook(raising)
    mean_loss(ctx.model, first_batch(ctx)).backward()


def write_to_gathered_weights(run: Any, ctx: Any) -> None:
    loss = mean_loss(ctx.model, first_batch(ctx))
    ctx.model[1].set_unshard_in_backward(False)
    ctx.model[2].down.bias = nn.Parameter(torch.ones(8, dtype=torch.float64))
    del loss


MUTATIONS = (
    step_and_zero_weights,
    replace_gathered_weights,
    change_fsdp_settings,
    branch_while_gathered,
    write_to_gathered_weights,
)
RAISING = (raise_in_forward_pass, raise_in_backward_pass)


# Changes by observers, which raise an error; if the observer itself raises, they are restored.


def leave_gathered(ctx: Any) -> None:
    ctx.model[1].unshard()


def write_to_shards(ctx: Any) -> None:
    ctx.model[1].up.weight.to_local().zero_()


def write_through_data(ctx: Any) -> None:
    ctx.model[1].up.weight._local_tensor.data.zero_()


def leave_a_gradient(ctx: Any) -> None:
    ctx.model[1].unshard()
    ctx.model[1].up.weight.grad = torch.ones_like(ctx.model[1].up.weight)
    ctx.model[1].reshard()


def disable_gradient_sync(ctx: Any) -> None:
    ctx.model.set_requires_gradient_sync(False)


FSDP2_STATE = "gathered parameters, pending work or settings of FSDP2"
CAUGHT = {
    leave_gathered: "modules/1.up._parameters.weight",
    write_to_shards: "parameters/1.up.weight",
    write_through_data: "parameters/1.up.weight",
    leave_a_gradient: FSDP2_STATE,
    disable_gradient_sync: FSDP2_STATE,
}


def mutation_error(make: Callable[[], Any], mutation: Callable[[Any], None]) -> str:
    try:
        trained(make, [at(SpyHook, HookPoint.POST_STEP)(mutation)])
    except StateMutationError as error:
        return str(error)
    return "no error"


def raise_in_observer_pass(ctx: Any) -> None:
    handle = ctx.model[1].up.register_forward_pre_hook(raising)
    try:
        ctx.model(ctx.batch_data[0])
    finally:
        handle.remove()


class RaisingTap(SpyHook):
    """Raises in the backward pass of the run, while parameters are gathered."""

    def taps(self, model: nn.Module) -> list[GradientTap]:
        return [GradientTap("1.up", "output", self.probe)]


def measuring_hooks(names: Iterable[str]) -> list[Any]:
    return [HookRegistry.get(name)(**MEASURING[name]) for name in names]


def misbehaving_hook() -> ActingHook:
    mutations = cycle(MUTATIONS)  # one per call, so that each is made at most hook points
    return at(ActingHook, *POINTS)(lambda *contexts: next(mutations)(*contexts))


def changing_hook_sets(make: Callable[[], Any], names: Iterable[str] = MEASURING) -> list[str]:
    """Return the names of the sets of hooks that change the final bytes of a run."""
    bare = trained(make)
    acting, spying = at(ActingHook, *POINTS), at(SpyHook, HookPoint.POST_STEP)
    digests_by_set = {
        "measuring_hooks": trained(make, measuring_hooks(names), audit=True),
        "misbehaving_hook": trained(make, [misbehaving_hook()], audit=True),
    }
    tap = at(RaisingTap, HookPoint.POST_EPOCH)(raising)
    for hook in (*map(acting, RAISING), spying(raise_in_observer_pass), tap):
        with pytest.warns(UserWarning, match="The run continues without this hook"):
            digests_by_set[(hook.probe if isinstance(hook, SpyHook) else hook.act).__name__] = trained(
                make, [hook], on_error="skip"
            )
    return [name for name, digests in digests_by_set.items() if digests != bare]


def three_rank_results() -> dict[str, Any]:
    make = partial(build, "fsdp", length=1)
    results: dict[str, Any] = {mutation.__name__: mutation_error(make, mutation) for mutation in CAUGHT}
    results |= {"changing_hook_sets": changing_hook_sets(make, QUICK), "copied": snapshot_costs()}
    return results | {"gathered": refused_while_gathered()}


class EvaluatingProgress:
    """Evaluates after each step outside of loopscope, like the code of a script."""

    def __init__(self, task: TrainingTask) -> None:
        self._task = task

    def step(self, loop: Any) -> None:
        with torch.no_grad():
            mean_loss(self._task.model, next(iter(self._task.loader.batches(0))))

    evaluated = step


def refused_while_gathered() -> str:
    task, state = build("fsdp", length=1)
    manager = HookManager([at(ActingHook, HookPoint.PRE_STEP)(step_and_zero_weights)], task, state)
    try:
        epoch_loop(task, manager, progress=EvaluatingProgress(task))
    except HookError as error:
        return str(error)
    return "unnoticed"


def snapshot_costs() -> tuple[int, int, int]:
    """Return the bytes of a snapshot and of this rank's shards, and the number of collective operations."""
    from torch.distributed.tensor.debug import CommDebugMode

    task, state = build("fsdp")
    forward_backward(task, next(iter(task.loader.batches(0))), trains=True)
    with CommDebugMode() as communication:
        snapshot = StateCopy().save(state)
        state.digest()
        snapshot.restore(state)
    shard_bytes = [tensor.nbytes for tensor in local_shards(state.tensors().values())]
    copied_bytes = sum(tensor.nbytes for tensor in snapshot.tensors.values())
    return copied_bytes, sum(shard_bytes), communication.get_total_counts()


def two_dimensional_meshes() -> dict[str, list[Any]]:
    results: dict[str, list[Any]] = {"equal": []}
    for kind in ("hsdp", "fsdp x tp"):
        make, hooks = partial(build, kind, length=1), [*measuring_hooks(["gradient_noise_scale"]), misbehaving_hook()]
        results["equal"].append(trained(make, hooks, audit=True) == trained(make))
    return results | {"skips": [skips_a_step(name) for name in ("1.up.weight", "1.down.bias", "3.weight")]}


def skips_a_step(name: str) -> list[bool]:
    """Return whether this rank skips a step without and with an overflow in rank 1's shard of a gradient.

    The last value says whether the loss scale was halved once.
    """
    task, _ = build("fsdp x tp")
    task.scaler = torch.amp.GradScaler("cpu")
    skipped_steps = []
    for overflows in (False, True):
        task.optimizer.zero_grad()
        task.backward(mean_loss(task.model, next(iter(task.loader.batches(0)))))
        if overflows and torch.distributed.get_rank() == 1:
            dict(task.model.named_parameters())[name].grad.to_local()[0] = torch.inf
        task.scaler.unscale_(task.optimizer)
        skipped_steps.append(is_skipped(task))
        update(task, step_scheduler=False, skipped=skipped_steps[-1])
    return [*skipped_steps, task.scaler.get_scale() == 2**15]


def changing_variants(kinds: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of the sets of hooks that change a run, by sharding options."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    cases = [
        (kind, {"narrow": narrow, "accumulate": accumulate, "reshard_after_forward": reshards})
        for kind, narrow, accumulate, reshards in product(kinds, (False, True), (1, 2), (True, False))
    ]
    cases += [(kind, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}) for kind in kinds]
    sets_by_case = {
        f"{kind}, {options}": changing_hook_sets(partial(build, kind, **options)) for kind, options in cases
    }
    return {case: names for case, names in sets_by_case.items() if names}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(three_rank_results, tmp_path_factory.mktemp("ranks"), 3)


@pytest.mark.guarantee("ranks-agree")
def test_hooks_leave_every_rank_unchanged(ranks):
    """Under fully_shard, every rank ends with the bytes of the run without hooks."""
    assert [result["changing_hook_sets"] for result in ranks] == [[]] * 3


@pytest.mark.guarantee("ranks-agree")
def test_snapshots_copy_only_the_local_shard(ranks):
    """A snapshot takes one copy of the shard, and snapshot and digest use no collective operation."""
    for copy, shard, collectives in [result["copied"] for result in ranks]:
        assert (copy, collectives) == (shard, 0)


def test_gathered_weights_block_interventions(ranks):
    """Weights that a custom evaluation left gathered raise an error that suggests model.reshard()."""
    for result in ranks:
        assert "Weights under fully_shard are still gathered" in result["gathered"]
        assert "Call model.reshard() after such a pass" in result["gathered"]


@pytest.mark.guarantee("ranks-agree")
@pytest.mark.parametrize("mutation", CAUGHT, ids=lambda mutation: mutation.__name__)
def test_observer_changes_to_shards_are_caught(ranks, mutation):
    """The error names the hook, the point, the step and the changed part."""
    for result in ranks:
        where = "Hook 'spy' at POST_STEP of step 1"
        expected = f"{where} may only read, but changed the training state: {CAUGHT[mutation]}"
        assert expected in result[mutation.__name__]


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    return on_ranks(two_dimensional_meshes, tmp_path_factory.mktemp("ranks"), 4)


@pytest.mark.slow
@pytest.mark.guarantee("ranks-agree")
def test_hooks_leave_two_dimensional_meshes_unchanged(four_ranks):
    """Hooks leave every rank unchanged under HSDP, and under FSDP2 with tensor parallelism."""
    assert [result["equal"] for result in four_ranks] == [[True, True]] * 4


@pytest.mark.slow
@pytest.mark.guarantee("ranks-agree")
def test_all_ranks_skip_overflowing_steps(four_ranks):
    """A gradient overflow in the shard of one rank skips the step on every rank."""
    assert [result["skips"] for result in four_ranks] == [[[False, True, True]] * 3] * 4


@pytest.mark.guarantee("ranks-agree")
@pytest.mark.slow
def test_fsdp_variants_match_run_without_hooks(tmp_path):
    """Mixed precision, accumulation, resharding policies and CPU offload are covered on three ranks."""
    assert on_ranks(partial(changing_variants, ["fsdp"]), tmp_path, 3) == [{}] * 3


@pytest.mark.guarantee("ranks-agree")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hsdp", "fsdp x tp"])
def test_mesh_variants_match_run_without_hooks(tmp_path, kind):
    """HSDP and FSDP with tensor parallelism are covered with mixed precision, accumulation and CPU offload."""
    assert on_ranks(partial(changing_variants, [kind]), tmp_path, 4) == [{}] * 4
