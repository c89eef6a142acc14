"""Hooks under FSDP2: every rank ends with the bytes that it has without hooks, whatever is sharded over what mesh."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle, product
from typing import Any

import pytest
import torch
import torch.distributed
from loopscope import training_hooks
from loopscope.data import TensorLoader, fixed_order
from loopscope.errors import HookError, StateMutationError
from loopscope.firing import HookManager
from loopscope.hooks import GradientTap, HookPoint, HookRegistry
from loopscope.isolation import Snapshot
from loopscope.loops import epoch_loop, step_loop
from loopscope.state import RandomStreams, TrainingState, local_shards, without_on_demand
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
    """What a transformer's block is to FSDP2: a module of its own, with what draws and what counts."""

    def __init__(self, *, narrow: bool) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 12), nn.Linear(12, 8), nn.Dropout(0.2)
        # batch norm takes no bfloat16 beside the wide buffers that FSDP2 leaves alone
        self.norm = nn.LayerNorm(8) if narrow else nn.BatchNorm1d(8)

    def forward(self, x):
        return x + self.norm(self.drop(self.down(torch.tanh(self.up(x)))))


def build(
    kind: str, *, device: str = "cpu", length: int = 2, narrow: bool = False, accumulate: int = 1, **options: Any
) -> tuple[TrainingTask, TrainingState]:
    """Build a run on a mesh of this ``kind`` in which every data-parallel rank has its rows of each batch."""
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
    mine = torch.arange(ROWS).view(-1, BATCH // ranks)[rank::ranks].flatten()
    data = (torch.randn(ROWS, 5, dtype=torch.float64)[mine].to(device), torch.randint(3, (ROWS,))[mine].to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    task = TrainingTask(
        model,
        optimizer,
        TensorLoader(data, BATCH // ranks, fixed_order(torch.arange(len(mine)))),
        mean_loss,
        evaluate=lambda model: {"val_loss": float(mean_loss(model, data))},
        length=length,
        snapshot_every=1,
        accumulation_steps=accumulate,
    )
    return task, TrainingState(model, optimizer, RandomStreams(7))


def meshes(kind: str, device: str) -> tuple[Any, Any, int, int]:
    """Return the mesh to shard over, that of tensor parallelism, and which part of the data this rank has."""
    from torch.distributed.device_mesh import init_device_mesh

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if kind == "fsdp":
        return init_device_mesh(device, (ranks,)), None, rank, ranks
    mesh = init_device_mesh(device, (2, ranks // 2), mesh_dim_names=("outer", "inner"))
    if kind == "hsdp":
        return mesh, None, rank, ranks
    return mesh["outer"], mesh["inner"], mesh["outer"].get_local_rank(), 2


def trained(make: Callable[[], Any], hooks: Sequence[Any] = (), loop: str = "epoch", **kinds: Any) -> dict[str, int]:
    """Return the digests of what this rank has at the end."""
    task, state = make()
    manager = HookManager(hooks, task, state, loop=loop, **kinds)
    manager.start(run_info(task, manager, loop))
    {"epoch": epoch_loop, "step": step_loop}[loop](task, manager)
    manager.end("completed")
    return without_on_demand(state.digest())


# What an intervention may do; rolled back.


def a_batch(model: Any) -> Any:
    return next(iter(model.loader.batches(0)))


def step_and_zero(run: Any, ctx: Any) -> None:
    torch.rand(3)
    ctx.compute_batch_gradients(a_batch(ctx))
    ctx.take_step(a_batch(ctx))
    with torch.no_grad():
        for parameter in ctx.model.parameters():
            parameter.to_local().zero_()


def load_the_gathered(run: Any, ctx: Any) -> None:
    ctx.model.unshard()
    ctx.model[1].unshard()
    for parameter in ctx.model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.register_hook(torch.zeros_like)
    ctx.model[1].up.bias.data = torch.zeros_like(ctx.model[1].up.bias.data)


def tell_otherwise(run: Any, ctx: Any) -> None:
    ctx.model.set_requires_gradient_sync(False)
    ctx.model.set_reshard_after_backward(False)
    ctx.model.set_gradient_divide_factor(7.0)
    ctx.model.set_is_last_backward(False)
    ctx.model(a_batch(ctx)[0])


def branch_with_all_gathered(run: Any, ctx: Any) -> None:
    ctx.model(a_batch(ctx)[0])
    with ctx.branch():
        ctx.take_step(a_batch(ctx))


def raise_amid_a_forward_pass(run: Any, ctx: Any) -> None:
    ctx.model[2].drop.register_forward_pre_hook(raising)
    ctx.model(a_batch(ctx)[0])


def raise_amid_a_backward_pass(run: Any, ctx: Any) -> None:
    ctx.model[1].register_full_backward_hook(raising)
    mean_loss(ctx.model, a_batch(ctx)).backward()


def write_to_what_a_pass_gathers(run: Any, ctx: Any) -> None:
    loss = mean_loss(ctx.model, a_batch(ctx))
    ctx.model[1].set_unshard_in_backward(False)
    ctx.model[2].down.bias = nn.Parameter(torch.ones(8, dtype=torch.float64))
    del loss


MUTATIONS = (step_and_zero, load_the_gathered, tell_otherwise, branch_with_all_gathered, write_to_what_a_pass_gathers)
RAISING = (raise_amid_a_forward_pass, raise_amid_a_backward_pass)


# What an observer must not do; caught, or put back where it raises.


def leave_gathered(ctx: Any) -> None:
    ctx.model[1].unshard()


def write_to_shards(ctx: Any) -> None:
    ctx.model[1].up.weight.to_local().zero_()


def write_behind_torch(ctx: Any) -> None:
    ctx.model[1].up.weight._local_tensor.data.zero_()


def leave_a_gradient(ctx: Any) -> None:
    ctx.model[1].unshard()
    ctx.model[1].up.weight.grad = torch.ones_like(ctx.model[1].up.weight)
    ctx.model[1].reshard()


def reduce_no_more(ctx: Any) -> None:
    ctx.model.set_requires_gradient_sync(False)


OF_FSDP2 = "gathered parameters, pending work or settings of FSDP2"
CAUGHT = {
    leave_gathered: "modules/1.up._parameters.weight",
    write_to_shards: "parameters/1.up.weight",
    write_behind_torch: "parameters/1.up.weight",
    leave_a_gradient: OF_FSDP2,
    reduce_no_more: OF_FSDP2,
}


def caught(make: Callable[[], Any], mutation: Callable[[Any], None]) -> str:
    try:
        trained(make, [at(SpyHook, HookPoint.POST_STEP)(mutation)])
    except StateMutationError as error:
        return str(error)
    return "unnoticed"


def raise_amid_an_observers_pass(ctx: Any) -> None:
    handle = ctx.model[1].up.register_forward_pre_hook(raising)
    try:
        ctx.model(ctx.batch_data[0])
    finally:
        handle.remove()


class RaisingTap(SpyHook):
    """Raises amid the run's own backward pass, while its parameters are gathered."""

    def taps(self, model: nn.Module) -> list[GradientTap]:
        return [GradientTap("1.up", "output", self.probe)]


def measuring(names: Iterable[str]) -> list[Any]:
    return [HookRegistry.get(name)(**MEASURING[name]) for name in names]


def misbehaving_hook() -> ActingHook:
    mutations = cycle(MUTATIONS)  # one at each fire, so that each meets most points
    return at(ActingHook, *POINTS)(lambda *contexts: next(mutations)(*contexts))


def differing(make: Callable[[], Any], names: Iterable[str] = MEASURING) -> list[str]:
    """Name the sets of hooks with which a run does not end with the bytes of the run without any."""
    bare = trained(make)
    acting, spying = at(ActingHook, *POINTS), at(SpyHook, HookPoint.POST_STEP)
    found = {
        "measuring": trained(make, measuring(names), audit=True),
        "misbehaving_hook": trained(make, [misbehaving_hook()], audit=True),
    }
    tap = at(RaisingTap, HookPoint.POST_EPOCH)(raising)
    for hook in (*map(acting, RAISING), spying(raise_amid_an_observers_pass), tap):
        with pytest.warns(UserWarning, match="The run continues without this hook"):
            found[(hook.probe if isinstance(hook, SpyHook) else hook.act).__name__] = trained(
                make, [hook], on_error="skip"
            )
    return [name for name, digests in found.items() if digests != bare]


def plain() -> dict[str, Any]:
    make = partial(build, "fsdp", length=1)
    found: dict[str, Any] = {mutation.__name__: caught(make, mutation) for mutation in CAUGHT}
    found |= {"differing": differing(make, QUICK), "copied": copied_and_communicated()}
    return found | {"gathered": refused_while_gathered()}


class EvaluatingBeside:
    """Evaluates after each step, as a script does that says nothing of it."""

    def __init__(self, task: TrainingTask) -> None:
        self._task = task

    def step(self, loop: Any) -> None:
        with torch.no_grad():
            mean_loss(self._task.model, next(iter(self._task.loader.batches(0))))

    evaluated = step


def refused_while_gathered() -> str:
    task, state = build("fsdp", length=1)
    manager = HookManager([at(ActingHook, HookPoint.PRE_STEP)(step_and_zero)], task, state)
    try:
        epoch_loop(task, manager, progress=EvaluatingBeside(task))
    except HookError as error:
        return str(error)
    return "unnoticed"


def copied_and_communicated() -> tuple[int, int, int]:
    """Return the bytes of a guardian's copy, those of this rank's shards, and the collectives of guardian and audit."""
    from torch.distributed.tensor.debug import CommDebugMode

    task, state = build("fsdp")
    forward_backward(task, next(iter(task.loader.batches(0))), trains=True)
    with CommDebugMode() as communicated:
        snapshot = Snapshot().save(state)
        state.digest()
        snapshot.restore(state)
    held = [tensor.nbytes for tensor in local_shards(state.tensors().values())]
    return sum(tensor.nbytes for tensor in snapshot.tensors.values()), sum(held), communicated.get_total_counts()


def over_two_dimensions() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {"equal": []}
    for kind in ("hsdp", "fsdp x tp"):
        make, hooks = partial(build, kind, length=1), [*measuring(["gradient_noise_scale"]), misbehaving_hook()]
        found["equal"].append(trained(make, hooks, audit=True) == trained(make))
    return found | {"skips": [skips_a_step(name) for name in ("1.up.weight", "1.down.bias", "3.weight")]}


def skips_a_step(name: str) -> list[bool]:
    """Tell whether this rank skips a step if the gradient of a parameter overflows in the shard of rank 1 alone."""
    task, _ = build("fsdp x tp")
    task.scaler = torch.amp.GradScaler("cpu")
    found = []
    for overflows in (False, True):
        task.optimizer.zero_grad()
        task.backward(mean_loss(task.model, next(iter(task.loader.batches(0)))))
        if overflows and torch.distributed.get_rank() == 1:
            dict(task.model.named_parameters())[name].grad.to_local()[0] = torch.inf
        task.scaler.unscale_(task.optimizer)
        found.append(is_skipped(task))
        update(task, step_scheduler=False, skipped=found[-1])
    return [*found, task.scaler.get_scale() == 2**15]


def otherwise(kinds: Sequence[str]) -> dict[str, list[str]]:
    """Name the sets of hooks that change a run, by how its model is sharded."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    cases = [
        (kind, {"narrow": narrow, "accumulate": accumulate, "reshard_after_forward": reshards})
        for kind, narrow, accumulate, reshards in product(kinds, (False, True), (1, 2), (True, False))
    ]
    cases += [(kind, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}) for kind in kinds]
    found = {f"{kind}, {options}": differing(partial(build, kind, **options)) for kind, options in cases}
    return {case: names for case, names in found.items() if names}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(plain, tmp_path_factory.mktemp("ranks"), 3)


def test_hooks_leave_every_rank_unchanged(ranks):
    """Under fully_shard, every rank ends with the bytes of the run without hooks."""
    assert [result["differing"] for result in ranks] == [[]] * 3


def test_snapshots_copy_only_the_local_shard(ranks):
    """A snapshot takes one copy of the shard, and snapshot and digest use no collective operation."""
    for copy, shard, collectives in [result["copied"] for result in ranks]:
        assert (copy, collectives) == (shard, 0)


def test_gathered_weights_block_interventions(ranks):
    """Weights that a custom evaluation left gathered raise an error that suggests model.reshard()."""
    for result in ranks:
        assert "Weights under fully_shard are still gathered" in result["gathered"]
        assert "Call model.reshard() after such a pass" in result["gathered"]


@pytest.mark.parametrize("mutation", CAUGHT, ids=lambda mutation: mutation.__name__)
def test_observer_changes_to_shards_are_caught(ranks, mutation):
    """The error names the hook, the point, the step and the changed part."""
    for result in ranks:
        told = f"Hook 'spy' at POST_STEP of step 1 may only read, but changed the training state: {CAUGHT[mutation]}"
        assert told in result[mutation.__name__]


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    return on_ranks(over_two_dimensions, tmp_path_factory.mktemp("ranks"), 4)


def test_so_they_do_over_meshes_of_two_dimensions(four_ranks):
    assert [result["equal"] for result in four_ranks] == [[True, True]] * 4


def test_all_ranks_skip_overflowing_steps(four_ranks):
    """A gradient overflow in the shard of one rank skips the step on every rank."""
    assert [result["skips"] for result in four_ranks] == [[[False, True, True]] * 3] * 4


@pytest.mark.slow
def test_fsdp_variants_match_run_without_hooks(tmp_path):
    """Mixed precision, accumulation, resharding policies and CPU offload are covered on three ranks."""
    assert on_ranks(partial(otherwise, ["fsdp"]), tmp_path, 3) == [{}] * 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hsdp", "fsdp x tp"])
def test_mesh_variants_match_run_without_hooks(tmp_path, kind):
    """HSDP and FSDP with tensor parallelism are covered with mixed precision, accumulation and CPU offload."""
    assert on_ranks(partial(otherwise, [kind]), tmp_path, 4) == [{}] * 4
