"""A tiny Llama and its training by Hugging Face's Trainer."""

from typing import Any

from torch import Tensor, nn

from tests.zoo.data import PADDING, VOCABULARY, padded_sums, text
from tests.zoo.recorder import Recorder


def llama(layers: int = 2, width: int = 48) -> nn.Module:
    """Return a Llama over the letters of the text, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=PADDING,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def causal_rows(rows: int, part: str = "train") -> list[dict[str, Tensor]]:
    """Return rows of the text, which are their own labels."""
    return [{"input_ids": row, "labels": row} for row in text(rows, part).tensors[0]]


def padded_rows(rows: int, seed: int) -> list[dict[str, Tensor]]:
    """Return rows with one sum each, with padding that the loss ignores."""
    return [
        {"input_ids": row, "labels": row.masked_fill(row == PADDING, -100), "attention_mask": (row != PADDING).long()}
        for row in padded_sums(rows, seed).tensors[0]
    ]


def trainer_of(
    recorder: Recorder, model: nn.Module, rows: Any, optimizers: Any = (None, None), **arguments: Any
) -> Any:
    """Return a Trainer of one epoch with 16 rows per batch; further arguments are those of TrainingArguments."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    standard = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 16,
        "save_strategy": "no",
        "logging_steps": 50,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
    }
    evaluation = arguments.pop("eval_dataset", None)
    settings = TrainingArguments(str(recorder.folder / "trainer"), **(standard | arguments))
    trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=evaluation, optimizers=optimizers)
    trainer.remove_callback(PrinterCallback)
    return trainer
