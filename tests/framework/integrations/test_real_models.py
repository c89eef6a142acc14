"""Hooks on real models, tiny and with random weights: they change nothing, and their numbers are the right ones."""

import math
from collections.abc import Mapping
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from loopscope.errors import UnsuitableError
from loopscope.hooks import HookRegistry, hook_kind
from loopscope.training_hooks.gradients.gradient_flow import find_chains
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import default_collate

from docs import real_models
from docs.real_models import BATCH, EPOCHS, EVERYTHING, MODELS, ROWS, TREATMENTS, Trained, loss_of, samples, trained

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
STEPS = EPOCHS * ROWS // BATCH
EVERY = pytest.mark.parametrize("name", MODELS)
AUDITED_ALWAYS = "Llama"
"""The model whose training is audited in every run of the suite; the others' audits are slow."""
BLOCKS, ATTENTION, PAIRS = {"ResNet": "resnet.encoder.stages"}, dict[str, str](), dict[str, tuple[str, str]]()
for _name, _base, _blocks, _attention, _embedding, _head in (
    ("GPT-2", "transformer", "h", "attn", "wte", "lm_head"),
    ("Llama", "model", "layers", "self_attn", "embed_tokens", "lm_head"),
    ("OLMo-2", "model", "layers", "self_attn", "embed_tokens", "lm_head"),
    ("GPT-NeoX", "gpt_neox", "layers", "attention", "embed_in", "lm_head"),
    ("BERT", "bert", "encoder.layer", "attention", "embeddings.word_embeddings", "cls.predictions.decoder"),
):
    BLOCKS[_name], ATTENTION[_name] = f"{_base}.{_blocks}", _attention
    PAIRS[_name] = f"{_base}.{_embedding}.weight", f"{_head}.weight"
TIED = ("GPT-2", "BERT")


@cache
def bare(name: str) -> Trained:
    return trained(name)


@cache
def watched(name: str) -> Trained:
    return trained(name, **EVERYTHING, out=Path(mkdtemp(), "run"), audit=name == AUDITED_ALWAYS)


@cache
def treated(name: str, hook: str) -> Trained | UnsuitableError:
    return real_models.treated(name, hook, Path(mkdtemp(), "run"))


def same_steps(ours: Trained, theirs: Trained) -> bool:
    pairs = [pair for steps in zip(ours.steps, theirs.steps, strict=True) for pair in zip(*steps, strict=True)]
    return len(ours.steps) == STEPS + 1 and all(torch.equal(one, other) for one, other in pairs)


