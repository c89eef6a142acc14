"""Faults of learning rates, schedules and settings of optimizers."""

import math

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, StepLR

from tests.zoo import causes
from tests.zoo.case import fault
from tests.zoo.data import BLOCK, clusters, generator, loader, text
from tests.zoo.models import Gpt, class_loss, mlp
from tests.zoo.recorder import Recorder
from tests.zoo.training import adam, adamw, cnn_training, gpt_training, lstm_training, mlp_training, sgd


@fault("mlp", causes.RATE_TOO_HIGH)
def sgd_rate_300_times_too_high(recorder: Recorder) -> None:
    """SGD with momentum on a perceptron, with a learning rate of 15 in place of 0.05."""
    mlp_training(lambda model: sgd(model, lr=15.0), epochs=3).run(recorder)


@fault("gpt", causes.RATE_TOO_HIGH)
def adamw_rate_300_times_too_high(recorder: Recorder) -> None:
    """AdamW on a GPT, with a learning rate of 0.3 in place of 1e-3."""
    gpt_training(lambda model: adamw(model, lr=0.3)).run(recorder)


@fault("cnn", causes.RATE_TOO_HIGH)
def adam_rate_on_cnn_too_high(recorder: Recorder) -> None:
    """Adam on a convolutional network, with a learning rate of 0.5."""
    cnn_training(lambda model: adam(model, lr=0.5)).run(recorder)


@fault("lstm", causes.RATE_TOO_HIGH)
def adam_rate_on_lstm_too_high(recorder: Recorder) -> None:
    """Adam on an LSTM, with a learning rate of 1.0 in place of 3e-3."""
    lstm_training(lambda model: adam(model, lr=1.0)).run(recorder)


@fault("mlp", causes.RATE_TOO_LOW)
def adam_rate_300_times_too_low(recorder: Recorder) -> None:
    """Adam on a perceptron, with a learning rate of 3e-6 in place of 1e-3."""
    mlp_training(lambda model: adam(model, lr=3e-6)).run(recorder)


@fault("cnn", causes.RATE_TOO_LOW)
def sgd_rate_on_cnn_too_low(recorder: Recorder) -> None:
    """SGD with momentum on a convolutional network, with a learning rate of 1e-5."""
    cnn_training(lambda model: sgd(model, lr=1e-5)).run(recorder)


@fault("gpt", causes.RATE_TOO_LOW)
def adamw_rate_on_gpt_too_low(recorder: Recorder) -> None:
    """AdamW on a GPT, with a learning rate of 1e-6: an exponent was mistyped."""
    gpt_training(lambda model: adamw(model, lr=1e-6)).run(recorder)


@fault("cnn", causes.COSINE_PER_BATCH, knowable=10)
def cosine_steps_per_batch(recorder: Recorder) -> None:
    """A cosine schedule over 10 epochs steps after every batch, so the learning rate falls to 0 and rises again."""
    training = cnn_training(epochs=4)
    training.scheduler, training.scheduler_every = CosineAnnealingLR(training.optimizer, T_max=10), "step"
    training.run(recorder)


@fault("mlp", causes.RATE_DECAYED, knowable=60)
def step_schedule_per_batch(recorder: Recorder) -> None:
    """StepLR(30, 0.1), meant for epochs, steps after every batch: after 150 steps the learning rate is 1e-8."""
    training = mlp_training(epochs=8)
    training.scheduler, training.scheduler_every = StepLR(training.optimizer, 30, 0.1), "step"
    training.run(recorder)


@fault("lstm", causes.RATE_DECAYED, knowable=60)
def exponential_decay_per_batch(recorder: Recorder) -> None:
    """ExponentialLR(0.9), meant for epochs, steps after every batch."""
    training = lstm_training(epochs=6)
    training.scheduler, training.scheduler_every = ExponentialLR(training.optimizer, 0.9), "step"
    training.run(recorder)


