"""The attention hook on Hugging Face models, compared with the attention weights that the models return."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from loopscope.data import TorchLoader
from loopscope.engine import HookManager
from loopscope.hooks import HookPoint
from loopscope.loops import epoch_loop
from loopscope.state import RandomStreams, TrainingState
from loopscope.training import TrainingTask
from loopscope.training_hooks.circuits import Attention
from loopscope.training_hooks.measures import drawn_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support import RecordingSink, run_info
from tests.training_hooks.epoch_end import epoch_end

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

WIDTH, HEADS, TOKENS, VOCABULARY = 24, 4, 7, 50
SIZES = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 2, "intermediate_size": 32}
Matrices = tuple[Tensor, Tensor, Tensor, Tensor]


def gpt2() -> tuple:
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=WIDTH, n_layer=2, n_head=HEADS)
    return transformers.GPT2LMHeadModel, config


def gpt_neox() -> tuple:
    return transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig(vocab_size=VOCABULARY, **SIZES)


def bert() -> tuple:
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **SIZES)
    return transformers.BertForMaskedLM, config


def llama() -> tuple:
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=8, **SIZES)
    return transformers.LlamaForCausalLM, config


def of_gpt2(layer: nn.Module) -> Matrices:
    query, key, value = layer.c_attn.weight.T.chunk(3)
    return query, key, value, layer.c_proj.weight.T


def of_gpt_neox(layer: nn.Module) -> Matrices:
    parts = layer.query_key_value.weight.view(HEADS, 3, -1, WIDTH)
    return *(parts[:, place].reshape(-1, WIDTH) for place in range(3)), layer.dense.weight


def of_bert(layer: nn.Module) -> Matrices:
    return layer.self.query.weight, layer.self.key.weight, layer.self.value.weight, layer.output.dense.weight


def of_llama(layer: nn.Module) -> Matrices:
    key, value = (
        part.weight.view(2, 1, 8, WIDTH).expand(-1, 2, -1, -1).reshape(-1, WIDTH)
        for part in (layer.k_proj, layer.v_proj)
    )
    return layer.q_proj.weight, key, value, layer.o_proj.weight


KINDS = {
    "gpt2": (gpt2, "transformer.h.{}.attn", of_gpt2),
    "gpt_neox": (gpt_neox, "gpt_neox.layers.{}.attention", of_gpt_neox),
    "bert": (bert, "bert.encoder.layer.{}.attention", of_bert),
    "llama": (llama, "model.layers.{}.self_attn", of_llama),
}


def made(kind: str, implementation: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    cls, config = KINDS[kind][0]()
    config._attn_implementation = implementation
    torch.manual_seed(1)
    model = cls(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.ndim == 2 else 0.1))
    return model.to(dtype)


def batches() -> TorchLoader:
    """Return six samples of tokens as dicts, some with padding at the end."""
    ids = torch.randint(VOCABULARY, (6, TOKENS), generator=torch.Generator().manual_seed(2))
    masks = (torch.arange(TOKENS) < torch.tensor([7, 5, 7, 3, 6, 7])[:, None]).long()
    samples = [{"attention_mask": mask, "input_ids": row, "labels": row} for row, mask in zip(ids, masks, strict=True)]
    return TorchLoader(DataLoader(samples, batch_size=4), seed=3)


@torch.no_grad()
def returned(kind: str, dtype: torch.dtype) -> list[Tensor]:
    """Return the attention weights that the model itself returns, by layer, over all samples."""
    model, weights = made(kind, "eager", dtype), []
    for batch in drawn_loader("attention", batches()).batches(0):
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_attentions=True)
        weights.append(output.attentions)
    return [torch.cat(parts) for parts in zip(*weights, strict=True)]


@pytest.mark.some_rows(3)
@pytest.mark.parametrize(
    ("implementation", "dtype"), [("eager", torch.float64), ("sdpa", torch.float64), ("sdpa", torch.float32)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_metrics_match_model_weights(kind, implementation, dtype):
    """Entropies match returned attention weights, and circuit norms match products of the matrices."""
    model = made(kind, implementation, dtype)
    context = replace(epoch_end(model, hook_point=HookPoint.SNAPSHOT), loader=batches())
    with torch.no_grad():
        metrics = Attention().compute(context)
    assert metrics["rows"] == 6
    for index, weights in enumerate(returned(kind, dtype)):
        name = KINDS[kind][1].format(index)
        entropy = torch.special.entr(weights).sum(dim=-1)
        expected = entropy.mean(dim=(0, 2))
        scatter = entropy.mean(dim=2).std(dim=0) / np.sqrt(6)
        for head in range(HEADS):
            measured = metrics[f"entropy/{name}.{head}"].item(), metrics[f"entropy_error/{name}.{head}"].item()
            assert measured == pytest.approx((expected[head].item(), scatter[head].item()), rel=1e-4)
        query, key, value, output = KINDS[kind][2](model.get_submodule(name))
        for head, (q, k, v) in enumerate(
            zip(*(part.view(HEADS, -1, WIDTH) for part in (query, key, value)), strict=True)
        ):
            columns = output[:, head * len(v) : (head + 1) * len(v)]
            for circuit, product in (("qk", q.T @ k), ("ov", columns @ v)):
                assert metrics[f"{circuit}_norm/{name}.{head}"].item() == pytest.approx(product.norm().item(), rel=1e-4)


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("kind", KINDS)
def test_run_on_dict_batches_is_measured(kind):
    """The run completes under audit and reports every layer and head."""
    model = made(kind, "eager", torch.float32)
    task = TrainingTask(
        model, torch.optim.SGD(model.parameters(), lr=0.01), batches(), lambda model, batch: model(**batch).loss
    )
    state, sink = TrainingState(model, task.optimizer, RandomStreams(7)), RecordingSink()
    manager = HookManager([Attention()], task, state, sinks=[sink], audit=True)
    manager.start(run_info(task, manager, "epoch"))
    epoch_loop(task, manager)
    assert f"attention/ov_copying/{KINDS[kind][1].format(1)}.{HEADS - 1}" in {
        name for name, *_ in sink.rows("attention")
    }