def before(name: str, step: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model as it is before a step of the bare loop, random generator included, and the step's batch."""
    model, (*state, generator) = real_models.made(name), bare(name).steps[step]
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


def agree(metrics: Mapping[str, Any], expected: Mapping[str, Any], rel: float = 1e-4) -> None:
    found = {name: float(metrics[name]) for name in expected}
    assert found == pytest.approx({name: float(each) for name, each in expected.items()}, rel=rel, abs=1e-7)


@EVERY
def test_every_step_with_all_hooks_is_that_of_the_bare_loop_to_the_last_bit(name: str) -> None:
    assert same_steps(watched(name), bare(name))


@pytest.mark.slow
@EVERY
def test_an_audit_of_all_hooks_finds_nothing_and_changes_nothing(name: str, tmp_path: Path) -> None:
    assert same_steps(trained(name, **EVERYTHING, out=tmp_path / "run", audit=True), bare(name))


@EVERY
def test_numbers_are_finite_where_the_hook_does_not_say_otherwise(name: str) -> None:
    found = [watched(name), *(treated(name, hook) for hook in TREATMENTS)]
    metrics = {key: value for each in found if isinstance(each, Trained) for key, value in each.metrics.items()}
    said = {hook.name: hook().describe_metrics() for hook in HookRegistry}
    for metric, value in metrics.items():
        hook, _, rest = metric.partition("/")
        about = " ".join(f"{each.formula} {each.range} {each.reading}" for each in said[hook] if each.describes(rest))
        finite = all(map(math.isfinite, numbers(value)))
        assert about, metric
        assert finite or any(word in about for word in ("NaN", "∞]", "nfinite")), (metric, value)


def test_the_table_of_the_docs_says_what_runs() -> None:
    assert TREATMENTS.keys() == {hook.name for hook in HookRegistry if hook_kind(hook) == "committing"}
    said = {
        name: real_models.answers(watched(name), {hook: treated(name, hook) for hook in TREATMENTS}) for name in MODELS
    }
    assert all(why.endswith(".") for each in said.values() for why in each.values() if why)
    text = real_models.page(said)
    assert "silent" not in text
    assert real_models.PAGE.read_text(encoding="utf-8") == text, "docs/real-models.md is stale: run make docs"


@torch.no_grad()
@pytest.mark.parametrize("name", ATTENTION)
def test_entropies_are_those_of_the_models_own_attention_weights(name: str) -> None:
    eager = real_models.made(name, attn_implementation="eager").eval()
    eager.load_state_dict(watched(name).model.state_dict())
    inputs = default_collate(samples(name))["input_ids"]
    weights = eager(input_ids=inputs, output_attentions=True).attentions
    expected = {
        f"attention/entropy/{BLOCKS[name]}.{layer}.{ATTENTION[name]}.{head}": entropy
        for layer, each in enumerate(weights)
        for head, entropy in enumerate(torch.special.entr(each).sum(-1).mean(dim=(0, 2)))
    }
    agree(watched(name).metrics, expected)
    assert len(expected) == len([key for key in watched(name).metrics if key.startswith("attention/entropy/")]) == 4


@EVERY
def test_the_gradient_flow_is_through_the_layers_of_the_model(name: str) -> None:
    model, batch = before(name, STEPS - 1)
    expected: dict[str, Tensor] = {}

    def follow(key: str, module: nn.Module, inputs: Any, output: Any) -> None:
        tensor = output if isinstance(output, Tensor) else output[0]
        tensor.register_hook(lambda gradient: expected.update({f"gradient_flow/norm/{key}": gradient.norm()}))

    for key, block in model.get_submodule(BLOCKS[name]).named_children():
        block.register_forward_hook(partial(follow, f"{BLOCKS[name]}.{key}"))
    loss_of(model, batch).backward()
    agree(watched(name).metrics, expected)
    assert expected.keys() == {key for key in watched(name).metrics if key.startswith("gradient_flow/norm/")}
    assert len(expected) == 2


def test_the_pattern_that_the_docs_name_finds_the_layers_of_a_resnet() -> None:
    pattern = "resnet.encoder.stages.*.layers.*"
    assert f"`{pattern}`" in real_models.INTRO
    (chain,) = find_chains(real_models.made("ResNet"), pattern)
    assert len(chain.blocks) == 4


@pytest.mark.parametrize("name", PAIRS)
def test_both_uses_of_the_embedding_are_told_apart_in_the_pair_that_is_there(name: str) -> None:
    """Tied in GPT-2 and BERT; two matrices are measured at the first step only."""
    tied = name in TIED
    model, batch = before(name, STEPS - 1 if tied else 0)
    table, head = (model.get_parameter(key) for key in PAIRS[name])
    assert (table is head) == tied
    apart = {key: each.detach().clone().requires_grad_() for key, each in zip(PAIRS[name], (table, head), strict=True)}
    functional_call(model, apart, kwargs=batch, tie_weights=False).loss.backward()
    g_in, g_out = (each.grad for each in apart.values())
    prefix, expected = (
        "embedding_provenance",
        {"embedding_grad_l2_norm": g_in.norm(), "output_proj_grad_l2_norm": g_out.norm()},
    )
    if tied:
        expected["cosine"] = (g_in * g_out).sum() / (g_in.norm() * g_out.norm())
    agree(watched(name).metrics, {f"{prefix}/{key}": each for key, each in expected.items()}, rel=1e-3)
    clipping = treated(name, "output_projection_clip")
    assert isinstance(clipping, Trained) if tied else "have a matrix each" in str(clipping)


@pytest.mark.parametrize("name", PAIRS)
def test_the_gradient_of_tokens_is_that_of_the_token_embedding(name: str) -> None:
    norms = mean_gradients(name)[PAIRS[name][0]].norm(dim=1)
    expected = {"mean_norm": norms.mean(), "max_norm": norms.max(), "untouched_fraction": (norms == 0).float().mean()}
    agree(watched(name).metrics, {f"token_gradient/{key}": each for key, each in expected.items()})
    assert numbers(watched(name).metrics["token_gradient/top_tokens"])[0] == norms.argmax()


@EVERY
def test_norms_updates_and_paths_are_those_of_plain_formulas(name: str) -> None:
    weights = [dict(before(name, step)[0].named_parameters()) for step in range(STEPS + 1)]
    moved = [torch.cat([(now[key] - then[key]).detach().flatten() for key in now]) for then, now in pairwise(weights)]
    mean, metrics = mean_gradients(name), watched(name).metrics
    expected = {
        "path_length/path_length": sum(leg.norm() for leg in moved),
        "path_length/displacement": sum(moved).norm(),
    }
    expected |= {f"norms/weight_norm/{key}": each.norm() for key, each in weights[-1].items()}
    expected |= {f"norms/grad_norm/{key}": each.norm() for key, each in mean.items()}
    first = {key: (weights[1][key] - each).norm() / each.norm() for key, each in weights[0].items() if each.norm()}
    told = [key for key in metrics if key.startswith("weight_updates/topk_frozen/")]
    expected |= {key: first[key.removeprefix("weight_updates/topk_frozen/")] for key in told}
    agree(metrics, expected, rel=1e-3)
    assert len(told) == 5


def test_the_sharpness_is_the_largest_eigenvalue_of_the_dense_hessian(tmp_path: Path) -> None:
    options = {"sharpness": {"iterations": 24, "probes": 1, "density_probes": 0, "critical_passes": 0, "k": 1}}
    found = trained("OLMo-2", hooks=["sharpness"], hook_options=options, out=tmp_path)
    batch, sizes = default_collate(samples("OLMo-2")), [each.numel() for each in found.model.parameters()]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        parameters = list(found.model.parameters())
        first = torch.autograd.grad(loss_of(found.model, batch), parameters, create_graph=True)
        flat = torch.cat([each.flatten() for each in first])
        rows = torch.autograd.grad(flat, parameters, torch.eye(sum(sizes)), is_grads_batched=True)
    hessian = torch.cat([each.flatten(1) for each in rows], dim=1).double()
    agree(found.metrics, {"sharpness/sharpness": torch.linalg.eigvalsh(hessian)[-1]}, rel=1e-3)


@EVERY
def test_every_linear_layer_with_a_weight_of_its_own_is_split(name: str) -> None:
    split, model = treated(name, "metis_split"), real_models.made(name)
    tied = model.get_input_embeddings().weight if name in TIED else None
    layers = [each for each in model.modules() if isinstance(each, nn.Linear) and each.weight is not tied]
    if name == "GPT-2":
        assert not layers
        assert "no Conv1D" in str(split)
    else:
        assert split.metrics["metis_split/layers"] == len(layers)
        assert split.metrics["metis_split/reconstruction_error"] < 1e-6


@EVERY
def test_clipping_and_smoothing_do_what_one_would_write_by_hand(name: str) -> None:
    by_hand = trained(
        name, lambda model: nn.utils.clip_grad_norm_(model.parameters(), TREATMENTS["grad_clip"]["max_norm"])
    )
    smoothed, clipped = treated(name, "model_smoothing"), treated(name, "grad_clip")
    ends = zip(real_models.made(name).parameters(), bare(name).model.parameters(), strict=True)
    torch.testing.assert_close([*smoothed.model.parameters()], [(start + end) / 2 for start, end in ends])
    torch.testing.assert_close([*clipped.model.parameters()], [*by_hand.model.parameters()], rtol=1e-3, atol=1e-5)
