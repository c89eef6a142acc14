"""Writes docs/real-models.md: which hook measures which model of Hugging Face, found out by training each of them."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import loopscope
import torch
import transformers
from loopscope.durable_files import read_json
from loopscope.errors import UnsuitableError
from loopscope.lowbit import MetisOptions, Recipe, find_recipe, quantize_model
from torch import Tensor, nn
from torch.utils.data import DataLoader

from docs.generate import shipped_hooks, table

NOTE = "<!-- Made by `make docs` from what the hooks say; edit docs/real_models.py instead. -->"
PAGE = Path(__file__).with_name("real-models.md")
VOCABULARY, LENGTH, ROWS, BATCH, EPOCHS = 17, 6, 8, 4, 2
SIZES: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 12}
TOKENS = {"vocab_size": VOCABULARY, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))}
IMAGES = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [2, 2], "layer_type": "basic", "num_labels": 3}
OPTIONS: dict[str, dict[str, Any]] = {
    "gradient_flow": {"interval": 1},
    "loss_spikes": {"window": 2},
    "lr_probe": {"steps": 10},
    "path_length": {"every": 1},
    "sharpness": {"batches": 2, "density_points": 9, "iterations": 4, "probes": 2},
    "subspace_gradient_info": {"every": 1},
    "variance": {"window": 2, "every": 2},
    "weight_average": {"interval": 1, "swa_interval": 1, "evaluate_every": 1},
}
"""What makes every hook speak in a training of four steps."""


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


MODELS: dict[str, Callable[..., nn.Module]] = {
    "GPT-2": _gpt2, "Llama": _llama, "OLMo-2": _olmo2, "GPT-NeoX": _gpt_neox, "BERT": _bert, "ResNet": _resnet,
}  # fmt: skip


def made(name: str, **changed: Any) -> nn.Module:
    """Make a model with random weights, in training mode; its configuration may be ``changed``."""
    torch.manual_seed(0)
    return MODELS[name](**changed).train()


def samples(name: str) -> list[dict[str, Tensor]]:
    """Draw what a model is trained on: images with a class; masked tokens; tokens that are their own labels."""
    generator = torch.Generator().manual_seed(3)
    if name == "ResNet":
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
    """A model after its training, the tensors that it was at every step, and what its hooks have said."""

    model: nn.Module
    steps: list[list[Tensor]]
    """Weights, buffers and the state of the random generator as each step begins, and after the last one."""
    metrics: dict[str, Any]
    """The newest, by full name."""
    left_out: dict[str, str]
    """Why, by the hook."""


def trained(
    name: str, between: Callable[[nn.Module], Any] = lambda model: None, recipe: Recipe | None = None, **choices: Any
) -> Trained:
    """Train a model in a plain loop, with hooks if there are ``choices`` for attach.

    ``between`` is called between a backward pass and its update; with a ``recipe`` the model is quantised.
    """
    model, steps = made(name), list[list[Tensor]]()
    if recipe is not None:
        quantize_model(model, recipe)
    loader = DataLoader(samples(name), batch_size=BATCH)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def note() -> None:
        steps.append([each.clone() for each in (*model.state_dict().values(), torch.get_rng_state())])

    def one_pass(batches: Iterable[Any], backward: Callable[[Tensor], None]) -> None:
        for batch in batches:
            note()
            optimizer.zero_grad()
            backward(loss_of(model, batch))
            between(model)
            optimizer.step()

    @torch.no_grad()
    def evaluate(model: nn.Module) -> dict[str, float]:
        outputs = [(model(**batch), batch["labels"]) for batch in loader]
        right = torch.cat([(output.logits.argmax(-1) == labels).float().flatten() for output, labels in outputs])
        accuracy = right.mean().item()
        return {"val_loss": outputs[0][0].loss.item(), "val_acc": accuracy, "train_acc": accuracy}

    if not choices:
        for _ in range(EPOCHS):
            one_pass(loader, Tensor.backward)
        note()
        return Trained(model, steps, {}, {})
    given: dict[str, Any] = {"loss": loss_of, "loader": loader, "evaluate": evaluate, "display": "none"}
    lengths = {"length": EPOCHS, "snapshot_every": EPOCHS}
    with loopscope.attach(model, optimizer, **given, **lengths, **choices) as scope:
        for _ in range(EPOCHS):
            one_pass(scope.batches(loader), scope.backward)
            scope.epoch_end(**scope.evaluate(evaluate, model))
        note()
    return Trained(model, steps, scope.last_metrics(), read_json(scope.folder / "summary.json")["hooks_left_out"])


EVERYTHING: dict[str, Any] = {"hooks": ["all", "with_debug"], "hook_options": OPTIONS}
"""The choices that switch on every hook but the committing ones, which are trained with one by one."""
TREATMENTS: dict[str, dict[str, Any]] = {
    "grad_clip": {"max_norm": 0.1},
    "metis_split": {},
    "model_smoothing": {"update_interval": EPOCHS * ROWS // BATCH},
    "output_projection_clip": {},
}
SPLIT = replace(find_recipe("fp4_metis"), metis=MetisOptions(rank=2, forward_warmup_steps=1))
"""The recipe of the models that ``metis_split`` is tried on."""


def treated(name: str, hook: str, folder: Path) -> Trained | UnsuitableError:
    """Train a model with a committing hook, or return why it cannot be."""
    recipe = SPLIT if hook == "metis_split" else None
    try:
        return trained(name, recipe=recipe, hooks=[hook], hook_options={hook: TREATMENTS[hook]}, out=folder)
    except UnsuitableError as error:
        return error


REASONS = {
    r"trains epochs of its own": "needs loopscope's own loop",
    r"measures against a reference solution": "needs a reference solution",
    r"finds nothing that it knows in": "no attention",
    r"needs a token embedding|needs an embedding and its output projection; the model has none": "no embedding",
    r"have a matrix each": "embedding not tied",
    r"needs low-bit layers that can be split": "its Conv1D cannot be split",
}
"""What the table says of a hook that is left out, by what the hook says itself."""
INTRO = """# Hooks on real models

