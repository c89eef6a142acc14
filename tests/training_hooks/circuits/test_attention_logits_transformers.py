"""The attention_logits hook on Hugging Face models, compared with their attention written out in float64."""

from functools import cache
from pathlib import Path

import loopscope
import pytest
import torch
from loopscope.training_hooks import AttentionLogits
from torch import Tensor, nn

from tests.training_hooks.circuits.hf_attention import CAP, HEADS, IMPLEMENTATIONS, Layer, batch_for, made, written_rows
from tests.training_hooks.circuits.test_attention_logits import measured

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
rows_of = cache(written_rows)


def assert_layers(metrics: dict[str, float], expected: dict[str, Layer], rel: float = 1e-5) -> None:
    for name, layer in expected.items():
        for head, logit in enumerate(layer.logits.tolist()):
            assert metrics[f"max_logit/{name}.{head}"] == pytest.approx(logit, rel=rel)
        assert metrics[f"entropy/{name}"] == pytest.approx(layer.entropies.mean().item(), rel=rel)
    largest = max(layer.logits.max().item() for layer in expected.values())
    assert metrics["largest_logit"] == pytest.approx(largest, rel=rel)


@pytest.mark.parametrize(("kind", "way"), IMPLEMENTATIONS)
def test_metrics_match_written_attention(kind, way):
    """Shared and compressed keys, soft caps, sinks, windows, padding, and scores with a subtracted maximum."""
    metrics = measured(made(kind, way), [batch_for(kind)], top=2 * HEADS)
    expected = rows_of(kind)
    assert len(expected) == 2
    assert_layers(metrics, expected)
    products = max(layer.products.max().item() for layer in expected.values())
    if kind == "gemma2":
        assert metrics["largest_uncapped_logit"] == pytest.approx(products, rel=1e-5)
        assert metrics["largest_logit"] < CAP < products
    else:
        assert "largest_uncapped_logit" not in metrics


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_sums_over_micro_batches_are_of_all_rows(kind):
    batch = batch_for(kind)
    parts = [{key: value[rows] for key, value in batch.items()} for rows in (slice(0, 2), slice(2, 6))]
    assert_layers(measured(made(kind), parts, top=2 * HEADS), rows_of(kind))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["llama", "deepseek"])
def test_gradient_checkpointing_changes_no_number(kind, reentrant):
    model = made(kind, "sdpa").train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_layers(measured(model, [batch_for(kind)], top=2 * HEADS), rows_of(kind))


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "deepseek"])
def test_low_precision_is_close(kind):
    """In bf16 the numbers are those of rounded queries and keys."""
    metrics = measured(made(kind, dtype=torch.bfloat16), [batch_for(kind, torch.bfloat16)], top=2 * HEADS)
    largest = max(layer.logits.max().item() for layer in rows_of(kind).values())
    assert metrics["largest_logit"] == pytest.approx(largest, rel=0.05)


def weights_after(model: nn.Module, kind: str, folder: Path | None) -> list[Tensor]:
    """Train three steps, attached or not, and return all weights and the next random number."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scope = None
    if folder is not None:
        hook = AttentionLogits(interval=2)
        scope = loopscope.attach(model, optimizer, hooks=[hook], out=folder, display="none")
    torch.manual_seed(4)
    for batch in (scope.batches if scope else iter)([batch_for(kind)] * 3):
        loss = model(**batch).loss
        (scope.backward if scope else torch.Tensor.backward)(loss)
        optimizer.step()
        optimizer.zero_grad()
    if scope:
        assert "attention_logits/largest_logit" in scope.last_metrics()
        scope.close()
    return [*(parameter.detach().clone() for parameter in model.parameters()), torch.rand(3)]


@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.some_rows(6)
@pytest.mark.parametrize(("kind", "way"), IMPLEMENTATIONS)
def test_measured_training_has_equal_bits(kind, way, tmp_path):
    """Weights and random numbers after three steps with dropout equal those without the hook."""
    options = {"attention_dropout": 0.2} if kind != "gpt2" else {"attn_pdrop": 0.2}
    runs = [weights_after(made(kind, way, **options).train(), kind, folder) for folder in (None, tmp_path / "run")]
    assert all(map(torch.equal, *runs))
