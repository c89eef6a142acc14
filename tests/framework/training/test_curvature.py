"""Hessian-vector products: agreement with dense Hessians, convergence, restored state, and refused arguments."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from loopscope.data import TensorLoader, fixed_order, rows
from loopscope.engine import CommitRecord
from loopscope.engine.model_context import Access, ModelContext
from loopscope.errors import LoopscopeError, UsageError
from loopscope.hooks import ModelDataContext, ReadOnlyError
from loopscope.state import RandomStreams, TrainingState
from loopscope.tensors import cosine, dot, minus, norm, trainable
from loopscope.training import TrainingTask
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

ROWS, CLASSES = 7, 3


class Attention(nn.Module):
    """One attention layer through the fused operator, whose default kernel has no second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv, self.head = nn.Embedding(4, 4), nn.Linear(4, 12), nn.Linear(4, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embedding(tokens)).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(mixed.mean(dim=1))


class Tied(nn.Module):
    """Token model whose output projection is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(CLASSES, 4), nn.Linear(4, 4)
        self.decoder = nn.Linear(4, CLASSES, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.mix(self.embedding(tokens).mean(dim=1))))


class Sparing(nn.Module):
    """Model with a frozen layer and one that its output does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head, self.unused = nn.Linear(3, 4), nn.Linear(4, CLASSES), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.frozen(inputs)))


@dataclass(frozen=True)
class Kind:
    """A model to differentiate twice, with the kind of its inputs."""

    make: Callable[[], nn.Module]
    tokens: bool = False
    accumulation_steps: int = 1


def mlp(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), *middle, nn.Linear(4, CLASSES))