@fault("gpt", causes.NO_WARM_UP, way="attach step")
def transformer_without_warm_up(recorder: Recorder) -> None:
    """A deeper GPT with AdamW at a learning rate of 3e-2 from the first step, made for a warm-up of 1,000 steps."""
    model = Gpt(layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-2, betas=(0.9, 0.95), weight_decay=0.1)
    gpt_training(lambda _: optimizer, model, options={"loop": "step", "length": 200}).run(recorder)


@fault("mlp", causes.RATE_ZERO)
def rate_zero_by_integer_division(recorder: Recorder) -> None:
    """A warm-up divides integers, so that the learning rate is 0 for as long as the warm-up should take."""
    training = mlp_training()
    training.scheduler = LambdaLR(training.optimizer, lambda step: min(1, (step + 1) // 1000))
    training.scheduler_every = "step"
    training.run(recorder)


@fault("gpt", causes.RATE_DECAYED, knowable=105)
def rate_zero_from_the_middle(recorder: Recorder) -> None:
    """A linear decay was given the steps of one of two epochs, so that the second epoch has a learning rate of 0."""
    training = gpt_training()
    training.scheduler = LambdaLR(training.optimizer, lambda step: max(0.0, 1 - step / 100))
    training.scheduler_every = "step"
    training.run(recorder)


@fault("cnn", causes.RATE_JUMP, knowable=81)
def rate_spike_in_the_middle(recorder: Recorder) -> None:
    """A piecewise schedule has a typo in one of its stages: 3e-1 in place of 3e-3 for ten steps."""

    def factor(step: int) -> float:
        return 100.0 if 80 <= step < 90 else 1.0

    training = cnn_training(lambda model: adam(model, lr=3e-3))
    training.scheduler, training.scheduler_every = LambdaLR(training.optimizer, factor), "step"
    training.run(recorder)


@fault("cnn", causes.RATE_JUMP, knowable=81)
def rate_doubles_with_every_epoch(recorder: Recorder) -> None:
    """The factor of a LambdaLR is above 1, so that the learning rate grows until the training falls apart."""
    training = cnn_training(lambda model: adam(model, lr=1e-3))
    training.scheduler, training.scheduler_every = LambdaLR(training.optimizer, lambda step: 1.03**step), "step"
    training.run(recorder)


@fault("mlp", causes.DECAY_TOO_LARGE)
def adamw_decay_too_large(recorder: Recorder) -> None:
    """AdamW on a perceptron with a weight decay of 50, typed for 0.05."""
    mlp_training(lambda model: adamw(model, lr=3e-3, decay=50.0)).run(recorder)


@fault("cnn", causes.DECAY_TOO_LARGE)
def sgd_decay_too_large(recorder: Recorder) -> None:
    """SGD on a convolutional network with an L2 penalty of 1.0."""
    cnn_training(lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1.0)).run(recorder)


@fault("gpt", causes.CLIPPED)
def clipping_at_a_hundredth(recorder: Recorder) -> None:
    """SGD on a GPT with clipping of the gradient at 0.01."""
    gpt_training(lambda model: sgd(model, lr=0.05, momentum=0.0), clip=0.01).run(recorder)


@fault("lstm", causes.CLIPPED)
def clipping_with_wrong_argument(recorder: Recorder) -> None:
    """SGD on an LSTM whose gradient is clipped to 1e-3: the tolerance was passed as the largest norm."""
    lstm_training(lambda model: sgd(model, lr=0.1), clip=1e-3).run(recorder)


@fault("mlp", causes.MOMENTUM, knowable=0)
def betas_swapped(recorder: Recorder) -> None:
    """Adam with betas=(0.999, 0.9)."""
    mlp_training(lambda model: torch.optim.Adam(model.parameters(), 1e-3, betas=(0.999, 0.9))).run(recorder)


@fault("cnn", causes.MOMENTUM, knowable=0)
def momentum_of_0999(recorder: Recorder) -> None:
    """SGD on a convolutional network with momentum 0.999 in place of 0.9."""
    cnn_training(lambda model: sgd(model, lr=0.05, momentum=0.999)).run(recorder)


@fault("lstm", causes.EPSILON, knowable=0)
def adam_epsilon_of_one(recorder: Recorder) -> None:
    """Adam on an LSTM with eps=1.0, which makes it SGD with the same small learning rate."""
    lstm_training(lambda model: torch.optim.Adam(model.parameters(), 1e-3, eps=1.0)).run(recorder)


@fault("mlp", causes.WRONG_SIGN, knowable=10)
def loss_is_maximised(recorder: Recorder) -> None:
    """The loss of a policy-gradient script was copied with its minus sign, so that the cross-entropy is maximised."""
    mlp_training(loss=lambda model, batch: -class_loss(model, batch)).run(recorder)


@fault("cnn", causes.WRONG_SIGN, knowable=10)
def optimizer_maximizes(recorder: Recorder) -> None:
    """SGD was created with maximize=True."""
    cnn_training(lambda model: torch.optim.SGD(model.parameters(), 0.01, maximize=True)).run(recorder)


@fault("gpt", causes.STALE_MOMENTS, knowable=151, way="attach step")
def stale_second_moments(recorder: Recorder) -> None:
    """The loss of a GPT is multiplied by 100 after step 150, which the second moments of Adam do not know yet."""
    torch.manual_seed(1)
    model = Gpt()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3, betas=(0.9, 0.999))
    rows = text(16 * 250).tensors[0]
    with recorder.attach(model, optimizer, loop="step", length=250) as scope:
        for step, letters in enumerate(scope.batches(rows.split(16)), start=1):
            logits = model(letters[:, :-1]).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, letters[:, 1:].flatten())
            scope.backward(loss if step <= 150 else 100 * loss)
            optimizer.step()
            optimizer.zero_grad()


