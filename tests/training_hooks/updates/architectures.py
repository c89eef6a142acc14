"""Tiny models of several architectures with a batch each, and a custom loop that trains one with hooks."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import loopscope
import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, ROWS = 17, 6, 4
SIZES: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 16}
TOKENS = {"vocab_size": VOCABULARY, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))}
IMAGES = {"image_size": 8, "patch_size": 4, "num_channels": 3, "num_labels": 3}


def _vit() -> nn.Module:
    import transformers

    return transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES | IMAGES))


def _llama() -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TOKENS | SIZES, num_key_value_heads=1))


def _mixtral() -> nn.Module:
    import transformers

    experts = {"num_key_value_heads": 1, "num_local_experts": 3, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**TOKENS | SIZES | experts))


def _resnet() -> nn.Module:
    import transformers

    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic", "num_labels": 3}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes))


class Recurrent(nn.Module):
    """An LSTM between an embedding and a projection to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.lstm = nn.LSTM(8, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


ARCHITECTURES: Mapping[str, Callable[[], nn.Module]] = {
    "vit": _vit, "llama": _llama, "mixtral": _mixtral, "resnet": _resnet, "lstm": Recurrent,
}  # fmt: skip


def batches(name: str, count: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Draw batches for a model."""
    generator = torch.Generator().manual_seed(3)
    if name in ("vit", "resnet"):
        images = torch.randn(count, ROWS, 3, 8, 8, generator=generator, dtype=dtype)
        return [{"pixel_values": batch, "labels": torch.arange(ROWS) % 3} for batch in images]
    tokens = torch.randint(1, VOCABULARY, (count, ROWS, LENGTH), generator=generator)
    return [{"input_ids": batch, "labels": batch} for batch in tokens]


def loss_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    if isinstance(model, Recurrent):
        logits = model(batch["input_ids"])[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"][:, 1:].flatten())
    loss: Tensor = model(**batch).loss
    return loss


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build a model with the same random weights at every call, in training mode."""
    torch.manual_seed(0)
    return ARCHITECTURES[name]().to(dtype).train()


class Training:
    """A custom loop with one attached hook, which yields at every step before clipping, before and after the update.

    Args:
        folder: the folder of the run.
        name: name of the model.
        hook: name of the hook.
        optimizer: makes the optimizer.
        options: options of the hook.
        steps: number of steps.
        accumulate: micro-batches of a step.
        checkpointing: ``use_reentrant`` of activation checkpointing, or ``None`` for none.
        max_norm: the limit of the clipping.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        hook: str,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        *,
        options: Mapping[str, Any] = {},
        steps: int = 3,
        accumulate: int = 1,
        checkpointing: bool | None = None,
        dtype: torch.dtype = torch.float32,
        max_norm: float = 0.5,
    ) -> None:
        self.folder, self.name, self.hook, self.options = folder, name, hook, options
        self.model = build(name, dtype)
        if checkpointing is not None:
            recent = getattr(self.model, "activation_checkpointing_enable", None)  # since transformers 5.14
            (recent or self.model.gradient_checkpointing_enable)({"use_reentrant": checkpointing})
        self.optimizer = optimizer(self.model.parameters())
        self.steps, self.accumulate, self.dtype, self.max_norm = steps, accumulate, dtype, max_norm
        self.metrics: dict[str, float] = {}
        """The hook's newest metrics."""

    def gradients(self) -> dict[str, Tensor]:
        """Return copies of the gradients in float64."""
        named = self.model.named_parameters()
        return {name: value.grad.double().clone() for name, value in named if value.grad is not None}

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the weights in float64."""
        return {name: value.detach().double().clone() for name, value in self.model.named_parameters()}

    def run(self) -> Iterator[str]:
        """Train, and yield ``clip``, ``update`` and ``end`` at every step."""
        attached = loopscope.attach(
            self.model,
            self.optimizer,
            hooks=[self.hook],
            hook_options={self.hook: dict(self.options)},
            out=self.folder,
            overwrite=True,
            accumulate=self.accumulate,
            display="none",
        )
        with attached as scope:
            data = batches(self.name, self.steps * self.accumulate, self.dtype)
            for number, batch in enumerate(scope.batches(data), start=1):
                scope.backward(loss_of(self.model, batch) / self.accumulate)
                if number % self.accumulate:
                    continue
                yield "clip"
                nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
                yield "update"
                self.optimizer.step()
                newest = scope.last_metrics().items()
                self.metrics = {
                    key.partition("/")[2]: float(value) for key, value in newest if key.startswith(f"{self.hook}/")
                }
                yield "end"
                self.optimizer.zero_grad()


def trainer_metrics(folder: Path, hook: str, options: Mapping[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
    """Train two steps by Hugging Face's Trainer; return the hook's metrics as a data frame, and the Trainer's log."""
    import transformers

    data = [{key: value[0] for key, value in batch.items()} for batch in batches("llama", 4, torch.float32)]
    settings = {"max_grad_norm": 0.1, "logging_steps": 1, "per_device_train_batch_size": 2, "num_train_epochs": 1}
    arguments = transformers.TrainingArguments(folder, report_to=[], use_cpu=True, disable_tqdm=True, **settings)
    trainer = transformers.Trainer(build("llama"), arguments, train_dataset=data)
    choices = {"hooks": [hook], "hook_options": {hook: dict(options)}, "out": folder / "run", "display": "none"}
    loopscope.attach(trainer, **choices)
    trainer.train()
    frame = loopscope.read_run(folder / "run").frame()
    own = frame[[name for name in frame if name.startswith(f"{hook}/")]]
    return own.rename(columns=lambda name: name.removeprefix(f"{hook}/")), trainer.state.log_history
