"""The training in Hugging Face's Trainer, with callbacks."""

import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from tests.benchmarks.others.work import MAX_NORM, Asked, Callback, Data, Seen, Work, norm_of_each

LOGS = "trainer.log, in memory"
CLIPS, AVERAGES, NORMS = "max_grad_norm", "", "a callback"


class Named(Data):
    """Batches by the names of their tensors."""

    def __init__(self, data: Data) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        for inputs, labels in self._data:
            yield {"inputs": inputs, "labels": labels}

    def __len__(self) -> int:
        return len(self._data)


class OwnLoss(Trainer):
    """A Trainer with the batches and the loss of the work; it keeps the loss for callbacks."""

    loss: Tensor
    data: Data

    def get_train_dataloader(self) -> Any:
        return self.data

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        loss = functional.cross_entropy(model(inputs["inputs"]), inputs["labels"])
        self.loss = loss.detach()
        return (loss, None) if return_outputs else loss


class Logs(TrainerCallback):
    """Logs the results of a callback."""

    trainer: OwnLoss

    def __init__(self, callback: Callback) -> None:
        self._callback = callback

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
        rate = arguments["optimizer"].param_groups[0]["lr"]
        logs = dict(self._callback(Seen(arguments["model"], self.trainer.loss, rate)))
        if logs:
            self.trainer.log(logs)


def train(work: Work, asked: Asked) -> None:
    """Train, with the requested extras."""
    args = TrainingArguments(
        str(work.folder), num_train_epochs=work.epochs, report_to=[], use_cpu=True, disable_tqdm=True,
        logging_strategy="no", save_strategy="no", max_grad_norm=MAX_NORM if asked.clips else 0,
    )  # fmt: skip
    # Each callback gets a separate class, because the Trainer warns about two callbacks of one class.
    log_callbacks = [
        type("Logs", (Logs,), {})(callback) for callback in [*asked.callbacks, *[norm_of_each] * asked.norms]
    ]
    callbacks = [*log_callbacks, *[TrainerCallback()] * asked.receives_all_events]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = OwnLoss(
            work.model, args, train_dataset=list(work.data.batches), callbacks=callbacks,
            optimizers=(work.optimizer, LambdaLR(work.optimizer, lambda step: 1.0)),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.data = Named(work.data)
        for each in log_callbacks:
            each.trainer = trainer
        trainer.train()