What [`loopscope.attach`](custom-loop.md) measures on models of `transformers`, tiny ones with random weights, trained
for four steps with every hook on. `make docs` trains them and writes this table; `docs/real_models.py` has the
configurations and the options. Every step of these trainings is, to the last bit, that of the same loop without hooks.
What depends on the architecture is compared with plain formulas and with the models' own attention weights, by layer
and head: `tests/framework/integrations/test_real_models.py`.

*yes*: the hook reports numbers; otherwise why it is left out, which `summary.json` says in a sentence (a hook that was
asked for by name says it in an error). `metis_split` is tried on the models after `quantize_model`.

To know when reading the numbers:

- `attention`: the circuits leave out what lies between projections and scores: rotary positions (Llama, OLMo-2,
  GPT-NeoX) and the norms of queries and keys (OLMo-2). Entropies and scores have both.
- `gradient_flow`: the blocks of a ResNet are its stages; its layers are `pattern` `resnet.encoder.stages.*.layers.*`.
- `gradient_overflow`, `range_penalty` and `metis_split` know matrices: of a ResNet the classifier, no convolution.
- `fourier`: spectra of the embedding and of an untied output projection; those of neurons, and the losses, are for
  batches that are tuples of token pairs and targets.
- `gradient_noise_scale` and `sharpness` take the loss for a mean over rows. Where rows have different numbers of
  labels, as padding and random masks make them, the loss of these models is a mean over labels.
"""


def reason(sentence: str) -> str:
    """Return in few words why a hook is left out, *yes* where it is not."""
    found = [short for pattern, short in REASONS.items() if re.search(pattern, sentence)]
    return found[0] if found else sentence or "yes"


def answers(found: Trained, treatments: Mapping[str, Trained | UnsuitableError]) -> dict[str, str]:
    """Return by the hook why it is left out of a model's training, nothing where it reports numbers."""
    said = found.left_out | {metric.partition("/")[0]: "" for metric in found.metrics}
    for hook, outcome in treatments.items():
        silent = isinstance(outcome, Trained) and not any(metric.startswith(hook) for metric in outcome.metrics)
        said[hook] = "silent" if silent else "" if isinstance(outcome, Trained) else str(outcome)
    return said


def page(said: Mapping[str, Mapping[str, str]]) -> str:
    """Return the page, from the answers of every hook by model."""
    rows = [
        (f"[`{hook.name}`](hooks/{hook.name}.md)", *(reason(each.get(hook.name, "silent")) for each in said.values()))
        for hook in shipped_hooks()
    ]
    return "\n".join([NOTE, INTRO, *table(("hook", *said), rows), ""])


def write() -> bool:
    """Train every model and write the page; return whether it has changed."""
    with TemporaryDirectory() as folder:
        said = {}
        for name in MODELS:
            treatments = {hook: treated(name, hook, Path(folder, name, hook)) for hook in TREATMENTS}
            said[name] = answers(trained(name, **EVERYTHING, out=Path(folder, name, "all")), treatments)
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    PAGE.write_text(page(said), encoding="utf-8")
    return page(said) != before
