"""The qk_clip hook on Hugging Face models: every score is scaled as the rule says, and the threshold is reached."""

from functools import partial
from pathlib import Path

import loopscope
import pytest
import torch
from loopscope.errors import UnsuitableError
from loopscope.training_hooks import QKClip
from torch import nn

from tests.framework.integrations.hf_trainers import attached, trainer
from tests.training_hooks.circuits.hf_attention import IMPLEMENTATIONS, batch_for, made
from tests.training_hooks.circuits.test_qk_clip import scaled_products

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
ALONE = {"num_hidden_layers": 1, "n_layer": 1}
SCALED = {
    "gpt2": {"c_attn.weight", "c_attn.bias"},
    "llama": {"q_proj.weight", "q_proj.bias"},
    "gemma2": {"q_proj.weight"},
    "gpt_oss": {"q_proj.weight", "q_proj.bias"},
    "deepseek": {"q_b_proj.weight", "kv_b_proj.weight"},
    "deepseek_full_queries": {"q_proj.weight", "kv_b_proj.weight"},
    "gpt_neox": {"query_key_value.weight", "query_key_value.bias"},
    "vit": {"q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias"},
}
"""The parameters that are scaled, by kind of model: not those of keys that several heads share."""
EVERY = pytest.mark.parametrize(("kind", "way"), [pair for pair in IMPLEMENTATIONS if pair[0] in SCALED])


def run(kind: str, model: nn.Module) -> None:
    model(**batch_for(kind, torch.float64))


@EVERY
def test_every_score_is_multiplied_by_its_factor(kind, way):
    """Rotary positions, compressed and shared keys: all pairs of a head are multiplied by the factor of the head."""
    model = made(kind, way, torch.float64, **ALONE)
    before, expected, actual = scaled_products(model, partial(run, kind))
    torch.testing.assert_close(actual, expected)
    changed = {name for name, value in model.named_parameters() if not torch.equal(before[name], value)}
    assert {".".join(name.split(".")[-2:]) for name in changed} == SCALED[kind]


def metrics_of(kind: str, model: nn.Module, folder: Path, threshold: float, dtype: torch.dtype) -> list[dict]:
    """Train two steps on one batch with learning rate 0, and return the metrics of both."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.0), []
    hooks = [QKClip(threshold=threshold)]
    with loopscope.attach(model, optimizer, hooks=hooks, out=folder, display="none", audit=True) as scope:
        for batch in scope.batches([batch_for(kind, dtype)] * 2):
            scope.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append({key.removeprefix("qk_clip/"): value for key, value in scope.last_metrics().items()})
    return found


@pytest.mark.some_rows(5)
@EVERY
def test_same_batch_then_has_the_threshold(kind, way, tmp_path):
    """Of a model with one layer, whose input the clip does not change."""
    model = made(kind, way, torch.float64, **ALONE)
    first, second = metrics_of(kind, model, tmp_path / "run", 0.05, torch.float64)
    assert first["largest_logit"] > 0.05
    assert second["largest_logit"] == pytest.approx(0.05, rel=1e-9)


@pytest.mark.some_rows(2)
@pytest.mark.parametrize("kind", ["llama", "deepseek"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_bfloat16_reaches_threshold(kind, reentrant, tmp_path):
    """Gradient checkpointing computes the layers twice, and bf16 rounds the scaled weights."""
    model = made(kind, dtype=torch.bfloat16, **ALONE).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    *_, last = metrics_of(kind, model, tmp_path / "run", 0.05, torch.bfloat16)
    assert last["largest_logit"] == pytest.approx(0.05, rel=0.03)


@pytest.mark.parametrize("way", ["eager", "sdpa"])
def test_normalised_queries_are_refused_by_name(way, tmp_path):
    model = made("qwen3", way)
    with pytest.raises(UnsuitableError, match=r"model\.layers\.0\.self_attn normalises both .*\(q_norm, k_norm"):
        metrics_of("qwen3", model, tmp_path / "run", 100.0, torch.float32)


def test_trainer_clips_and_measures(tmp_path):
    """In Hugging Face's Trainer both hooks report the same largest logit, and the clip acts."""
    made_trainer = trainer(tmp_path / "trainer", dropout=0.0, gradient_accumulation_steps=2, max_steps=3)
    options = {"qk_clip": {"threshold": 1e-3}, "attention_logits": {"interval": 1}}
    scope = attached(made_trainer, [*options], hook_options=options, out=tmp_path / "run")
    made_trainer.train()
    metrics = scope.last_metrics()
    assert metrics["qk_clip/largest_logit"] == pytest.approx(metrics["attention_logits/largest_logit"], rel=1e-6)
    assert metrics["qk_clip/clipped_heads"] >= 1
