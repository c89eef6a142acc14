"""Short trainings of small models with known logits, and references that loop over the rows in float64."""

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loopscope.data import Loader
from loopscope.engine import HookManager
from loopscope.hooks import TrainingHook
from loopscope.loops import epoch_loop
from loopscope.state import RandomStreams, TrainingState
from loopscope.training import TrainingTask
from torch import Tensor, nn
from torch.nn import functional

from tests.support import RecordingSink, run_info

VOCABULARY, ROWS, LENGTH = 23, 6, 9
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SIZES, "vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 32}


def library() -> Any:
    """Import transformers when a test needs it, which takes seconds, or skip the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers")


class Batches(Loader):
    """The given batches in their order in every epoch."""

    def __init__(self, *batches: Any) -> None:
        self._batches = batches

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return iter(self._batches[start:])

    def __len__(self) -> int:
        return len(self._batches)

    def shuffled(self, seed: int) -> Loader:
        return Batches(*reversed(self._batches))


def trained(
    model: nn.Module,
    hooks: list[TrainingHook],
    loss: Callable[[nn.Module, Any], Tensor],
    *batches: Any,
    audit: bool = True,
    **options: Any,
) -> tuple[dict[int, dict[str, Any]], TrainingState]:
    """Train one epoch, and return the metrics of the first hook by step, without its name, and the final state."""
    task = TrainingTask(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), Batches(*batches), loss, length=1, **options
    )
    state, sink = TrainingState(model, task.optimizer, RandomStreams(7)), RecordingSink()
    manager = HookManager(hooks, task, state, sinks=[sink], audit=audit)
    manager.start(run_info(task, manager, "epoch"))
    epoch_loop(task, manager)
    manager.end("completed")
    metrics: dict[int, dict[str, Any]] = {step: {} for step in range(1, len(batches) + 1)}
    for name, _, step, value in sink.rows(hooks[0].name if hooks else ""):
        metrics[step][name.partition("/")[2]] = value
    return metrics, state


def by_step(sink: RecordingSink, hook: str) -> dict[int, dict[str, Any]]:
    """Return the metrics of a hook by step, without its name."""
    metrics: dict[int, dict[str, Any]] = {}
    for name, _, step, value in sink.rows(hook + "/"):
        metrics.setdefault(step, {})[name.removeprefix(hook + "/")] = value
    return metrics


def drawn(*shape: int, high: int = VOCABULARY, seed: int = 3) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


class Tagger(nn.Module):
    """An LSTM that classifies every token, without transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.lstm = nn.LSTM(8, 12, batch_first=True)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


class Segmenter(nn.Module):
    """A convolution with the classes in the second dimension, as cross_entropy takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 5, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        return self.convolution(images)


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that a model of transformers computes."""
    return model(**batch).loss


def pair_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the cross-entropy of a plain model on a pair, with classes in the last or second dimension."""
    logits = model(batch[0])
    if logits.shape[:-1] == batch[1].shape:
        return functional.cross_entropy(logits.flatten(0, -2).float(), batch[1].flatten())
    return functional.cross_entropy(logits, batch[1])


def case(name: str, **options: Any) -> tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Any]:
    """Return a model with a loss and a batch."""
    torch.manual_seed(0)
    tokens = drawn(ROWS, LENGTH)
    labels = tokens.clone()
    labels[1, 4:] = labels[3, :2] = -100
    if name == "llama":
        model = library().LlamaForCausalLM(library().LlamaConfig(**DECODER, **options))
        return model, own_loss, {"input_ids": tokens, "labels": labels}
    if name == "mixtral":
        config = library().MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2, **options)
        return library().MixtralForCausalLM(config), own_loss, {"input_ids": tokens, "labels": labels}
    if name == "vit":
        config = library().ViTConfig(**SIZES, image_size=8, patch_size=4, num_channels=1, num_labels=5, **options)
        batch = {"pixel_values": torch.randn(ROWS, 1, 8, 8), "labels": drawn(ROWS, high=5)}
        return library().ViTForImageClassification(config), own_loss, batch
    if name == "lstm":
        return Tagger(), pair_loss, (tokens, labels)
    return Segmenter(), pair_loss, (torch.randn(ROWS, 1, 4, 4), drawn(ROWS, 4, 4, high=5))


def cases(*names: str) -> list[Any]:
    """Return a parameter for each case; those of transformers carry the marker for its models."""
    plain = ("lstm", "segmenter")
    return [pytest.param(name, marks=[] if name in plain else [pytest.mark.trainer]) for name in names]


CASES = cases("llama", "mixtral", "vit", "lstm", "segmenter")


def rows_of(name: str, model: nn.Module, batch: Any) -> list[tuple[list[float], int, int]]:
    """Return logits, target and position of every row with a target, in float64, of a model in train mode."""
    with torch.no_grad():
        output = model(**batch) if isinstance(batch, dict) else model(batch[0])
    logits = (output if isinstance(output, Tensor) else output.logits).double()
    labels = batch["labels"] if isinstance(batch, dict) else batch[1]
    if name == "segmenter":
        logits = logits.permute(0, 2, 3, 1)
    found = []
    for index in torch.cartesian_prod(*map(torch.arange, labels.shape)).view(-1, labels.ndim).tolist():
        source = [*index[:-1], index[-1] - 1] if name in ("llama", "mixtral") else index
        if source[-1] >= 0 and labels[tuple(index)] >= 0:
            position = source[1] if labels.ndim == 2 else -1
            found.append((logits[tuple(source)].tolist(), int(labels[tuple(index)]), position))
    return found


def softmax(logits: list[float]) -> tuple[list[float], float]:
    """Return the probabilities and ln Z."""
    top = max(logits)
    log_z = top + math.log(math.fsum(math.exp(logit - top) for logit in logits))
    return [math.exp(logit - log_z) for logit in logits], log_z
