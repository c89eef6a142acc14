"""Faults of training loops: gradients, accumulation, modes and evaluations."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo import causes
from tests.zoo.case import fault
from tests.zoo.data import clusters, images, loader, text, waves
from tests.zoo.models import ConvNet, FunctionalDropout, Gpt, LstmClassifier, class_loss, letter_loss, mlp
from tests.zoo.recorder import Recorder
from tests.zoo.training import adam, adamw, cnn_training, gpt_training, mlp_training, sgd


@fault("mlp", causes.NOT_ZEROED, knowable=2)
def gradients_are_never_zeroed(recorder: Recorder) -> None:
    """The loop of a perceptron has no zero_grad."""
    model = mlp()
    optimizer, rows = sgd(model, lr=0.05), loader(clusters(1280, 1))
    with recorder.attach(model, optimizer) as scope:
        for _ in range(3):
            for batch in scope.batches(rows):
                scope.backward(class_loss(model, batch))
                optimizer.step()


@fault("gpt", causes.NOT_ZEROED, knowable=2, way="attach step")
def gradients_of_gpt_are_never_zeroed(recorder: Recorder) -> None:
    """The loop of a GPT zeroes the gradients of the model that was wrapped, and no longer those of its copy."""
    model, other = Gpt(), Gpt()
    optimizer = adamw(model, lr=1e-3)
    with recorder.attach(model, optimizer, loop="step", length=150) as scope:
        for letters in scope.batches(text(16 * 150).tensors[0].split(16)):
            other.zero_grad()
            scope.backward(letter_loss(model, [letters]))
            optimizer.step()


@fault("lstm", causes.NOT_ZEROED, knowable=2)
def gradients_are_zeroed_once_per_epoch(recorder: Recorder) -> None:
    """The loop of an LSTM calls zero_grad at the start of an epoch only."""
    model = LstmClassifier()
    optimizer, rows = adam(model, lr=1e-2), loader(waves(1280, 1))
    with recorder.attach(model, optimizer) as scope:
        for _ in range(5):
            optimizer.zero_grad()
            for batch in scope.batches(rows):
                scope.backward(class_loss(model, batch))
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()


@fault("mlp", causes.ZEROED_EARLY)
def zero_grad_between_backward_and_step(recorder: Recorder) -> None:
    """The loop of a perceptron zeroes the gradients after backward and before the step."""
    model = mlp()
    optimizer, rows = adam(model), loader(clusters(1280, 1))
    with recorder.attach(model, optimizer) as scope:
        for _ in range(3):
            for batch in scope.batches(rows):
                scope.backward(class_loss(model, batch))
                optimizer.zero_grad()
                optimizer.step()


@fault("cnn", causes.ZEROED_EARLY)
def gradients_are_zeroed_before_steps_of_adamw(recorder: Recorder) -> None:
    """The gradients become zeros before the step, so that only weight decay changes the weights."""
    model = ConvNet()
    optimizer, rows = adamw(model), loader(images(1280, 1))
    with recorder.attach(model, optimizer) as scope:
        for _ in range(4):
            for batch in scope.batches(rows):
                scope.backward(class_loss(model, batch))
                optimizer.zero_grad(set_to_none=False)
                optimizer.step()


@fault("lstm", causes.NEVER_STEPPED)
def optimizer_never_steps(recorder: Recorder) -> None:
    """The loop of an LSTM has no optimizer.step()."""
    model = LstmClassifier()
    optimizer, rows = adam(model, lr=1e-2), loader(waves(1280, 1))
    with recorder.attach(model, optimizer) as scope:
        for batch in scope.batches(rows):
            scope.backward(class_loss(model, batch))


@fault("lstm", causes.ZEROED_EARLY)
def gradients_are_zeroed_between_micro_batches(recorder: Recorder) -> None:
    """The loop of an LSTM zeroes the gradients before each of four micro-batches."""
    model = LstmClassifier()
    optimizer, rows = adam(model, lr=1e-3), loader(waves(1280, 1))
    with recorder.attach(model, optimizer, accumulate=4) as scope:
        for _ in range(6):
            for index, batch in enumerate(scope.batches(rows), start=1):
                optimizer.zero_grad()
                scope.backward(class_loss(model, batch) / 4)
                if index % 4 == 0:
                    optimizer.step()


@fault("cnn", causes.NO_EFFECT)
def weights_are_reset_before_every_step(recorder: Recorder) -> None:
    """The weights are loaded from the last good state before every step, left from a test of checkpoints."""
    model = ConvNet()
    optimizer, rows = sgd(model, lr=0.05), loader(images(1280, 1))
    saved = {name: item.clone() for name, item in model.state_dict().items()}
    with recorder.attach(model, optimizer) as scope:
        for _ in range(4):
            for batch in scope.batches(rows):
                optimizer.zero_grad()
                scope.backward(class_loss(model, batch))
                optimizer.step()
                model.load_state_dict(saved)


def accumulate(recorder: Recorder, model: nn.Module, optimizer: Any, batches: Any, divisor: float) -> None:
    """Train with eight micro-batches in a step, whose losses are divided by a number."""
    with recorder.attach(model, optimizer, accumulate=8) as scope:
        for _ in range(4):
            for number, batch in enumerate(scope.batches(batches), start=1):
                scope.backward(class_loss(model, batch) / divisor)
                if number % 8 == 0:
                    optimizer.step()
                    optimizer.zero_grad()


@fault("mlp", causes.NO_AVERAGE)
def accumulation_without_division(recorder: Recorder) -> None:
    """The losses of eight micro-batches are added and not averaged, under SGD."""
    model = mlp()
    accumulate(recorder, model, sgd(model, lr=0.1), loader(clusters(1280, 1), 4), 1)


@fault("cnn", causes.NO_AVERAGE)
def accumulation_on_cnn_without_division(recorder: Recorder) -> None:
    """A convolutional network accumulates eight micro-batches of 8 images without a division."""
    model = ConvNet()
    accumulate(recorder, model, sgd(model, lr=0.05), loader(images(2560, 1), 8), 1)


@fault("mlp", ("accumulation-not-averaged", "accumulation-divided-twice"))
def accumulation_divided_twice(recorder: Recorder) -> None:
    """The losses of eight micro-batches are divided by 8 twice: in the loss function, and in the loop."""
    model = mlp()
    accumulate(recorder, model, sgd(model, lr=0.1), loader(clusters(1280, 1), 4), 64)


@fault("mlp", causes.EVALUATION_MODE, knowable=41)
def dropout_is_active_in_evaluation(recorder: Recorder) -> None:
    """The evaluation of a perceptron with dropout 0.5 runs in train mode."""
    model = mlp(128, 128, dropout=0.5)
    optimizer, rows = adam(model), loader(clusters(1280, 1))
    validation = [*loader(clusters(256, 3), 256)]

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        model.train()
        return {"val_loss": sum(class_loss(model, batch).item() for batch in validation) / len(validation)}

    with recorder.attach(model, optimizer) as scope:
        for _ in range(5):
            for batch in scope.batches(rows):
                optimizer.zero_grad()
                scope.backward(class_loss(model, batch))
                optimizer.step()
            scope.evaluate(evaluate)


@fault("cnn", causes.EVALUATION_MODE, knowable=41)
def batchnorm_is_in_train_mode_in_evaluation(recorder: Recorder) -> None:
    """A convolutional network is evaluated without model.eval(), by a script that keeps its side effects."""
    model = ConvNet()
    optimizer, rows = adam(model), loader(images(1280, 1))
    validation = [*loader(images(256, 4), 32)]

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        return {"val_loss": sum(class_loss(model, batch).item() for batch in validation) / len(validation)}

    with recorder.attach(model, optimizer, isolate_evaluation=False) as scope:
        for _ in range(4):
            for batch in scope.batches(rows):
                optimizer.zero_grad()
                scope.backward(class_loss(model, batch))
                optimizer.step()
            scope.evaluate(evaluate)


@fault("mlp", causes.EVALUATION_MODE, knowable=40)
def plain_evaluation_with_dropout(recorder: Recorder) -> None:
    """A plain loop computes its validation loss without model.eval(), and reports it at the end of the epoch."""
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10))
    optimizer, rows = adam(model), loader(clusters(1280, 1))
    validation = clusters(256, 4).tensors
    with recorder.attach(model, optimizer) as scope:
        for _ in range(4):
            for batch in scope.batches(rows):
                optimizer.zero_grad()
                scope.backward(class_loss(model, batch))
                optimizer.step()
            with torch.no_grad():
                loss = class_loss(model, validation)
            scope.epoch_end(val_loss=loss.item())


@fault("mlp", causes.ACTIVE_DROPOUT, knowable=40)
def functional_dropout_in_evaluation(recorder: Recorder) -> None:
    """The model calls functional.dropout without training=self.training."""
    mlp_training(model=FunctionalDropout(always=True)).run(recorder)


@fault("mlp", causes.STOPPED)
def probe_freezes_the_trunk(recorder: Recorder) -> None:
    """After the second epoch a helper freezes all layers but the last, and does not set them back."""
    model = mlp()
    optimizer, rows = adam(model, lr=1e-4), loader(clusters(1280, 1))
    with recorder.attach(model, optimizer) as scope:
        for epoch in range(5):
            for batch in scope.batches(rows):
                optimizer.zero_grad()
                scope.backward(class_loss(model, batch))
                optimizer.step()
            if epoch == 1:
                for layer in [*model.children()][:-1]:
                    layer.requires_grad_(False)


@fault("cnn", causes.EVAL_MODE, knowable=41)
def model_stays_in_eval_mode(recorder: Recorder) -> None:
    """A loop calls model.eval() for its evaluation, and model.train() only once before the first epoch."""
    model = ConvNet()
    optimizer, rows = adam(model), loader(images(1280, 1))
    validation = [*loader(images(256, 4), 128)]
    model.train()
    with recorder.attach(model, optimizer) as scope:
        for _ in range(4):
            for batch in scope.batches(rows):
                optimizer.zero_grad()
                scope.backward(class_loss(model, batch))
                optimizer.step()
            model.eval()
            with torch.no_grad():
                loss = sum(class_loss(model, batch).item() for batch in validation) / len(validation)
            scope.epoch_end(val_loss=loss)


@fault("gpt", causes.EVAL_MODE, knowable=0)
def gpt_is_trained_in_eval_mode(recorder: Recorder) -> None:
    """A GPT with dropout is trained in eval mode, as it was loaded."""
    model = Gpt(dropout=0.2).eval()
    gpt_training(lambda net: adamw(net, lr=3e-3), model).run(recorder)


class ModeFixingNet(ConvNet):
    """A convolutional network whose normalisations always stay in eval mode."""

    def train(self, mode: bool = True) -> "ModeFixingNet":
        """Set the mode of everything but the normalisations."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


