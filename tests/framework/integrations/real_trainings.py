"""Cached trainings of real models, with every hook and with none, and single steps of them for comparisons."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from loopscope.errors import UnsuitableError
from torch import Tensor, nn
from torch.utils.data import default_collate

from docs import real_models
from docs.real_models import BATCH, EPOCHS, EVERYTHING, ROWS, Trained, loss_of, samples, trained

STEPS = EPOCHS * ROWS // BATCH
NAMES = {
    "GPT-2": ("transformer.h", "attn", "transformer.wte", "lm_head"),
    "Llama": ("model.layers", "self_attn", "model.embed_tokens", "lm_head"),
    "OLMo-2": ("model.layers", "self_attn", "model.embed_tokens", "lm_head"),
    "GPT-NeoX": ("gpt_neox.layers", "attention", "gpt_neox.embed_in", "lm_head"),
    "Mixtral": ("model.layers", "self_attn", "model.embed_tokens", "lm_head"),
    "Llama, Muon": ("model.layers", "self_attn", "model.embed_tokens", "lm_head"),
    "BERT": ("bert.encoder.layer", "attention", "bert.embeddings.word_embeddings", "cls.predictions.decoder"),
    "ResNet": ("resnet.encoder.stages", "", "", ""),
    "ViT": ("vit.layers", "attention", "", ""),
    "DiT": ("dit.transformer_blocks", "attn1", "", ""),
}
"""The layers of a model, the attention in each, the token embedding and the output projection."""
TIED = ("GPT-2", "BERT")


@cache
def bare(name: str) -> Trained:
    return trained(name)


@cache
@torch.enable_grad()
def watched(name: str) -> Trained:
    return trained(name, **EVERYTHING, out=Path(mkdtemp(), "run"))


@cache
def treated(name: str, hook: str) -> Trained | UnsuitableError:
    return real_models.treated(name, hook, Path(mkdtemp(), "run"))


def same_steps(ours: Trained, theirs: Trained) -> bool:
    pairs = [pair for steps in zip(ours.steps, theirs.steps, strict=True) for pair in zip(*steps, strict=True)]
    return len(ours.steps) == STEPS + 1 and all(torch.equal(one, other) for one, other in pairs)


def before(name: str, step: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model in its state before a step of the bare loop, with the random generator, and the step's batch."""
    model, (*state, generator) = real_models.build_model(name), bare(name).steps[step]
    model.load_state_dict(dict(zip(model.state_dict(), state, strict=True)))
    first = step * BATCH % ROWS
    torch.set_rng_state(generator)
    return model, default_collate(samples(name)[first : first + BATCH])


def gradients(name: str, step: int) -> dict[str, Tensor]:
    model, batch = before(name, step)
    loss_of(model, batch).backward()
    return {key: each.grad for key, each in model.named_parameters() if each.grad is not None}


def mean_gradients(name: str) -> dict[str, Tensor]:
    """Return the mean gradient of the last epoch."""
    steps = [gradients(name, step) for step in range(STEPS - STEPS // EPOCHS, STEPS)]
    return {key: torch.stack([each[key] for each in steps]).mean(0) for key in steps[0]}


def numbers(value: Any) -> list[float]:
    if isinstance(value, Mapping):
        return numbers([*value.values()])
    if isinstance(value, (list, tuple)):
        return [number for each in value for number in numbers(each)]
    return [float(value)]


def agree(found: Trained, hook: str, expected: Mapping[str, Any], rel: float = 1e-3) -> None:
    metrics = {name: float(found.metrics[f"{hook}/{name}"]) for name in expected}
    assert metrics == pytest.approx({name: float(each) for name, each in expected.items()}, rel=rel, abs=1e-7)


def reported_metrics(name: str, prefix: str) -> list[str]:
    return [metric for metric in watched(name).metrics if metric.startswith(prefix)]
