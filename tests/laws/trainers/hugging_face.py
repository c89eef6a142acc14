"""A training by the Trainer of transformers with accumulation, of the kind that the first argument names."""

import sys
import tempfile
from typing import Any

import torch
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

LENGTH, VOCABULARY = 12, 40


class OverriddenLoss(Trainer):
    """Returns the mean loss of a micro-batch from a model whose losses the Trainer takes for normalised."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """Ignore the number of items in the batch."""
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class OverriddenMean(OverriddenLoss):
    """Divides the mean losses by the number of micro-batches, whose numbers of tokens differ."""

    loss_is_scaled_for_ga = False


class OverriddenSum(Trainer):
    """Divides the sum of the losses by the number of items in all micro-batches."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Divide once."""
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def texts(generator: torch.Generator) -> list[dict[str, torch.Tensor]]:
    """Return sequences whose labels end at different positions."""
    rows = []
    for _ in range(256):
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[int(torch.randint(3, LENGTH, (), generator=generator)) :] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def sentences(generator: torch.Generator) -> list[dict[str, torch.Tensor]]:
    """Return sequences with a class."""
    tokens = torch.randint(0, VOCABULARY, (256, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row[0] % 3} for row in tokens]


def main(kind: str) -> None:
    """Train a small model for some updates of four micro-batches."""
    generator = torch.Generator().manual_seed(0)
    is_classifier = kind == "classifier"
    model: Any
    if is_classifier:
        size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        model = BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, num_labels=3, **size))
    else:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2))
    classes = {"override": OverriddenLoss, "mean_of_means": OverriddenMean, "override_with_items": OverriddenSum}
    trainer = classes.get(kind, Trainer)(
        model,
        TrainingArguments(
            tempfile.mkdtemp(),
            per_device_train_batch_size=8,
            gradient_accumulation_steps=4,
            max_steps=8,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            label_smoothing_factor=0.1 if kind == "label_smoothing" else 0.0,
        ),
        train_dataset=sentences(generator) if is_classifier else texts(generator),
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
