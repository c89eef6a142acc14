"""Measured subjects: models in separate runs, a bare loop, and hooks that do nothing."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from loopscope.data import TensorLoader, fixed_order
from loopscope.engine import HookManager
from loopscope.experiments.mod_arithmetic import ModArithmeticRunner
from loopscope.experiments.mod_arithmetic.runner import ModArithmeticConfig
from loopscope.hooks import (
    HookPoint,
    InterventionHook,
    MetricInfo,
    Metrics,
    ModelDataContext,
    RunDataContext,
    TrainingHook,
)
from loopscope.loops import NoProgress, epoch_loop
from loopscope.runs import build_run
from loopscope.state import LoopState, RandomStreams, TrainingState, seed_everything
from loopscope.training import TrainingTask
from loopscope.training_hooks.progress import TrainingMetrics
from torch import Tensor, nn
from torch.nn import functional


@dataclass
class Subject:
    """A run to measure: its task, its state, its training data as plain tensors in the order of the run."""

    task: TrainingTask
    state: TrainingState
    inputs: Tensor
    targets: Tensor
    batch_size: int

    @classmethod
    def of(cls, task: TrainingTask, state: TrainingState, batch_size: int) -> "Subject":
        """Use a built run, without its evaluations and snapshots."""
        inputs, targets = map(torch.cat, zip(*task.loader.batches(0), strict=True))
        return cls(replace(task, eval_every=0, snapshot_every=0), state, inputs, targets, batch_size)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the training state."""
        return list(self.state.tensors().values())

    def manager(self, hooks: Iterable[TrainingHook] = ()) -> HookManager:
        """Return a manager of hooks on this run."""
        return HookManager(hooks, self.task, self.state)

    def train(self, steps: int, after_step: Callable[[], Any], hooks: Iterable[TrainingHook] = ()) -> None:
        """Train full epochs of at least ``steps`` steps in the real loop.

        ``after_step`` is called after every step, while batch, loss and gradients are there.
        """
        self.task.length = self.state.loop.epoch + -(-steps // len(self.task.loader))
        epoch_loop(self.task, self.manager(hooks), progress=AfterStep(after_step))


class AfterStep(NoProgress):
    """Calls a function after every step."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def step(self, loop: LoopState) -> None:
        self._function()


def mod_arithmetic(options: Mapping[str, Any]) -> Subject:
    """Build a run of the experiment as ``loopscope run`` does."""
    config = ModArithmeticConfig(**options)
    task, state = build_run(ModArithmeticRunner(config), "stride")
    return Subject.of(task, state, config.batch_size)


def small_mlp() -> Subject:
    """Build a run whose step takes 0.2 to 0.4 ms, so that 10 µs are visible."""
    seed_everything(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, fused=True)
    rows = 100 * 32
    data = torch.randn(rows, 32), torch.randint(10, (rows,))
    loader = TensorLoader(data, 32, fixed_order(torch.arange(rows)))
    task = TrainingTask(
        model, optimizer, loader, lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1])
    )
    return Subject.of(task, TrainingState(model, optimizer, RandomStreams(1)), 32)


def deep_mlp(layers: int) -> Subject:
    """Build a run of many small layers under AdamW: its state has many tensors, but few numbers."""
    seed_everything(1)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = torch.randn(320, 8), torch.randint(8, (320,))
    loader = TensorLoader(data, 32, fixed_order(torch.arange(320)))
    task = TrainingTask(
        model, optimizer, loader, lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1])
    )
    return Subject.of(task, TrainingState(model, optimizer, RandomStreams(1)), 32)


class Block(nn.Module):
    """A layer of a decoder: causal attention and a feed-forward part, each normalised before and added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        projected = self.qkv(self.attention_norm(hidden)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class Decoder(nn.Module):
    """A language model: embeddings of tokens and positions, blocks, an untied projection; returns logits.

    Input: tokens, shape (rows, length). Output: shape (rows, vocabulary, length), as cross entropy expects them.
    """

    def __init__(self, *, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden)).transpose(1, 2)


def language_model(
    *,
    vocabulary: int = 4096,
    width: int = 256,
    layers: int = 10,
    length: int = 64,
    batch_size: int = 5,
    steps: int = 20,
) -> Subject:
    """Build a run of a decoder of 10M parameters under AdamW, whose step takes 0.1 to 0.3 s; an epoch is ``steps``."""
    seed_everything(1)
    model = Decoder(vocabulary=vocabulary, width=width, layers=layers, heads=max(1, width // 64), length=length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    rows = steps * batch_size
    data = torch.randint(vocabulary, (rows, length)), torch.randint(vocabulary, (rows, length))
    loader = TensorLoader(data, batch_size, fixed_order(torch.arange(rows)))
    task = TrainingTask(
        model, optimizer, loader, lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1])
    )
    return Subject.of(task, TrainingState(model, optimizer, RandomStreams(1)), batch_size)


class Experts(nn.Module):
    """A mixture of experts: every token passes the two experts with the largest router logits."""

    def __init__(self, width: int, experts: int, top_k: int = 2) -> None:
        super().__init__()
        self.gate, self.top_k = nn.Linear(width, experts, bias=False), top_k
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        weights, chosen = self.gate(hidden).softmax(-1).topk(self.top_k)
        shares = torch.zeros_like(hidden[..., : len(self.experts)]).scatter(-1, chosen, weights)
        return hidden + sum(shares[..., place, None] * expert(hidden) for place, expert in enumerate(self.experts))


def mixture_of_experts(*, width: int = 64, layers: int = 2, experts: int = 8, steps: int = 60) -> Subject:
    """Build a run of a mixture of experts, which predicts each token from the one before; an epoch is ``steps``."""
    seed_everything(1)
    vocabulary, length, batch_size = 256, 32, 8
    layer_list = [Experts(width, experts) for _ in range(layers)]
    model = nn.Sequential(nn.Embedding(vocabulary, width), *layer_list, nn.Linear(width, vocabulary))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(vocabulary, (steps * batch_size, length + 1))
    data = tokens[:, :-1], tokens[:, 1:]
    loader = TensorLoader(data, batch_size, fixed_order(torch.arange(len(tokens))))
    task = TrainingTask(
        model,
        optimizer,
        loader,
        lambda model, batch: functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
    )
    return Subject.of(task, TrainingState(model, optimizer, RandomStreams(1)), batch_size)


def sweep(tensors: Sequence[Tensor]) -> None:
    """Read the version and the data pointer of every tensor, in plain Python."""
    [tensor._version for tensor in tensors]
    [tensor.data_ptr() for tensor in tensors]


def bare_steps(
    subject: Subject, max_norm: float | None = None, sweeps: Callable[[], Any] = lambda: None
) -> Iterator[None]:
    """Train without end in a loop as one would write it, stopping after every step.

    ``max_norm`` clips the gradients with ``torch.nn.utils.clip_grad_norm_``; ``sweeps`` is called where hooks fire:
    after clipping, if there is any, else after the update.
    """
    model, optimizer = subject.task.model, subject.task.optimizer
    order = torch.arange(len(subject.inputs))
    while True:
        running_loss: Tensor | None = None
        for index in order.split(subject.batch_size):
            inputs, targets = subject.inputs[index], subject.targets[index]
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            detached = loss.detach()
            running_loss = detached.clone() if running_loss is None else running_loss.add_(detached)
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                sweeps()
            optimizer.step()
            if max_norm is None:
                sweeps()
            yield


class Constant(TrainingHook):
    """An observer that returns a float after every step."""

    name = "constant"
    hook_points = frozenset({HookPoint.POST_STEP})
    context: RunDataContext

    def __init__(self, number: int = 0) -> None:
        self.name = f"constant_{number}"

    def compute(self, ctx: RunDataContext) -> Metrics:
        self.context = ctx
        return {"value": 1.0}

    def describe_metrics(self) -> Sequence[MetricInfo]:
        return [MetricInfo("value", "1", "{1}", "Always one.")]


class Reader(InterventionHook):
    """An intervention after every step that declares ``mutates = False`` and does nothing."""

    name = "reader"
    hook_points = frozenset({HookPoint.POST_STEP})
    mutates = False

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        return {"value": 1.0}

    def describe_metrics(self) -> Sequence[MetricInfo]:
        return [MetricInfo("value", "1", "{1}", "Always one.")]


class Mutator(Reader):
    """The same, but permitted to change the training state."""

    name = "mutator"
    mutates = True


def observers(count: int) -> list[TrainingHook]:
    """Return observers that do nothing."""
    return [Constant(number) for number in range(count)]


def shipped_observers(count: int) -> list[TrainingHook]:
    """Return observers that come with loopscope and report only the learning rate, before every step."""
    hooks = [TrainingMetrics() for _ in range(count)]
    for number, hook in enumerate(hooks):
        hook.name = f"training_metrics_{number}"
        # Before the step there is no loss: the metrics are one number, as those of the other observers.
        hook.loop_points, hook.reports_evaluations = {"epoch": {HookPoint.PRE_STEP}}, False  # type: ignore[misc]
    return [*hooks]
