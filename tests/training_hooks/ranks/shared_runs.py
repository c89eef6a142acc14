"""A small training of a transformer by one process, or by ranks that share its rows, its layers, or both."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed
from loopscope.data import TensorLoader, fixed_order, random_order
from loopscope.engine import HookManager
from loopscope.errors import UnsuitableError
from loopscope.hooks import InterventionHook, TrainingHook
from loopscope.loops import epoch_loop
from loopscope.lowbit import Recipe, quantize_model
from loopscope.state import RandomStreams, TrainingState
from loopscope.state.digest import digest
from loopscope.tensors import local_shards, unsharded
from loopscope.training import TrainingTask
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.support import TOKENS, RecordingSink, TokenConfig, mean_loss, run_info
from tests.support.transfers import count_transfers, uncounted
from tests.training_hooks.ranks.states import MIDDLE, Middle, Results, restore, tensors

HEADS, WIDTH, ROWS, BATCH, EPOCHS = 6, 12, 48, 24, 2
RATE = 1e-2


class Attention(nn.Module):
    """Attention with as many heads as its projections have rows for, which under tensor parallelism is a part."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(WIDTH, WIDTH, bias=name != "k")  # its gradient would be noise, as softmax ignores shifts
            for name in "qkvo"
        )

    def forward(self, x: Tensor) -> Tensor:
        by_head = [
            projection(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        ]
        return self.out_proj(functional.scaled_dot_product_attention(*by_head).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.middle = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(functional.gelu(self.up(self.middle(x))))


class Transformer(nn.Module):
    """Two blocks between an embedding and a projection to logits, which may be its transpose."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.position = nn.Parameter(torch.randn(2, WIDTH))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, -1])


class Shared(TensorLoader):
    """Yields a rank's rows of each batch of all rows in any order, as a distributed sampler does."""

    def __init__(self, data: Sequence[Tensor], order: Any, part: int, parts: int) -> None:
        super().__init__(data, BATCH, order)
        self._share = part, parts

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        part, parts = self._share
        return (tuple(tensor[part::parts] for tensor in batch) for batch in super().batches(epoch, start))

    def drawn(self, seed: int) -> "Shared":
        return Shared(self._tensors, random_order(ROWS, seed), *self._share)

    shuffled = drawn


def build(kind: str, *, tied: bool = False, recipe: Recipe | None = None) -> tuple[TrainingTask, TrainingState]:
    """Build the run of a kind; ``"one process"`` has all rows of each batch."""
    torch.manual_seed(0)
    model: nn.Module = Transformer(tied=tied).double()
    if recipe:
        quantize_model(model, recipe)
    drawn = torch.randperm(TOKENS * TOKENS, generator=torch.Generator().manual_seed(5))[:ROWS]
    data = torch.cartesian_prod(torch.arange(TOKENS), torch.arange(TOKENS))[drawn]
    targets = data.sum(1) % TOKENS
    model, part, parts = KINDS[kind](model, tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    loader = Shared((data, targets), fixed_order(torch.arange(ROWS)), part, parts)

    @uncounted
    def evaluate(model: nn.Module) -> dict[str, float]:
        is_right = (model(data[part::parts]).argmax(-1) == targets[part::parts]).double()
        return {
            "train_acc": float(is_right.mean()),
            "val_acc": float(is_right.mean()) / 2,
            "val_loss": float(mean_loss(model, (data, targets))),
        }

    task = TrainingTask(
        model, optimizer, loader, mean_loss, evaluate, length=EPOCHS, snapshot_every=EPOCHS, config=TokenConfig()
    )
    return task, TrainingState(task.model, optimizer, RandomStreams(7))


def _mesh(*shape: int, names: tuple[str, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _alone(model: nn.Module, tied: bool) -> tuple[nn.Module, int, int]:
    return model, 0, 1


def _replicated(model: nn.Module, tied: bool) -> tuple[nn.Module, int, int]:
    return DistributedDataParallel(model), torch.distributed.get_rank(), torch.distributed.get_world_size()


def _fully_sharded(model: Any, tied: bool, mesh: Any = None) -> tuple[nn.Module, int, int]:
    from torch.distributed.fsdp import fully_shard

    mesh = _mesh(torch.distributed.get_world_size(), names=("data",)) if mesh is None else mesh
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.distributed.get_rank() if mesh.ndim > 1 else mesh.get_local_rank(), mesh.size()


def _tensor_parallel(model: Any, tied: bool, mesh: Any = None) -> tuple[nn.Module, int, int]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = _mesh(torch.distributed.get_world_size(), names=("model",)) if mesh is None else mesh
    plan: dict[str, Any] = {f"attention.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {"attention.out_proj": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    if not tied:  # parallelize_module would replace the shared weight by two separate ones
        ends = {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, ends)
    return model, 0, 1


def _both(model: nn.Module, tied: bool) -> tuple[nn.Module, int, int]:
    mesh = _mesh(torch.distributed.get_world_size() // 2, 2, names=("data", "model"))
    _tensor_parallel(model, tied, mesh["model"])
    return _fully_sharded(model, tied, mesh["data"])


def _hybrid(model: nn.Module, tied: bool) -> tuple[nn.Module, int, int]:
    return _fully_sharded(model, tied, _mesh(torch.distributed.get_world_size() // 2, 2, names=("copies", "data")))


KINDS: Mapping[str, Callable[[nn.Module, bool], tuple[nn.Module, int, int]]] = {
    "one process": _alone,
    "DDP": _replicated,
    "FSDP2": _fully_sharded,
    "TP": _tensor_parallel,
    "FSDP2 x TP": _both,
    "HSDP": _hybrid,
}


def trained(
    kind: str,
    hooks: Sequence[TrainingHook],
    *,
    tied: bool,
    recipe: Recipe | None,
    audit: bool = False,
    keeps: bool = False,
    middle: Results | None = None,
) -> Results:
    """Train with hooks from the start, or from the ``middle`` of another run.

    Returns their metrics, the weights, the digests of this rank's shards of the weights, the records of
    :class:`Middle`, and, where they are counted, the largest number of transfers to the host per call by observer.
    """
    task, state = build(kind, tied=tied, recipe=recipe)
    reference = {name: value.detach() * 1.1 for name, value in task.model.named_parameters()}
    sink = RecordingSink()
    counted = hooks if audit or kind == "DDP" else ()  # too slow for other kinds
    transfers = {hook.name: count_transfers(hook) for hook in counted if not isinstance(hook, InterventionHook)}
    manager = HookManager(hooks, task, state, sinks=[sink], audit=audit, reference_weights=reference)
    if middle is not None:
        restore(middle, manager, [hook.name for hook in hooks])
    manager.start(replace(run_info(task, manager, "epoch"), reference_weights=reference))
    halfway = Middle(manager, keeps=keeps)
    epoch_loop(task, manager, pauses=halfway)
    manager.end("completed")
    named = dict(task.model.named_parameters())
    return {
        "metrics": {(name, point.name, step): value for name, point, step, value in sink.rows()},
        "weights": {name: unsharded(value.detach()) for name, value in named.items()},
        "bytes": [digest(value) for value in local_shards(named.values())],
        "remembered": halfway.remembered,
        "middle": halfway.content,
        "transfers": {name: max(counts) for name, counts in transfers.items()},
    }


def resumed(kind: str, makers: Mapping[str, Callable[[], TrainingHook]], middle: Results, **model: Any) -> Results:
    """Resume from the middle with the hooks that remembered tensors, and return their metrics."""
    remembering = [name for name in makers if any(tensors(middle["hooks"][name]))]
    hooks = [makers[name]() for name in remembering]
    return trained(kind, hooks, middle=middle, **model)["metrics"] if hooks else {}


def after_the_middle(metrics: Mapping[Any, Any]) -> Results:
    return {key: value for key, value in metrics.items() if key[2] > MIDDLE}


def refusal(kind: str, hook: TrainingHook, *, tied: bool, recipe: Recipe | None) -> str:
    """Return the message with which a hook refuses the run of a kind before its first step, or an empty string."""
    task, state = build(kind, tied=tied, recipe=recipe)
    run = run_info(task, HookManager([hook], task, state), "epoch")
    try:
        hook.start(replace(run, reference_weights=dict(task.model.named_parameters())))
    except UnsuitableError as error:
        return str(error)
    return ""
