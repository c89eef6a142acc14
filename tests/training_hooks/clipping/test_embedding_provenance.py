"""Provenance equals the gradients of an untied twin exactly, and does not change the run."""

from typing import Any

import pytest
import torch
from loopscope.engine import HookManager
from loopscope.errors import UnsuitableError, UsageError
from loopscope.experiments.tied_lm.model import Decoder, DecoderShape
from loopscope.hooks import HookPoint, TapOwner
from loopscope.taps import TapSet
from loopscope.training_hooks.clipping import EmbeddingProvenance
from loopscope.training_hooks.clipping.tied_embeddings import EmbeddingPair, TiedGradients, all_sums
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support import Case, SpyHook, assert_same_bytes, at, build, run_info, train

VOCABULARY = 19
SHAPE = {"vocabulary": VOCABULARY, "context": 6, "width": 8, "layers": 2, "heads": 2, "hidden": 16}


def decoder(*, tied: bool = True) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(DecoderShape(**SHAPE, weight_tying=tied))
    with torch.no_grad():
        if not tied:
            model.head.weight.copy_(model.embedding.weight)
    return model.double()


def tokens(rows: int = 4) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(VOCABULARY, (rows, 7), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], drawn[:, 1:]


def backward(model: nn.Module, rows: slice = slice(None)) -> None:
    inputs, targets = (part[rows] for part in tokens())
    share = len(inputs) / len(tokens()[0])
    (language_model_loss_in_double(model(inputs), targets) * share).backward()


def language_model_loss_in_double(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Watch:
    """Follows the tied gradients of a model outside a run."""

    def __init__(self, model: nn.Module) -> None:
        self.pair = EmbeddingPair.of(model, "provenance", None, None)
        self.gradients = TiedGradients(all_sums)
        self.parts: dict[str, list[Tensor]] = {"in": [], "out": []}
        owner = TapOwner("watch", lambda: True, lambda target, function: function(), may_replace=False)
        hook = EmbeddingProvenance()
        hook._pair, hook._gradients = self.pair, self.gradients
        self.taps = TapSet(model)
        self.taps.attach(owner, hook.taps(model))


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_path_gradients_match_an_untied_twin(micro_batches: int) -> None:
    """Sums match for every number of micro-batches, and exactly with one."""
    model, twin = decoder(), decoder(tied=False)
    watch = Watch(model)
    for first in range(0, 4, 4 // micro_batches):
        for each in (model, twin):
            backward(each, slice(first, first + 4 // micro_batches))
    sums = watch.gradients.measure(model.embedding.weight.grad, 1.0)
    expected = all_sums(twin.embedding.weight.grad, twin.head.weight.grad)
    if micro_batches == 1:
        assert torch.equal(sums, expected)
        assert torch.equal(watch.gradients.output, twin.head.weight.grad)
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("passes", [1, 3])
def test_the_sum_is_bitwise_the_ordinary_gradient(passes: int) -> None:
    plain, watched = decoder(), decoder()
    Watch(watched)
    for model in (plain, watched):
        for _ in range(passes):
            backward(model)
    for expected, found in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(reentrant: bool) -> None:
    model, twin = decoder(), decoder(tied=False)
    watch = Watch(model)
    for each in (model, twin):
        for block in each.blocks:
            original = block.forward
            block.forward = lambda *args, f=original: checkpoint(f, *args, use_reentrant=reentrant)
        backward(each)
    sums = watch.gradients.measure(model.embedding.weight.grad, 1.0)
    torch.testing.assert_close(sums, all_sums(twin.embedding.weight.grad, twin.head.weight.grad))


@pytest.mark.some_rows(2)
@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_metrics_are_consistent_at_every_step(loop: str) -> None:
    """The ratio equals that of the norms, the cosine is in range, and the run keeps its bytes."""
    run = train(Case("tied", loop=loop), [EmbeddingProvenance()])
    assert_same_bytes(run, Case("tied", loop=loop))
    rows = {(name, step): value for name, _, step, value in run.sink.rows("embedding_provenance/")}
    assert {step for _, step in rows} == {1, 2, 3}
    for step in (1, 2, 3):
        ratio = rows["embedding_provenance/output_to_embedding_ratio", step]
        norms = [rows[f"embedding_provenance/{path}_grad_l2_norm", step] for path in ("output_proj", "embedding")]
        assert ratio == pytest.approx(norms[0] / norms[1], rel=1e-6)
        assert -1 <= rows["embedding_provenance/cosine", step] <= 1


def test_untied_model_has_no_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both norms are those of the gradients of the two matrices."""
    seen: list[dict[str, Any]] = []

    def look(ctx: Any) -> None:
        weights = [ctx.model.embedding.weight.grad, ctx.model.decoder.weight.grad]
        seen.append({"norms": [float(weight.norm()) for weight in weights]})

    run = train(Case("transformer"), [EmbeddingProvenance(), at(SpyHook, HookPoint.POST_BACKWARD)(look)], steps=1)
    values = {name.rpartition("/")[2]: value for name, _, step, value in run.sink.rows("embedding_prov") if step == 1}
    assert "cosine" not in values
    found = [values["embedding_grad_l2_norm"], values["output_proj_grad_l2_norm"]]
    assert found == pytest.approx(seen[0]["norms"], rel=1e-6)


def start(model: str, hook: EmbeddingProvenance) -> None:
    case = Case(model)
    task, state = build(case)
    hook.start(run_info(task, HookManager([hook], task, state), case.loop))


def test_a_model_without_such_a_pair_is_refused() -> None:
    with pytest.raises(UnsuitableError, match=r"embedding and its output projection; the model has none\. Name them"):
        start("batchnorm_mlp", EmbeddingProvenance())


def test_names_that_are_no_modules_are_refused() -> None:
    with pytest.raises(UsageError, match="projection is 'mixx'; the model has no module of that name with a weight"):
        start("tied", EmbeddingProvenance(embedding="embedding", projection="mixx"))


@pytest.mark.longer
def test_untied_matrices_are_measured_sparsely_by_default() -> None:
    """With interval=1 they are measured at every step."""
    counts = []
    for options in ({}, {"interval": 1}):
        run = train(Case("transformer"), [EmbeddingProvenance(**options)], steps=6)
        counts.append(len(run.sink.rows("embedding_provenance/output_to_embedding_ratio")))
    assert counts == [1, 6]


def test_shared_hook_adapts_schedule_to_each_model() -> None:
    """One hook instance is started on an untied and then on a tied model."""
    hook, due = EmbeddingProvenance(), []
    for model in ("transformer", "tied"):
        start(model, hook)
        due.append(hook.step_schedule.is_due(2))
    assert due == [False, True]


def test_an_interval_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="interval is 0; it must be at least 1"):
        EmbeddingProvenance(interval=0)
