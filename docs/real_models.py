"""Generator of docs/data/real-models.txt: trains real models to find out which hooks support them."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import loopscope
import torch
import transformers
from loopscope.durable_files import read_json
from loopscope.errors import UnsuitableError
from loopscope.lowbit import MetisOptions, Recipe, find_recipe, quantize_model
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from docs import generate
from docs.dates import today
from docs.generate import shipped_hooks, table

DATA = generate.DATA / "real-models.txt"
VOCABULARY, LENGTH, ROWS, BATCH, EPOCHS = 17, 6, 8, 4, 2
TIMES = 1000  # steps of the diffusion
SIZES: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 12}
TOKENS = {"vocab_size": VOCABULARY, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))}
IMAGES = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [2, 2], "layer_type": "basic", "num_labels": 3}
OPTIONS: dict[str, dict[str, Any]] = {
    "gradient_flow": {"interval": 1},
    "loss_spikes": {"window": 2},
    "lr_probe": {"steps": 10},
    "norms": {"names": "*"},
    "path_length": {"every": 1},
    "sharpness": {"batches": 2, "density_points": 9, "iterations": 4, "probes": 2},
    "subspace_gradient_info": {"every": 1},
    "variance": {"window": 2, "every": 2},
    "weight_average": {"interval": 1, "swa_interval": 1, "evaluate_every": 1},
}
"""Options with which every hook reports in a training of four steps, and norms of every parameter."""


def _gpt2(**changed: Any) -> nn.Module:
    sizes = {"n_positions": LENGTH, "n_embd": 8, "n_layer": 2, "n_head": 2, "loss_type": "ForCausalLMLoss"}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**TOKENS | sizes | changed))


def _llama(**changed: Any) -> nn.Module:
    shared = {"num_key_value_heads": 1, "attention_dropout": 0.1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TOKENS | SIZES | shared | changed))


def _olmo2(**changed: Any) -> nn.Module:
    return transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**TOKENS | SIZES | changed))


def _gpt_neox(**changed: Any) -> nn.Module:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**TOKENS | SIZES | changed, hidden_dropout=0.1))


def _bert(**changed: Any) -> nn.Module:
    config = transformers.BertConfig(**TOKENS | SIZES | changed, max_position_embeddings=LENGTH)
    return transformers.BertForMaskedLM(config)


def _resnet(**changed: Any) -> nn.Module:
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**IMAGES | changed))


def _mixtral(**changed: Any) -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1, "output_router_logits": True}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**TOKENS | SIZES | experts | changed))


def _vit(**changed: Any) -> nn.Module:
    images = {"image_size": 16, "patch_size": 8, "num_labels": 3}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES | images | changed))


class Denoiser(nn.Module):
    """A diffusion transformer with its training loss: the error of the noise that it finds in noisy latents."""

    def __init__(self, dit: nn.Module) -> None:
        super().__init__()
        self.dit = dit

    def forward(self, latents: Tensor, labels: Tensor) -> SimpleNamespace:
        """Return the loss of DDPM (Ho et al. 2020) at random times, with a cosine schedule of the noise."""
        times = torch.randint(0, TIMES, (len(latents),))
        noise, angle = torch.randn_like(latents), (times + 0.5) / TIMES * math.pi / 2
        noisy = angle.cos()[:, None, None, None] * latents + angle.sin()[:, None, None, None] * noise
        predicted = self.dit(noisy, timestep=times, class_labels=labels).sample
        return SimpleNamespace(loss=functional.mse_loss(predicted, noise))


def _dit(**changed: Any) -> nn.Module:
    from diffusers import DiTTransformer2DModel  # type: ignore[import-not-found, unused-ignore]

    sizes = {"num_attention_heads": 2, "attention_head_dim": 4, "num_layers": 2, "sample_size": 4, "patch_size": 2}
    channels = {"in_channels": 2, "out_channels": 2, "num_embeds_ada_norm": 10, "norm_num_groups": 2}
    torch.manual_seed(0)  # the first import may have drawn random numbers
    return Denoiser(DiTTransformer2DModel(**sizes | channels | changed))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "GPT-2": _gpt2, "Llama": _llama, "OLMo-2": _olmo2, "GPT-NeoX": _gpt_neox, "Mixtral": _mixtral, "BERT": _bert,
    "ResNet": _resnet, "ViT": _vit, "DiT": _dit, "Llama, Muon": _llama,
}  # fmt: skip
LABELS = ("ResNet", "ViT")
"""Models of images with a class."""


def build_model(name: str, **changed: Any) -> nn.Module:
    """Build a model with random weights, in training mode; ``changed`` overrides its configuration."""
    torch.manual_seed(0)
    return MODELS[name](**changed).train()


def build_optimizers(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return AdamW; for Muon also the optimizer of the matrices in the blocks, which AdamW then leaves out."""
    parameters = dict(model.named_parameters())
    inner = {key: value for key, value in parameters.items() if value.ndim == 2 and ".layers." in key}
    if not name.endswith("Muon"):
        return [torch.optim.AdamW(parameters.values(), lr=1e-2)]
    others = [value for key, value in parameters.items() if key not in inner]
    return [torch.optim.Muon(inner.values(), lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]


def samples(name: str) -> list[dict[str, Tensor]]:
    """Draw the training data of a model: images or latents with a class, or tokens, with masked ones for BERT."""
    generator = torch.Generator().manual_seed(3)
    if name == "DiT":
        latents = torch.randn(ROWS, 2, 4, 4, generator=generator)
        return [{"latents": latent, "labels": torch.tensor(row % 3)} for row, latent in enumerate(latents)]
    if name in LABELS:
        images = torch.randn(ROWS, 3, 16, 16, generator=generator)
        return [{"pixel_values": image, "labels": torch.tensor(row % 3)} for row, image in enumerate(images)]
    rows = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=generator)
    if name != "BERT":
        return [{"input_ids": row, "labels": row} for row in rows]
    masks = torch.arange(LENGTH) % 3 == torch.arange(ROWS)[:, None] % 3
    return [
        {"input_ids": row.where(~mask, 0), "labels": row.where(mask, -100)}
        for row, mask in zip(rows, masks, strict=True)
    ]


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that a model of Hugging Face computes itself."""
    loss: Tensor = model(**batch).loss
    return loss


@dataclass(frozen=True)
class Trained:
    """The result of a training: the model, its tensors at every step, and the output of its hooks."""

    model: nn.Module
    steps: list[list[Tensor]]
    """Weights, buffers and the state of the random generator at the start of each step and after the last one."""
    metrics: dict[str, Any]
    """The latest metrics, by full name."""
    left_out: dict[str, str]
    """The reasons of dropped hooks, by hook."""


@torch.no_grad()
def evaluation(model: nn.Module, loader: Iterable[Any]) -> dict[str, float]:
    """Return the loss of the first batch, and the accuracy of a model with logits."""
    outputs = [(model(**batch), batch["labels"]) for batch in loader]
    loss = {"val_loss": outputs[0][0].loss.item()}
    if not hasattr(outputs[0][0], "logits"):
        return loss
    right = torch.cat([(output.logits.argmax(-1) == labels).float().flatten() for output, labels in outputs])
    accuracy = right.mean().item()
    return {**loss, "val_acc": accuracy, "train_acc": accuracy}


def trained(
    name: str, between: Callable[[nn.Module], Any] = lambda model: None, recipe: Recipe | None = None, **choices: Any
) -> Trained:
    """Train a model in a plain loop, with hooks if there are ``choices`` for attach.

    ``between`` is called between a backward pass and its update; with a ``recipe`` the model is quantised.
    """
    model, steps = build_model(name), list[list[Tensor]]()
    if recipe is not None:
        quantize_model(model, recipe)
    loader = DataLoader(samples(name), batch_size=BATCH)  # type: ignore[arg-type]
    optimizers = build_optimizers(name, model)

    def record_tensors() -> None:
        steps.append([tensor.clone() for tensor in (*model.state_dict().values(), torch.get_rng_state())])

    def one_pass(batches: Iterable[Any], backward: Callable[[Tensor], None]) -> None:
        for batch in batches:
            record_tensors()
            model.zero_grad()
            backward(loss_of(model, batch))
            between(model)
            for optimizer in optimizers:
                optimizer.step()

    evaluate = partial(evaluation, loader=loader)
    if not choices:
        for _ in range(EPOCHS):
            one_pass(loader, Tensor.backward)
        record_tensors()
        return Trained(model, steps, {}, {})
    task_options: dict[str, Any] = {"loss": loss_of, "loader": loader, "evaluate": evaluate, "display": "none"}
    lengths = {"length": EPOCHS, "snapshot_every": EPOCHS}
    with loopscope.attach(model, optimizers, **task_options, **lengths, **choices) as scope:
        for _ in range(EPOCHS):
            one_pass(scope.batches(loader), scope.backward)
            scope.epoch_end(**scope.evaluate(evaluate, model))
        record_tensors()
    return Trained(model, steps, scope.last_metrics(), read_json(scope.folder / "summary.json")["hooks_left_out"])


EVERYTHING: dict[str, Any] = {"hooks": ["all", "with_debug"], "hook_options": OPTIONS}
"""The options that enable every hook except the committing ones, which are trained one by one."""
TREATMENTS: dict[str, dict[str, Any]] = {
    "grad_clip": {"max_norm": 0.1},
    "metis_split": {},
    "model_smoothing": {"update_interval": EPOCHS * ROWS // BATCH},
    "output_projection_clip": {},
    "qk_clip": {"threshold": 0.01},
}
SPLIT = replace(find_recipe("fp4_metis"), metis=MetisOptions(rank=2, forward_warmup_steps=1))
"""The recipe of the models for ``metis_split``."""


def treated(name: str, hook: str, folder: Path) -> Trained | UnsuitableError:
    """Train a model with a committing hook, or return the error that refuses it."""
    recipe = SPLIT if hook == "metis_split" else None
    try:
        return trained(name, recipe=recipe, hooks=[hook], hook_options={hook: TREATMENTS[hook]}, out=folder)
    except UnsuitableError as error:
        return error


REASONS = {
    r"trains (additional )?epochs": "needs an experiment's loop",
    r"reference solution": "needs a reference solution",
    r"Hook 'attention' finds no entry": "no tokens",
    r"Hook 'attention'|finds no attention": "no attention",
    r"needs a mixture of experts": "no experts",
    r"QK-norm": "normalised queries and keys",
    r"compares train_acc with val_acc": "needs accuracies",
    r"needs a token embedding|needs an embedding and its output projection; the model has none": "no embedding",
    r"have a matrix each": "embedding not tied",
    r"needs low-bit layers that can be split": "its Conv1D cannot be split",
}
"""The short reasons in the table, by a pattern of the hook's own error."""
SILENT = {"output_logits": "no logits", "token_loss": "no logits"}
"""The reasons of hooks that stay on without reporting anything, and issue a notice."""


