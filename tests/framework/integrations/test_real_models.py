"""Hooks on tiny real models with random weights: they leave training unchanged, and their numbers are correct."""

import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope.hooks import HookRegistry
from loopscope.hooks.selection import hook_kind
from loopscope.training_hooks.gradients.gradient_flow import find_chains
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import default_collate

from docs import real_models
from docs.real_models import EVERYTHING, MODELS, TREATMENTS, Trained, loss_of, samples, trained
from tests.docs.markdown import ROOT
from tests.framework.integrations.real_trainings import (
    NAMES,
    STEPS,
    TIED,
    agree,
    bare,
    before,
    mean_gradients,
    numbers,
    reported_metrics,
    same_steps,
    treated,
    watched,
)
from tests.support.cases import slow_unless
from tests.support.processes import own_process

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
EVERY = pytest.mark.parametrize("name", [pytest.param(name, marks=slow_unless(name == "GPT-2")) for name in MODELS])
LANGUAGE = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=slow_unless(name == "GPT-2")) for name in MODELS if NAMES[name][2]]
)


@pytest.mark.slow
@EVERY
@own_process
def test_hooked_steps_match_bare_steps(name: str) -> None:
    assert same_steps(watched(name), bare(name))


def test_recorded_outputs_are_no_change_by_a_hook(tmp_path: Path) -> None:
    """A model that returns router logits installs module hooks in its first pass, which is one of this hook."""
    found = trained("Mixtral", hooks=["embedding_provenance"], out=tmp_path / "run", audit=True)
    assert same_steps(found, bare("Mixtral"))
    assert found.metrics["embedding_provenance/embedding_grad_l2_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_audit_with_all_hooks_finds_no_mutation(name: str, tmp_path: Path) -> None:
    assert same_steps(trained(name, **EVERYTHING, out=tmp_path / "run", audit=True), bare(name))


@pytest.mark.slow
@EVERY
@own_process
def test_nonfinite_metrics_are_documented(name: str) -> None:
    """A metric is finite unless its description mentions NaN or infinity."""
    found = [watched(name), *(treated(name, hook) for hook in TREATMENTS)]
    metrics = {key: value for each in found if isinstance(each, Trained) for key, value in each.metrics.items()}
    said = {hook.name: hook().describe_metrics() for hook in HookRegistry}
    for metric, value in metrics.items():
        hook, _, rest = metric.partition("/")
        about = " ".join(f"{each.formula} {each.range} {each.reading}" for each in said[hook] if each.describes(rest))
        finite = all(map(math.isfinite, numbers(value)))
        assert about, metric
        assert finite or any(word in about for word in ("NaN", "∞]", "nfinite")), (metric, value)


@pytest.mark.slow
def test_docs_table_lists_actual_outcomes() -> None:
    """The table of real models equals the generated one, and every reason is a sentence."""
    assert TREATMENTS.keys() == {hook.name for hook in HookRegistry if hook_kind(hook) == "committing"}
    outcomes = {name: {hook: treated(name, hook) for hook in TREATMENTS} for name in MODELS}
    said = {name: real_models.hook_reasons(watched(name), outcomes[name]) for name in MODELS}
    assert all(why.endswith(".") for each in said.values() for why in each.values() if why)
    text = real_models.data_table(said)
    assert "no metrics" not in text
    assert text in real_models.DATA.read_text(encoding="utf-8"), "docs/data/real-models.txt is stale: run make docs"


@pytest.mark.slow
@torch.no_grad()
@LANGUAGE
def test_attention_entropies_match_model_attention_weights(name: str) -> None:
    """Compare with the eager attention implementation."""
    eager = real_models.build_model(name, attn_implementation="eager").eval()
    eager.load_state_dict(watched(name).model.state_dict())
    weights = eager(default_collate(samples(name))["input_ids"], output_attentions=True).attentions
    expected = {
        f"entropy/{NAMES[name][0]}.{layer}.{NAMES[name][1]}.{head}": entropy
        for layer, each in enumerate(weights)
        for head, entropy in enumerate(torch.special.entr(each).sum(-1).mean(dim=(0, 2)))
    }
    agree(watched(name), "attention", expected, rel=1e-4)
    assert len(expected) == len(reported_metrics(name, "attention/entropy/")) == 4


@EVERY
def test_gradient_flow_matches_layer_output_gradients(name: str) -> None:
    """Compare with the gradient norms from tensor hooks on the outputs of the layers."""
    (model, batch), layers = before(name, STEPS - 1), NAMES[name][0]
    expected: dict[str, Tensor] = {}

    def follow(key: str, module: nn.Module, inputs: Any, output: Any) -> None:
        tensor = output if isinstance(output, Tensor) else output[0]
        tensor.register_hook(lambda gradient: expected.update({f"norm/{layers}.{key}": gradient.norm()}))

    for key, block in model.get_submodule(layers).named_children():
        block.register_forward_hook(partial(follow, key))
    loss_of(model, batch).backward()
    agree(watched(name), "gradient_flow", expected)
    assert len(expected) == len(reported_metrics(name, "gradient_flow/norm/")) == 2


def test_documented_pattern_finds_resnet_layers() -> None:
    pattern = "resnet.encoder.stages.*.layers.*"
    found = find_chains(real_models.build_model("ResNet"), pattern)
    page = (ROOT / "docs/real-models.md").read_text(encoding="utf-8")
    assert (f"`{pattern}`" in page, len(found[pattern])) == (True, 4)


@LANGUAGE
def test_embedding_provenance_separates_both_uses(name: str) -> None:
    """The weights are tied in GPT-2 and BERT; two matrices are measured at the first step only."""
    tied, names = name in TIED, [f"{module}.weight" for module in NAMES[name][2:]]
    model, batch = before(name, STEPS - 1 if tied else 0)
    table, head = map(model.get_parameter, names)
    apart = [each.detach().clone().requires_grad_() for each in (table, head)]
    functional_call(model, dict(zip(names, apart, strict=True)), kwargs=batch, tie_weights=False).loss.backward()
    g_in, g_out = (each.grad for each in apart)
    expected = {"embedding_grad_l2_norm": g_in.norm(), "output_proj_grad_l2_norm": g_out.norm()}
    cosine = {"cosine": (g_in * g_out).sum() / (g_in.norm() * g_out.norm())}
    agree(watched(name), "embedding_provenance", expected | (cosine if tied else {}))
    clipping = treated(name, "output_projection_clip")
    assert tied == (table is head) == isinstance(clipping, Trained)
    assert tied or "have a matrix each" in str(clipping)


@LANGUAGE
def test_token_gradient_matches_token_embedding_gradient(name: str) -> None:
    norms = mean_gradients(name)[f"{NAMES[name][2]}.weight"].norm(dim=1)
    expected = {"mean_norm": norms.mean(), "max_norm": norms.max(), "untouched_fraction": (norms == 0).float().mean()}
    agree(watched(name), "token_gradient", expected)
    assert numbers(watched(name).metrics["token_gradient/top_tokens"])[0] == norms.argmax()


@EVERY
def test_norms_updates_and_paths_match_plain_formulas(name: str) -> None:
    weights = [dict(before(name, step)[0].named_parameters()) for step in range(STEPS + 1)]
    moved = [torch.cat([(now[key] - then[key]).detach().flatten() for key in now]) for then, now in pairwise(weights)]
    first = {key: (weights[1][key] - each).norm() / each.norm() for key, each in weights[0].items() if each.norm()}
    least = {f"topk_frozen/{key}": ratio for key, ratio in sorted(first.items(), key=lambda pair: pair[1])[:5]}
    agree(watched(name), "weight_updates", least)
    path = {"path_length": sum(leg.norm() for leg in moved), "displacement": sum(moved).norm()}
    agree(watched(name), "path_length", path)
    norms = {f"weight_norm/{key}": each.norm() for key, each in weights[-1].items()}
    agree(
        watched(name), "norms", norms | {f"grad_norm/{key}": each.norm() for key, each in mean_gradients(name).items()}
    )


@pytest.mark.slow
@own_process
def test_sharpness_matches_dense_hessian(tmp_path: Path) -> None:
    options = {"sharpness": {"iterations": 24, "probes": 1, "density_probes": 0, "critical_passes": 0, "k": 1}}
    found = trained("OLMo-2", hooks=["sharpness"], hook_options=options, out=tmp_path)
    batch, parameters = default_collate(samples("OLMo-2")), [*found.model.parameters()]
    with sdpa_kernel(SDPBackend.MATH):
        first = torch.autograd.grad(loss_of(found.model, batch), parameters, create_graph=True)
        flat = torch.cat([each.flatten() for each in first])
        rows = torch.autograd.grad(flat, parameters, torch.eye(len(flat)), is_grads_batched=True)
    hessian = torch.cat([each.flatten(1) for each in rows], dim=1).double()
    agree(found, "sharpness", {"sharpness": torch.linalg.eigvalsh(hessian)[-1]})


@EVERY
def test_every_untied_linear_layer_is_split(name: str) -> None:
    """GPT-2 has no linear layers to split, and the error mentions Conv1D."""
    split, model = treated(name, "metis_split"), real_models.build_model(name)
    tied = model.get_input_embeddings().weight if name in TIED else None
    layers = [each for each in model.modules() if isinstance(each, nn.Linear) and each.weight is not tied]
    if not layers:
        assert (name, "no Conv1D" in str(split)) == ("GPT-2", True)
        return
    assert split.metrics["metis_split/layers"] == len(layers)
    assert split.metrics["metis_split/reconstruction_error"] < 1e-6


@EVERY
def test_clipping_and_smoothing_match_manual_code(name: str) -> None:
    most = TREATMENTS["grad_clip"]["max_norm"]
    by_hand = trained(name, lambda model: nn.utils.clip_grad_norm_(model.parameters(), most))
    smoothed, clipped = treated(name, "model_smoothing"), treated(name, "grad_clip")
    ends = zip(real_models.build_model(name).parameters(), bare(name).model.parameters(), strict=True)
    torch.testing.assert_close([*smoothed.model.parameters()], [(start + end) / 2 for start, end in ends])
    torch.testing.assert_close([*clipped.model.parameters()], [*by_hand.model.parameters()], rtol=1e-3, atol=1e-5)