@fault("mlp", causes.STALE_MOMENTS, knowable=161)
def gradients_return_after_a_pause(recorder: Recorder) -> None:
    """The weight of a loss is 1e-4 for four epochs and then 1, while the second moments of Adam are still tiny."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    rows = loader(clusters(1280, 1))
    with recorder.attach(model, optimizer) as scope:
        for epoch in range(6):
            weight = 1e-4 if epoch < 4 else 1.0
            for batch in scope.batches(rows):
                scope.backward(weight * class_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()


@fault("gpt", causes.RATE_TOO_HIGH, way="attach step")
def nanogpt_schedule_in_percent(recorder: Recorder) -> None:
    """A loop like nanoGPT whose learning rate is given in percent: 0.1 at the end of the warm-up of 20 steps."""
    model = Gpt(tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, betas=(0.9, 0.95), weight_decay=0.1)
    letters, draws = text(800).tensors[0], generator(5)
    with recorder.attach(model, optimizer, loop="step", length=200) as scope:
        picks = iter(lambda: letters[torch.randint(len(letters), (16,), generator=draws)], None)
        batches = scope.batches(picks)
        for step in range(200):
            rate = 0.1 * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / 200))
            optimizer.param_groups[0]["lr"] = rate
            rows = next(batches)
            logits = model(rows[:, :BLOCK]).flatten(0, 1)
            scope.backward(torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten()))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


@fault("mlp", causes.DECAY_TOO_LARGE)
def adam_with_a_decay_for_adamw(recorder: Recorder) -> None:
    """Adam, which adds its weight decay to the gradient, has a weight decay of 0.5."""
    mlp_training(lambda model: torch.optim.Adam(model.parameters(), 1e-2, weight_decay=0.5)).run(recorder)


@fault("mlp", causes.WARM_UP_TOO_LONG)
def one_cycle_is_stepped_per_epoch(recorder: Recorder) -> None:
    """OneCycleLR knows the number of batches, but is stepped after each epoch, so that it hardly starts."""
    training = mlp_training(lambda model: sgd(model, lr=0.05), epochs=6)
    training.scheduler = torch.optim.lr_scheduler.OneCycleLR(training.optimizer, max_lr=0.1, total_steps=240)
    training.run(recorder)
