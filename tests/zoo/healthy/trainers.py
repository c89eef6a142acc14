"""Healthy trainings by Hugging Face's Trainer and by Lightning."""

from typing import Any

import torch

from tests.zoo.case import healthy
from tests.zoo.data import clusters, images, loader, waves
from tests.zoo.hugging_face import causal_rows, llama, padded_rows, trainer_of
from tests.zoo.lightning_modules import Classifier, fit
from tests.zoo.models import ConvNet, LstmClassifier, mlp
from tests.zoo.recorder import Recorder


@healthy("gpt", way="hugging face")
def trainer_with_a_linear_decay(recorder: Recorder) -> None:
    """The Trainer trains a Llama with its default schedule, a linear decay to 0, and evaluations."""
    options = {"learning_rate": 3e-3, "eval_strategy": "epoch", "eval_dataset": causal_rows(64, "val")}
    trainer = trainer_of(recorder, llama(), causal_rows(1600), **options)
    recorder.attach(trainer)
    trainer.train()


@healthy("gpt", way="hugging face")
def trainer_with_padding_ignored(recorder: Recorder) -> None:
    """The Trainer trains a Llama on padded rows whose padding has the label -100, with a cosine and accumulation."""
    options = {"learning_rate": 3e-3, "lr_scheduler_type": "cosine", "warmup_steps": 10}
    trainer = trainer_of(recorder, llama(), padded_rows(2400, 1), gradient_accumulation_steps=2, **options)
    recorder.attach(trainer)
    trainer.train()


@healthy("gpt", way="hugging face")
def trainer_continues_a_trained_model(recorder: Recorder) -> None:
    """The Trainer fine-tunes a trained Llama at its default learning rate of 5e-5."""
    model = llama()
    trainer_of(recorder, model, causal_rows(1000), learning_rate=5e-3).train()
    trainer = trainer_of(recorder, model, padded_rows(1200, 3))
    recorder.attach(trainer)
    trainer.train()


@healthy("cnn", way="lightning")
def lightning_with_validation(recorder: Recorder) -> None:
    """A Lightning module of a convolutional network with validation."""
    fit(recorder, Classifier(ConvNet()), loader(images(1280, 1)), loader(images(256, 4), 128))


@healthy("mlp", way="lightning")
def lightning_with_adam(recorder: Recorder) -> None:
    """A Lightning module of a perceptron without validation, with accumulation and clipping."""
    rows = loader(clusters(1280, 1), 16)
    fit(recorder, Classifier(mlp()), rows, accumulate_grad_batches=2, gradient_clip_val=1.0)


@healthy("lstm", way="lightning")
def lightning_with_a_schedule_per_epoch(recorder: Recorder) -> None:
    """A Lightning module of an LSTM with an exponential decay after every epoch."""

    class Decaying(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), 1e-2)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]

    fit(recorder, Decaying(LstmClassifier()), loader(waves(1280, 1)), loader(waves(256, 4), 256))
