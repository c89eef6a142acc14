"""Healthy trainings with usual settings: every model, several optimizers, and both Trainers."""

import torch

from tests.zoo.case import healthy
from tests.zoo.data import BLOCK, curve, generator, loader, text
from tests.zoo.models import ConvNet, Gpt, letter_loss
from tests.zoo.recorder import Recorder
from tests.zoo.training import (
    adam,
    adamw,
    cnn_training,
    gpt_training,
    lstm_training,
    mlp_training,
    regression_training,
    sgd,
)


@healthy("mlp")
def mlp_with_adam(recorder: Recorder) -> None:
    """Adam on a perceptron."""
    mlp_training(epochs=3).run(recorder)


@healthy("mlp")
def mlp_with_sgd(recorder: Recorder) -> None:
    """SGD without momentum on a perceptron."""
    mlp_training(lambda model: sgd(model, lr=0.1, momentum=0.0), epochs=3).run(recorder)


@healthy("mlp")
def mlp_with_momentum_at_high_rate(recorder: Recorder) -> None:
    """SGD with momentum 0.9 at a learning rate of 0.1 on a perceptron."""
    mlp_training(lambda model: sgd(model, lr=0.1)).run(recorder)


@healthy("mlp", group="observers")
def regression_with_adam(recorder: Recorder) -> None:
    """Adam on a regression with standardised targets, with all observers."""
    regression_training(lambda model: adam(model, lr=3e-3)).run(recorder)


@healthy("cnn")
def cnn_with_adam(recorder: Recorder) -> None:
    """Adam on a convolutional network with BatchNorm."""
    cnn_training(lambda model: adam(model, lr=3e-3)).run(recorder)


@healthy("cnn")
def cnn_with_sgd(recorder: Recorder) -> None:
    """SGD with momentum and weight decay on a convolutional network with BatchNorm."""
    cnn_training(lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)).run(recorder)


@healthy("gpt")
def gpt_with_adamw(recorder: Recorder) -> None:
    """AdamW on a GPT at a learning rate of 3e-3, with weight decay on everything."""
    gpt_training(lambda model: adamw(model, lr=3e-3, decay=0.1)).run(recorder)


@healthy("gpt", group="observers")
def gpt_with_tied_embeddings(recorder: Recorder) -> None:
    """AdamW on a GPT whose head is the embedding, with all observers."""
    gpt_training(lambda model: adamw(model, lr=3e-3), Gpt(tied=True)).run(recorder)


@healthy("gpt", way="attach step")
def gpt_with_muon(recorder: Recorder) -> None:
    """Muon for the matrices of the blocks of a GPT, and AdamW for the rest, in a loop of steps."""
    model = Gpt()
    inner = {id(weight) for weight in model.blocks.parameters() if weight.ndim == 2}
    others = [weight for weight in model.parameters() if id(weight) not in inner]
    matrices = [weight for weight in model.parameters() if id(weight) in inner]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-3)]
    letters, draws = text(800).tensors[0], generator(5)
    with recorder.attach(model, optimizers, loop="step", length=200) as scope:
        picks = iter(lambda: letters[torch.randint(len(letters), (16,), generator=draws)], None)
        batches = scope.batches(picks)
        for _ in range(200):
            rows = next(batches)
            logits = model(rows[:, :BLOCK]).flatten(0, 1)
            scope.backward(torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten()))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@healthy("lstm")
def lstm_with_adam(recorder: Recorder) -> None:
    """Adam on an LSTM, with clipping at 1."""
    lstm_training(lambda model: adam(model, lr=1e-2)).run(recorder)


@healthy("lstm")
def lstm_with_sgd(recorder: Recorder) -> None:
    """SGD with momentum on an LSTM, with clipping at 1."""
    lstm_training(lambda model: sgd(model, lr=0.3), epochs=8).run(recorder)


@healthy("mlp")
def mlp_without_validation(recorder: Recorder) -> None:
    """Adam on a regression without any validation."""
    regression_training(lambda model: adam(model, lr=3e-3), validation=None, epochs=3).run(recorder)


@healthy("mlp")
def mlp_with_large_batches(recorder: Recorder) -> None:
    """Adam on a regression with all 1,280 rows in one batch, so that an epoch has one step."""
    batches = loader(curve(1280, 1), 1280)
    regression_training(lambda model: adam(model, lr=1e-2), batches=batches, epochs=120).run(recorder)


@healthy("gpt")
def gpt_with_dropout(recorder: Recorder) -> None:
    """AdamW on a GPT with dropout 0.1 and a validation loss below that of the training."""
    gpt_training(lambda model: adamw(model, lr=3e-3), Gpt(dropout=0.1), loss=letter_loss).run(recorder)


@healthy("cnn")
def cnn_with_wide_layers(recorder: Recorder) -> None:
    """AdamW on a wider convolutional network."""
    cnn_training(lambda model: adamw(model, lr=1e-3), ConvNet(width=16), epochs=3).run(recorder)
