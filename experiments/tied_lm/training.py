"""Base class of experiments on the decoder language model: data, optimizer, schedule, evaluation, sample text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from loopscope.data import Batch, Loader, derived_seed
from loopscope.errors import UsageError, shortened
from loopscope.option_words import option_text
from loopscope.runs import ExperimentConfig, ExperimentRunner, require
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from .corpus import SMALLEST_VOCABULARY, Tokenizer, python_documentation, read_corpus
from .model import Decoder, DecoderShape, generate, language_model_loss
from .tokens import TOKEN_FILES, TokenLoader, evenly_spaced_windows, open_tokens, split_targets, unigram_entropy

EVALUATION_BATCH = 16
LONGEST_ROW = 200  # characters in the description of a window
QUICK: Mapping[str, Any] = dict(
    steps=400, context=64, width=128, layers=3, batch_size=16, lr=3e-3, min_lr=3e-4, warmup_steps=40
)
"""The preset for a laptop."""


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(DecoderShape, ExperimentConfig):
    """Options of an experiment on the decoder language model.

    Args:
        steps: optimizer steps.
        data: a text file, a folder of texts, or a file of tokens (.npy, .bin, .u16, .u32); by default the documentation
            of Python.
        validation_share: held-out fraction of the data; of texts, complete documents.
        z_loss: weight of the mean squared log-partition function in the loss.
        lr: learning rate after the warm-up.
        min_lr: learning rate at the end of the cosine decay.
        warmup_steps: steps over which the learning rate rises.
        weight_decay: decoupled weight decay of matrices; vectors do not decay.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        evaluation_windows: number of validation sequences for val_loss.
        sample_tokens: tokens of the sample text at the end; 0 for no sample.
    """

    steps: int = 1000
    data: Path | None = None
    validation_share: float = 0.1
    batch_size: int = 16
    z_loss: float = 0.0
    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup_steps: int = 100
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    evaluation_windows: int = 64
    sample_tokens: int = 60
    log_every: int = 20
    eval_every: int = 100
    snapshot_every: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "steps", "context", "width", "layers", "heads", "evaluation_windows")
        self.at_least(0, "warmup_steps", "weight_decay", "z_loss", "sample_tokens")
        self.above(0, "lr")
        require(
            self.vocabulary >= SMALLEST_VOCABULARY - 1,
            f"vocabulary is {self.vocabulary}; it must be at least {SMALLEST_VOCABULARY - 1}, one token for each byte.",
        )
        require(
            0 < self.validation_share < 1,
            f"validation_share is {self.validation_share}; it must be a fraction between 0 and 1.",
        )
        require(
            self.width % (2 * self.heads) == 0,
            f"width is {self.width}; it must be a multiple of twice the heads ({2 * self.heads}), since rotary "
            "positions rotate pairs of coordinates.",
        )
        require(0 <= self.min_lr <= self.lr, f"min_lr is {self.min_lr}; it must be in 0..lr ({self.lr}).")
        require(self.hidden is None or self.hidden >= 1, f"hidden is {self.hidden}; it must be at least 1.")
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            require(0 <= value < 1, f"{name} is {value}; it must be in [0, 1).")

    @property
    def shape(self) -> DecoderShape:
        """The dimensions of the model."""
        return DecoderShape(**{field.name: getattr(self, field.name) for field in fields(DecoderShape)})


@dataclass(frozen=True)
class LanguageData:
    """Training and validation tokens, their source, and the tokenizer for texts."""

    train: np.ndarray
    validation: np.ndarray
    source: Mapping[str, Any]
    tokenizer: Tokenizer | None

    @classmethod
    def load(cls, config: LanguageModelConfig) -> "LanguageData":
        """Load the data of the options.

        Raises:
            UsageError: if the data does not exist, cannot be read, or is shorter than a sequence.
        """
        data = config.data
        if data is not None and not data.exists():
            raise UsageError(
                f"{option_text('data', data)} does not exist; name a text file, a folder of texts or a file of tokens."
            )
        if data is not None and data.is_file() and data.suffix in TOKEN_FILES:
            tokens = open_tokens(data)
            training_count = len(tokens) - round(config.validation_share * len(tokens))  # the end is held out
            source = {"source": str(data), "tokens": len(tokens), "bytes": data.stat().st_size}
            loaded = cls(tokens[:training_count], tokens[training_count:], source, None)
        else:
            loaded = cls._from_texts(config)
        for name, side in (("training", loaded.train), ("validation", loaded.validation)):
            require(
                len(side) > config.context,
                f"The {name} data has {len(side)} tokens, but a context of {config.context} needs at least "
                f"{config.context + 1}; choose a shorter {option_text('context')}, or more data.",
            )
        return loaded

    @classmethod
    def _from_texts(cls, config: LanguageModelConfig) -> "LanguageData":
        corpus = python_documentation() if config.data is None else read_corpus(config.data)
        training, validation = corpus.split(config.validation_share)
        tokenizer = Tokenizer(list(training.documents.values()), config.vocabulary)
        sides = [tokenizer.encode(side.documents.values()) for side in (training, validation)]
        source = {
            "source": corpus.source,
            "documents": len(corpus.documents),
            "validation_documents": len(validation.documents),
            "tokens": sum(map(len, sides)),
            "xxh3_64": corpus.digest,
        }
        return cls(sides[0], sides[1], source, tokenizer)


Config = TypeVar("Config", bound=LanguageModelConfig)


class LanguageModelRunner(ExperimentRunner[Config]):
    """A decoder language model in the step loop: AdamW, warm-up and cosine decay, validation loss, sample text."""

    loop = "step"
    scheduler_interval = "step"
    minimal_hooks: ClassVar[Sequence[str]] = ("weight_updates",)
    default_group: ClassVar[str] = "minimal"

    @cached_property
    def data(self) -> LanguageData:
        """The training and validation tokens."""
        return LanguageData.load(self.config)

    @cached_property
    def unigram_entropy(self) -> float:
        """The entropy of single training tokens in nats."""
        return unigram_entropy(self.data.train, self.config.vocabulary)

    def describe_data(self) -> Mapping[str, Any]:
        """Return the source of the data, with the digest of texts."""
        return self.data.source

    def describe_row(self, index: int) -> str:
        """Return the start of the window at token ``index`` as text, or as token ids if there is no tokenizer."""
        tokens, tokenizer = self.data.train[index : index + self.config.context].tolist(), self.data.tokenizer
        return shortened(" ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens), LONGEST_ROW)

    @property
    def length(self) -> int:
        """The number of steps."""
        return self.config.steps

    def build_model(self) -> nn.Module:
        """Return the decoder."""
        return Decoder(self.config.shape)

    def tensor_parallel_plan(self, model: nn.Module) -> Mapping[str, Any]:
        """Split attention by heads, and the feed-forward layers; with ``qk_norm`` attention stays complete."""
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        by_heads, row_wise = ("q_proj", "k_proj", "v_proj"), ("attention.o_proj", "ff.down_proj")
        column_wise = [*(f"attention.{name}" for name in by_heads), "ff.gate_proj", "ff.up_proj"]
        plan: dict[str, Any] = {f"blocks.*.{name}": ColwiseParallel() for name in column_wise}
        plan |= {f"blocks.*.{name}": RowwiseParallel() for name in row_wise}
        return {name: style for name, style in plan.items() if not self.config.qk_norm or "ff" in name}

    def build_loader(self, strategy: str) -> Loader:
        """Return random windows of the training tokens, the same for every strategy."""
        config = self.config
        return TokenLoader(
            self.data.train,
            context=config.context,
            batch_size=config.batch_size,
            vocabulary=config.vocabulary,
            seed=config.seed,
            device=self.device,
        )

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """Return AdamW with weight decay on matrices."""
        config = self.config
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)

    def build_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        """Return a linear warm-up followed by a cosine decay to ``min_lr``."""
        config = self.config
        final = config.min_lr / config.lr
        factor = partial(learning_rate_factor, warmup=config.warmup_steps, steps=config.steps, final=final)
        return LambdaLR(optimizer, factor)

    def compute_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of the next token, plus z-loss and penalty if they are enabled."""
        inputs, targets = batch
        loss = language_model_loss(model(inputs), targets, self.config.z_loss)
        penalty = self.penalty(model)
        return loss if penalty is None else loss + penalty

    def penalty(self, model: nn.Module) -> Tensor | None:
        """Return a term to add to the loss, zero-dimensional; by default ``None``."""
        return None

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return ``val_loss`` and ``unigram_entropy``, both in nats, and the mean norm of the embedding's rows."""
        config = self.config
        windows = evenly_spaced_windows(self.data.validation, config.context, config.evaluation_windows)
        inputs, targets = split_targets(windows, config.vocabulary, self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for first in range(0, len(inputs), EVALUATION_BATCH):
            part = slice(first, first + EVALUATION_BATCH)
            total += language_model_loss(model(inputs[part]), targets[part]).double() * len(inputs[part])
        rows = model.get_parameter("embedding.weight").norm(dim=1)
        return {
            "val_loss": float(total) / len(inputs),
            "unigram_entropy": self.unigram_entropy,
            "embedding_row_norm": float(rows.mean()),
        }

    def sample(self, model: nn.Module) -> str | None:
        """Continue the first 12 tokens of the validation text at temperature 0.8."""
        tokenizer, config = self.data.tokenizer, self.config
        if tokenizer is None or not config.sample_tokens or not isinstance(model, Decoder):
            return None
        prompt = torch.from_numpy(np.array(self.data.validation[:12], dtype=np.int64)).to(self.device)
        generator = torch.Generator().manual_seed(derived_seed(config.seed, "sample"))
        return tokenizer.decode(generate(model, prompt, config.sample_tokens, generator, temperature=0.8).tolist())


def learning_rate_factor(step: int, *, warmup: int, steps: int, final: float) -> float:
    """Return the factor on the learning rate after ``step`` steps: a linear warm-up, then a cosine decay to ``final``.

    >>> [round(learning_rate_factor(step, warmup=2, steps=6, final=0.1), 3) for step in range(7)]
    [0.333, 0.667, 1.0, 0.868, 0.55, 0.232, 0.1]
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    # final + (1 − final)·(1 + cos(π·progress))/2
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