@fault("cnn", causes.NORM_FROZEN, knowable=0)
def batchnorm_of_new_network_is_frozen(recorder: Recorder) -> None:
    """A snippet for fine-tuning keeps BatchNorm in eval mode, but the network is trained from scratch."""
    model = ModeFixingNet()
    cnn_training(lambda net: sgd(net, lr=0.05), model.train()).run(recorder)


@fault("cnn", causes.NORM_FROZEN, knowable=0)
def batchnorm_momentum_of_zero(recorder: Recorder) -> None:
    """The momentum of BatchNorm is 0, so that its statistics stay those of the start."""
    cnn_training(model=ConvNet(momentum=0.0)).run(recorder)


class CollapsingExperts(nn.Module):
    """A mixture of four experts, of which the router selects the most likely one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.router = nn.Linear(20, 32), nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 10)

    def forward(self, points: Tensor) -> Tensor:
        """Return the logits of the selected expert of each row."""
        hidden = functional.relu(self.stem(points))
        weights = self.router(hidden).softmax(-1)
        chosen = weights.argmax(-1)
        output = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            output[rows] = weights[rows, number, None] * expert(hidden[rows])
        return self.head(functional.relu(output))


@fault("mlp", ("router-collapse", "parameters-without-gradient"), hidden=True)
def router_sends_everything_to_one_expert(recorder: Recorder) -> None:
    """A mixture of experts without a balancing loss sends all rows to the first expert."""
    model = CollapsingExperts()
    nn.init.constant_(model.router.bias, 0.0)
    with torch.no_grad():
        model.router.bias[0] = 3.0
    optimizer, rows = adam(model, lr=3e-3), loader(clusters(1280, 1))
    with recorder.attach(model, optimizer) as scope:
        for _ in range(5):
            for batch in scope.batches(rows):
                optimizer.zero_grad()
                scope.backward(class_loss(model, batch))
                optimizer.step()


@fault("lstm", causes.NO_AVERAGE, way="attach step")
def two_losses_are_added_over_time(recorder: Recorder) -> None:
    """A loop adds the losses of all 24 time steps and does not divide by their number, under SGD."""

    class Everywhere(LstmClassifier):
        def forward(self, values: Tensor) -> Tensor:
            return self.head(self.lstm(values)[0])

    model = Everywhere()
    optimizer = sgd(model, lr=0.3)
    batches = [batch for _ in range(5) for batch in loader(waves(1280, 1))]
    with recorder.attach(model, optimizer, loop="step", length=200) as scope:
        for values, labels in scope.batches(batches):
            logits = model(values)
            loss = sum(functional.cross_entropy(logits[:, time], labels) for time in range(logits.shape[1]))
            optimizer.zero_grad()
            scope.backward(loss)
            optimizer.step()