KINDS = {
    "mlp": Kind(lambda: mlp(nn.Tanh())),
    "affine layer norm": Kind(lambda: mlp(nn.LayerNorm(4), nn.GELU())),
    "attention": Kind(Attention, tokens=True),
    "tied weights": Kind(Tied, tokens=True),
    "dropout": Kind(lambda: mlp(nn.Tanh(), nn.Dropout(0.5))),
    "batch norm": Kind(lambda: mlp(nn.BatchNorm1d(4), nn.Tanh())),
    "frozen and unused parameters": Kind(Sparing),
    "uneven micro-batches": Kind(lambda: mlp(nn.Tanh()), accumulation_steps=3),
}


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def data(kind: Kind, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    inputs = torch.randint(3, (ROWS, 2)) if kind.tokens else torch.randn(ROWS, 3, dtype=dtype)
    return inputs, torch.randint(CLASSES, (ROWS,))


def probe(name: str, dtype: torch.dtype = torch.float64, *, mutates: bool = True) -> ModelDataContext:
    """Return the model context of a call within a step, on a model of KINDS."""
    kind = KINDS[name]
    torch.manual_seed(4)
    model, batch = kind.make().to(dtype), data(kind, dtype)
    task = TrainingTask(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        TensorLoader(batch, 3, fixed_order(torch.arange(ROWS))),
        mean_loss,
        accumulation_steps=kind.accumulation_steps,
    )
    state = TrainingState(model, task.optimizer, RandomStreams(7))
    state.loop.batch = batch
    record = CommitRecord("probe", frozenset())
    access = Access(
        task,
        state,
        record,
        list(model.parameters()),
        mutates=mutates,
        device=None,
        stream=("probe", "PRE_STEP", 1),
        loop="epoch",
    )
    return ModelContext(access)


def dense_hessian(ctx: ModelDataContext) -> Tensor:
    """Return the Hessian of the loss on the current batch by autograd, in the order of the trainable parameters."""
    parameters, batch = trainable(ctx.model), ctx._state.loop.batch
    generator, sizes = torch.get_rng_state(), [value.numel() for value in parameters.values()]

    def loss(flat: Tensor) -> Tensor:
        torch.set_rng_state(generator)
        shaped = zip(parameters.items(), flat.split(sizes), strict=True)
        values = {name: part.reshape(value.shape) for (name, value), part in shaped}
        return functional.cross_entropy(functional_call(ctx.model, values, (batch[0],)), batch[1])

    with sdpa_kernel(SDPBackend.MATH):
        hessian = torch.autograd.functional.hessian(loss, flat(parameters))
    torch.set_rng_state(generator)
    return hessian


def flat(vector) -> Tensor:
    return torch.cat([value.detach().reshape(-1) for value in vector.values()])


def direction(ctx: ModelDataContext, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(value.shape, generator=generator) for name, value in trainable(ctx.model).items()}
    return {name: value.to(ctx.model.state_dict()[name]) for name, value in drawn.items()}


@pytest.mark.parametrize("name", KINDS)
def test_exact_product_matches_dense_hessian(name):
    ctx = probe(name)
    vector = direction(ctx)
    expected = dense_hessian(ctx) @ flat(vector)
    assert expected.norm() > 0.01
    torch.testing.assert_close(flat(ctx.hessian_vector_product(vector)), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("method", ["exact", "finite_difference"])
@pytest.mark.parametrize("name", KINDS)
def test_operator_matches_single_products(name, method):
    """Repeated products of one operator equal separate calls for both methods."""
    ctx = probe(name)
    times = ctx.hessian_operator(method=method)
    torch.rand(3)
    for seed in (1, 2, 1):
        found = times(direction(ctx, seed))
        torch.manual_seed(4)
        fresh = probe(name)
        expected = fresh.hessian_vector_product(direction(fresh, seed), method=method)
        if method == "exact" or name != "dropout":
            torch.testing.assert_close(flat(found), flat(expected), rtol=1e-10, atol=1e-12)
        assert found.keys() == expected.keys()


def test_operator_leaves_state_and_counts_passes():
    """The state is unchanged, with one first pass and one second pass per product."""
    for name in KINDS:
        ctx = probe(name, torch.float32)
        before = ctx._state.digest()
        times = ctx.hessian_operator()
        [times(direction(ctx, seed)) for seed in (1, 2, 3)]
        count = rows(ctx._state.loop.batch)
        assert ctx._state.digest() == before
        assert ctx._open.profiler.samples == {"": {"forward_backward": count, "second_backward": 3 * count}}


def test_operator_refuses_changed_parameters():
    """The operator fails after a perturbation, and wrong names or methods raise a UsageError."""
    ctx = probe("mlp")
    times = ctx.hessian_operator()
    ctx.apply_perturbation(direction(ctx), 0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        times(direction(ctx))
    with pytest.raises(UsageError, match=r"Unknown parameter '0\.wait'"):
        times({"0.wait": torch.ones(2)})
    with pytest.raises(UsageError, match=r"Unknown method 'exakt'"):
        ctx.hessian_operator(method="exakt")
    with pytest.raises(ReadOnlyError, match="finite_difference"):
        probe("mlp", mutates=False).hessian_operator(method="finite_difference")


@pytest.mark.parametrize("name", KINDS)
def test_products_are_symmetric(name):
    ctx = probe(name)
    u, v = direction(ctx, 1), direction(ctx, 2)
    product = dot(u, ctx.hessian_vector_product(v))
    assert product.item() == pytest.approx(dot(v, ctx.hessian_vector_product(u)).item(), rel=1e-9)


@pytest.mark.parametrize("name", KINDS)
def test_finite_differences_converge_at_second_order(name):
    """Halving the step divides the error by four."""
    ctx = probe(name)
    vector = direction(ctx)
    exact = ctx.hessian_vector_product(vector)

    def error(epsilon: float) -> float:
        found = ctx.hessian_vector_product(vector, method="finite_difference", epsilon=epsilon)
        return (norm(minus(found, exact)) / norm(exact)).item()

    errors = [error(epsilon) for epsilon in (2e-2, 1e-2, 5e-3)]
    assert errors[-1] < 1e-3
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("name", KINDS)
def test_float32_finite_differences_are_accurate(name):
    """The default step has an error below one percent in float32."""
    ctx = probe(name, torch.float32)
    vector = direction(ctx)
    exact = ctx.hessian_vector_product(vector)
    found = ctx.hessian_vector_product(vector, method="finite_difference")
    assert norm(minus(found, exact)) < 0.01 * norm(exact)
    assert cosine(found, exact) > 0.9999


@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("method", ["exact", "finite_difference"])
def test_products_leave_training_state_unchanged(method):
    """Hessian-vector products change no byte of the training state."""
    for name in KINDS:
        ctx = probe(name, torch.float32)
        before = ctx._state.digest()
        ctx.hessian_vector_product(direction(ctx), method=method)
        assert ctx._state.digest() == before


@pytest.mark.parametrize("method", ["exact", "finite_difference"])
def test_product_over_loader_covers_all_rows(method):
    """Uneven batches give the product over the whole data set."""
    ctx = probe("mlp")
    vector = direction(ctx)
    of_batch = ctx.hessian_vector_product(vector, method=method)
    by_batches = ctx.hessian_vector_product(vector, loader=ctx.loader, method=method)
    torch.testing.assert_close(flat(by_batches), flat(of_batch), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["exact", "finite_difference"])
def test_missing_names_count_as_zeros(method):
    """Missing names in the vector are zeros, and frozen parameters are excluded."""
    ctx = probe("frozen and unused parameters")
    full = direction(ctx) | {"head.bias": torch.zeros(CLASSES, dtype=torch.float64)}
    partial = {name: value for name, value in full.items() if name != "head.bias"}
    partial |= {name: torch.ones_like(value) for name, value in ctx.model.named_parameters() if "frozen" in name}
    found = ctx.hessian_vector_product(partial, method=method)
    expected = ctx.hessian_vector_product(full, method=method)
    assert found.keys() == expected.keys() == trainable(ctx.model).keys()
    torch.testing.assert_close(flat(found), flat(expected), rtol=1e-9, atol=1e-12)
    assert found["unused.weight"].count_nonzero() == 0


@pytest.mark.parametrize("method", ["exact", "finite_difference"])
def test_flat_loss_and_zero_vector_give_zeros(method):
    ctx = probe("mlp")
    zero = {name: torch.zeros_like(value) for name, value in direction(ctx).items()}
    assert flat(ctx.hessian_vector_product(zero, method=method)).count_nonzero() == 0
    ctx._task.compute_loss = lambda model, batch: model[2].bias.sum()
    found = flat(ctx.hessian_vector_product(direction(ctx), method=method))
    torch.testing.assert_close(found, torch.zeros_like(found))


def test_failing_gradient_leaves_parameters_unchanged():
    """An error in the second gradient of the finite difference restores the parameters."""
    ctx = probe("mlp")
    before, loss = ctx._state.digest(), ctx._task.compute_loss
    calls: list[int] = []

    def failing(model: nn.Module, batch: object) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("no second side")
        return loss(model, batch)

    ctx._task.compute_loss = failing
    with pytest.raises(ValueError, match="no second side"):
        ctx.hessian_vector_product(direction(ctx), method="finite_difference")
    assert ctx._state.digest() == before


def test_readonly_hook_gets_exact_products_only():
    """Finite differences change parameters, so a read-only hook receives a ReadOnlyError."""
    ctx = probe("mlp", mutates=False)
    assert norm(ctx.hessian_vector_product(direction(ctx))) > 0
    with pytest.raises(ReadOnlyError, match="finite_difference"):
        ctx.hessian_vector_product(direction(ctx), method="finite_difference")


def test_invalid_arguments_are_refused():
    ctx = probe("mlp")
    vector = direction(ctx)
    with pytest.raises(UsageError, match=r"Unknown method 'exakt'\. Did you mean 'exact'"):
        ctx.hessian_vector_product(vector, method="exakt")
    with pytest.raises(UsageError, match=r"Unknown parameter '0\.wait'"):
        ctx.hessian_vector_product({"0.wait": vector["0.weight"]})
    with pytest.raises(LoopscopeError, match=r"epsilon is 0.0; .* must be positive"):
        ctx.hessian_vector_product(vector, method="finite_difference", epsilon=0.0)
    with pytest.raises(LoopscopeError, match="a batch or a loader, not both"):
        ctx.hessian_vector_product(vector, ctx._state.loop.batch, loader=ctx.loader)
