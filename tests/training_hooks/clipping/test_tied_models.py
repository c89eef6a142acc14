"""Provenance and clipping on third-party models, on compiled models and in fp16."""

from typing import Any

import pytest
import torch
from loopscope.state import TrainingState
from loopscope.training import Precision, TrainingTask
from loopscope.training_hooks.clipping import (
    ClipOptions,
    EmbeddingProvenance,
    OutputProjectionClip,
    TiedGradientClipping,
)
from loopscope.training_hooks.clipping.tied_embeddings import EmbeddingPair, all_sums
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional

from tests.support import Case, Run, differences, mean_loss, train

OPTIONS = ClipOptions(window_size=2, scale_factor=0.3)


def gpt2(*, tied: bool = True) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=23, n_positions=8, n_embd=12, n_layer=2, n_head=2, tie_word_embeddings=tied,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def llama(*, tied: bool = True) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=23, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=8, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


MODELS = {"gpt2": gpt2, "llama": llama}


def untied_twin(name: str) -> nn.Module:
    """Return the same model with two matrices of the same values."""
    model, twin = MODELS[name](), MODELS[name](tied=False)
    twin.load_state_dict(model.state_dict())
    return twin


def batch(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(23, (3, 9), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1], drawn[:, 1:]


def loss(model: nn.Module, step: int) -> Tensor:
    inputs, targets = batch(step)
    return functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("name", MODELS)
def test_embedding_pair_matches_model_accessors(name: str) -> None:
    """Embedding, projection and tying are detected on tied and untied models of each library."""
    for tied in (True, False):
        model = MODELS[name](tied=tied)
        pair = EmbeddingPair.of(model, "any", None, None)
        assert model.get_submodule(pair.embedding) is model.get_input_embeddings()
        assert model.get_submodule(pair.projection) is model.get_output_embeddings()
        assert pair.tied is tied


@pytest.mark.parametrize("name", MODELS)
def test_provenance_matches_untied_twin_gradients(name: str) -> None:
    model, twin = MODELS[name](), untied_twin(name)
    clipping = TiedGradientClipping(model, OPTIONS)
    clipping.enable()
    for each in (model, twin):
        loss(each, 0).backward()
    measured = clipping.clip()
    g_in, g_out = (module.weight.grad for module in (twin.get_input_embeddings(), twin.get_output_embeddings()))
    sums = all_sums(g_in, g_out)
    assert torch.equal(measured["embedding_grad_l2_norm"], sums[0].sqrt())
    assert torch.equal(measured["output_proj_grad_l2_norm"], sums[1].sqrt())
    torch.testing.assert_close(model.get_input_embeddings().weight.grad, g_in + g_out, rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_clipping_over_steps_matches_the_rule(name: str) -> None:
    """Merged gradients match a clipped untied twin for six steps."""
    model, twin, norms = MODELS[name](), untied_twin(name), []
    clipping = TiedGradientClipping(model, OPTIONS)
    clipping.enable()
    for step in range(6):
        for each in (model, twin):
            each.zero_grad()
            loss(each, step).backward()
        clipping.clip()
        g_in, g_out = (module.weight.grad for module in (twin.get_input_embeddings(), twin.get_output_embeddings()))
        last = norms[-2:]
        factor = min(1.0, 0.3 * sum(last) / len(last) / float(g_out.norm())) if last else 1.0
        norms.append(float(g_in.norm()))
        merged = g_in + factor * g_out
        torch.testing.assert_close(model.get_input_embeddings().weight.grad, merged, rtol=1e-9, atol=1e-12)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
            for module in (twin.get_input_embeddings(), twin.get_output_embeddings()):
                module.weight.grad = merged
            for parameter in twin.parameters():
                parameter -= 0.1 * parameter.grad
    clipping.disable()


def compiled(task: TrainingTask, state: TrainingState) -> None:
    task.model.compile(backend="eager", dynamic=False)
    next(module for module in task.model.modules() if isinstance(module, nn.Dropout)).p = 0.0


def without_dropout(task: TrainingTask, state: TrainingState) -> None:
    next(module for module in task.model.modules() if isinstance(module, nn.Dropout)).p = 0.0


def rows(run: Run, hook: str) -> dict[tuple[str, int], float]:
    return {(name, step): value for name, _, step, value in run.sink.rows(hook + "/")}


@pytest.mark.some_rows(2)
@pytest.mark.compile
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("loop", ["epoch", "step"])
@pytest.mark.parametrize("hook", [EmbeddingProvenance, OutputProjectionClip])
def test_compiled_models_match_eager_models(hook: type[Any], loop: str, micro_batches: int) -> None:
    eager, fast = (
        train(Case("tied", loop=loop), [hook()], steps=4, introduce=introduce, accumulation_steps=micro_batches)
        for introduce in (without_dropout, compiled)
    )
    expected, found = (rows(run, hook.name) for run in (eager, fast))
    assert expected
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-7)
    for one, other in zip(eager.task.model.parameters(), fast.task.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.compile
def test_compiled_model_hooks_report_equal_norms() -> None:
    """Provenance and clipping agree when both run on a compiled model."""
    run = train(Case("tied"), [EmbeddingProvenance(), OutputProjectionClip()], steps=3, introduce=compiled)
    names = ("embedding_grad_l2_norm", "output_proj_grad_l2_norm")
    seen, clipped = (
        {(name, step): rows(run, hook)[f"{hook}/{name}", step] for name in names for step in (1, 2, 3)}
        for hook in ("embedding_provenance", "output_projection_clip")
    )
    assert seen == pytest.approx(clipped, rel=1e-4)


@pytest.mark.compile
def test_provenance_leaves_a_compiled_run_its_bytes() -> None:
    plain, watched = (train(Case("tied"), hooks, introduce=compiled) for hooks in ([], [EmbeddingProvenance()]))
    assert [*map(differences, plain.digests, watched.digests)] == [[], [], []]


@pytest.mark.some_rows(2)
@pytest.mark.parametrize("hook", [EmbeddingProvenance, OutputProjectionClip])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_norms_in_fp16_are_unscaled(hook: type[Any], micro_batches: int) -> None:
    def fp16(task: TrainingTask, state: TrainingState) -> None:
        without_dropout(task, state)
        task.compute_loss = Precision.of("fp16", torch.device("cpu")).autocast(mean_loss)
        task.scaler = state.scaler = GradScaler("cpu", init_scale=2.0**10)

    single, half = (
        train(Case("tied"), [hook()], steps=1, introduce=introduce, accumulation_steps=micro_batches)
        for introduce in (without_dropout, fp16)
    )
    expected, found = (rows(run, hook.name) for run in (single, half))
    norms = [key for key in expected if key[0].endswith("_l2_norm") and key[1] == 1]
    assert len(norms) == 2
    assert [found[key] for key in norms] == pytest.approx([expected[key] for key in norms], rel=0.02)
