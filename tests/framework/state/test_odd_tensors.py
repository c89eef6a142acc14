"""Models with sparse buffers of every layout, and with complex parameters."""

from pathlib import Path

import pytest
import torch
from loopscope.checkpoints.content import load_checkpoint, save_checkpoint
from loopscope.errors import StateMutationError
from loopscope.hooks import HookPoint
from loopscope.tensors import dot, joint_norm
from loopscope.training_hooks import Norms, TrainingMetrics
from torch import Tensor, nn

from tests.framework.hooks.context_call import assert_close, context
from tests.support import TOKENS, ActingHook, Case, SpyHook, at, build, differences, train
from tests.support.models import MODELS

LAYOUTS = ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"]
pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # torch says that they are a beta feature


class Graph(nn.Module):
    """A layer on a graph whose adjacency matrix is sparse."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, TOKENS)
        blocks = {"blocksize": (2, 2)} if layout in ("sparse_bsr", "sparse_bsc") else {}
        self.register_buffer("adjacency", torch.eye(4).to_sparse(layout=getattr(torch, layout), **blocks))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x @ self.adjacency.to_dense())

    @property
    def values(self) -> Tensor:
        matrix = self.adjacency
        return matrix._values() if matrix.layout is torch.sparse_coo else matrix.values()


class Waves(nn.Module):
    """A layer with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, TOKENS, dtype=torch.complex64)
        self.gain = nn.Parameter(torch.ones(TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.to(torch.complex64)).abs() * self.gain


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    for layout in LAYOUTS:
        monkeypatch.setitem(MODELS, layout, lambda layout=layout: Graph(layout))
    monkeypatch.setitem(MODELS, "waves", Waves)


def spoil(run_ctx, model_ctx) -> None:
    model_ctx.take_step(run_ctx.batch_data)
    model_ctx.compute_gradients()
    if isinstance(run_ctx.model, Graph):
        run_ctx.model.values.add_(1)
        run_ctx.model.adjacency = torch.eye(4)


@pytest.mark.longer
@pytest.mark.guarantee("every-training-mode")
@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("model", [*LAYOUTS, "waves"])
def test_hooks_and_checkpoints_preserve_odd_tensors(model: str, tmp_path: Path) -> None:
    """Models with sparse buffers or complex weights keep their bytes with hooks and in a checkpoint."""
    case = Case(model)
    look = SpyHook(lambda ctx: {"out": ctx.forward(next(iter(ctx.loader))[0]).output.sum()})
    hooks = [at(ActingHook, HookPoint.POST_STEP, needs_pre_epoch_state=False)(spoil), look, Norms(), TrainingMetrics()]
    bare, hooked = train(case, audit=False), train(case, hooks)
    assert differences(bare.final, hooked.final) == []
    save_checkpoint(tmp_path / "saved", bare.state, {}, bare.state.streams.save())
    _, state = build(case)
    load_checkpoint(tmp_path / "saved", state)
    assert differences(bare.state.digest(), state.digest()) == []


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_observer_writing_to_sparse_buffer_is_caught(layout: str) -> None:
    """The error names the buffer in each sparse layout."""
    spoiling = at(SpyHook, HookPoint.POST_STEP)(lambda ctx: ctx.model.values.add_(1) and None)
    run = train(Case(layout), [spoiling], audit=True, raises=StateMutationError)
    assert "buffers/adjacency" in str(run.error)


def test_complex_gradients_have_correct_means_and_norms() -> None:
    """The full gradient is the weighted mean of batches, and norms and products match a real view."""
    ctx = context(nn.Sequential(Waves()))
    gradients = ctx.compute_gradients()
    batches = list(ctx.loader.batches(0))
    parts = [ctx.compute_batch_gradients(batch) for batch in batches]
    weights = [len(batch[0]) / sum(len(batch[0]) for batch in batches) for batch in batches]
    mean = {name: sum(w * part[name] for w, part in zip(weights, parts, strict=True)) for name in gradients}
    assert gradients["0.layer.weight"].is_complex()
    assert_close(gradients, mean)
    flat = torch.cat([torch.view_as_real(g.to(torch.complex128)).flatten() for g in gradients.values()])
    assert torch.allclose(joint_norm(list(gradients.values())).double(), flat.norm())
    assert torch.allclose(dot(gradients, gradients).double(), flat @ flat)