def reason(sentence: str) -> str:
    """Return a short reason for which a hook is dropped, or *yes* if it is not."""
    short_reasons = [short for pattern, short in REASONS.items() if re.search(pattern, sentence)]
    return short_reasons[0] if short_reasons else sentence or "yes"


def hook_reasons(training: Trained, treatments: Mapping[str, Trained | UnsuitableError]) -> dict[str, str]:
    """Return the reason by hook for which it is dropped from a model's training, empty if it reports numbers."""
    reasons_by_hook = training.left_out | {metric.partition("/")[0]: "" for metric in training.metrics}
    for hook, outcome in treatments.items():
        silent = isinstance(outcome, Trained) and not any(metric.startswith(hook) for metric in outcome.metrics)
        reasons_by_hook[hook] = "no metrics" if silent else "" if isinstance(outcome, Trained) else str(outcome)
    return reasons_by_hook


def data_table(reasons: Mapping[str, Mapping[str, str]]) -> str:
    """Return the lines of the table, from the reasons of every hook by model."""
    rows = [
        (
            f"[`{hook.name}`](hooks/index.md#{hook.name})",
            *(
                reason(model_reasons.get(hook.name, SILENT.get(hook.name, "no metrics")))
                for model_reasons in reasons.values()
            ),
        )
        for hook in shipped_hooks()
    ]
    return "\n".join([*table(("hook", *reasons), rows), ""])


def write() -> bool:
    """Train every model and write the table with the date; return whether it has changed."""
    with TemporaryDirectory() as folder:
        reasons = {}
        for name in MODELS:
            treatments = {hook: treated(name, hook, Path(folder, name, hook)) for hook in TREATMENTS}
            reasons[name] = hook_reasons(trained(name, **EVERYTHING, out=Path(folder, name, "all")), treatments)
    is_changed = not DATA.exists() or data_table(reasons) not in DATA.read_text(encoding="utf-8")
    if is_changed:
        DATA.write_text(f"Trained on {today()}.\n\n{data_table(reasons)}", encoding="utf-8")
    return is_changed
