"""Faults of numbers: NaN from data, modules and optimizers, and 16-bit formats."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from tests.zoo import causes
from tests.zoo.case import fault
from tests.zoo.data import WAVES, clusters, curve, images, loader, waves
from tests.zoo.models import Block, ConvNet, Gpt, class_loss, letter_loss, mlp, square_loss
from tests.zoo.recorder import Recorder
from tests.zoo.training import Training, adam, adamw, gpt_training, lstm_training, mlp_training, sgd


@fault("mlp", causes.NONFINITE, knowable=121)
def nan_loss_at_one_step(recorder: Recorder) -> None:
    """The loss is a mean over the marked rows of a batch; in step 121 no row is marked, and 0/0 is NaN."""
    points, targets = curve(32 * 200, 1).tensors
    marks = torch.rand(len(points), 1, generator=torch.Generator().manual_seed(3)) < 0.5
    marks[32 * 120 : 32 * 121] = False
    rows = loader(TensorDataset(points, targets, marks), shuffle=False)

    def marked_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        inputs, values, mask = batch
        return ((model(inputs) - values).square() * mask).sum() / mask.sum()

    model = mlp(out=1)
    Training(model, adam(model), rows, marked_loss, epochs=1).run(recorder)


@fault("gpt", causes.NONFINITE, mentions="optimizer")
def adam_without_epsilon(recorder: Recorder) -> None:
    """Adam with eps=0 divides 0 by 0 for the embedding of a letter that the first batch does not contain."""
    gpt_training(lambda model: torch.optim.Adam(model.parameters(), 1e-3, eps=0.0)).run(recorder)


@fault("mlp", causes.HALF_PRECISION)
def adam_on_half_weights(recorder: Recorder) -> None:
    """The weights of a perceptron are float16, in which Adam's eps of 1e-8 is 0."""
    data = clusters(1280, 1).tensors
    rows = loader(TensorDataset(data[0].half(), data[1]))
    mlp_training(adam, mlp().half(), batches=rows, validation=None).run(recorder)


@fault("mlp", causes.HALF_PRECISION, hidden=True)
def autocast_in_float16_without_scaler(recorder: Recorder) -> None:
    """A perceptron under autocast in float16 without a scaler, with a loss that is divided by 10,000."""

    def loss_in_half(model: nn.Module, batch: list[Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return class_loss(model, batch) / 10_000

    mlp_training(loss=loss_in_half).run(recorder)


class LocalBlock(Block):
    """A block with attention to the four letters before each letter; the first letter has none."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Attend within a window whose border excludes the letter itself."""
        rows, length, width = hidden.shape
        heads = self.qkv(self.first_norm(hidden)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        places = torch.arange(length)
        distance = places[:, None] - places[None, :]
        is_visible = (distance > 0) & (distance <= 4)
        scores = (query @ key.transpose(-1, -2) / key.shape[-1] ** 0.5).masked_fill(~is_visible, -torch.inf)
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(rows, length, width)
        hidden = hidden + self.out(mixed)
        return hidden + self.down(functional.gelu(self.up(self.second_norm(hidden))))


@fault("gpt", causes.NONFINITE, mentions="blocks.5")
def nan_born_in_block_5(recorder: Recorder) -> None:
    """The sixth block of a GPT attends to a window without the letter itself: the softmax of no letter is NaN."""
    model = Gpt(layers=6)
    model.blocks[5] = LocalBlock(48, 4, 0.0, causal=True)
    gpt_training(model=model, epochs=1, options={"loss": letter_loss}).run(recorder)


class CosineClassifier(nn.Module):
    """A perceptron without biases, whose last hidden layer is divided by its length."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(20, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
        self.head = nn.Linear(64, 10)

    def forward(self, points: Tensor) -> Tensor:
        """Return the logits of normalised features."""
        hidden = self.trunk(points)
        return self.head(8 * hidden / (hidden.square().sum(1, keepdim=True).sqrt() + 1e-6))


@fault("mlp", causes.NONFINITE, knowable=80)
def empty_row_has_a_nan_gradient(recorder: Recorder) -> None:
    """Row 2,537 of the data is empty; the root of its length 0 has a finite value and a NaN gradient."""
    points, labels = clusters(32 * 150, 1).tensors
    points[2537] = 0.0
    model = CosineClassifier()
    Training(model, adam(model), loader(TensorDataset(points, labels), shuffle=False), epochs=1).run(recorder)


@fault("lstm", causes.NONFINITE, knowable=1)
def missing_values_in_the_data(recorder: Recorder) -> None:
    """Sequences have missing values, which were read as NaN."""
    training = lstm_training()
    values, labels = next(iter(loader(training.batches.dataset, 1280, shuffle=False)))
    values[::37, 5] = float("nan")
    training.batches = loader(TensorDataset(values, labels))
    training.run(recorder)


@fault("gpt", causes.ROUNDED_AWAY)
def bfloat16_weights_with_tiny_rate(recorder: Recorder) -> None:
    """A GPT has bfloat16 weights and a learning rate of 1e-5, so that most updates are rounded away."""
    gpt_training(lambda model: adamw(model, lr=1e-5), Gpt(std=0.1).bfloat16()).run(recorder)


@fault("mlp", causes.ROUNDED_AWAY)
def bfloat16_weights_with_sgd(recorder: Recorder) -> None:
    """A perceptron has bfloat16 weights and is trained by SGD at a learning rate of 1e-4."""
    points, labels = clusters(1280, 1).tensors
    rows = loader(TensorDataset(points.bfloat16(), labels))
    mlp_training(lambda model: sgd(model, lr=1e-4), mlp().bfloat16(), batches=rows, validation=None).run(recorder)


@fault("mlp", causes.NOT_UNSCALED)
def optimizer_steps_in_place_of_the_scaler(recorder: Recorder) -> None:
    """The loop scales the loss and calls optimizer.step(), so that the updates are 65,536 times too large."""
    model = mlp()
    optimizer, scaler = sgd(model, lr=0.05), torch.amp.GradScaler("cpu")
    with recorder.attach(model, optimizer, scaler=scaler) as scope:
        for _ in range(3):
            for batch in scope.batches(loader(clusters(1280, 1))):
                optimizer.zero_grad()
                scope.backward(class_loss(model, batch))
                optimizer.step()


@fault("cnn", causes.CLIPPED)
def clipping_before_unscaling(recorder: Recorder) -> None:
    """Gradients are clipped at a norm of 1 before scaler.unscale_, so that only 1/65,536 is left."""
    model = ConvNet()
    optimizer, scaler = sgd(model, lr=0.05), torch.amp.GradScaler("cpu")
    with recorder.attach(model, optimizer, scaler=scaler) as scope:
        for _ in range(4):
            for batch in scope.batches(loader(images(1280, 1))):
                optimizer.zero_grad()
                scope.backward(class_loss(model, batch))
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()


@fault("mlp", causes.SKIPPED_STEPS)
def scaler_skips_every_step(recorder: Recorder) -> None:
    """Every batch has an empty row with a NaN gradient, so that the loss scaler skips every step."""
    points, labels = clusters(1280, 1).tensors
    points[::16] = 0.0
    model = CosineClassifier()
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu")
    rows = loader(TensorDataset(points, labels), shuffle=False)
    with recorder.attach(model, optimizer, scaler=scaler) as scope:
        for _ in range(4):
            for batch in scope.batches(rows):
                with torch.autocast("cpu", torch.float16):
                    loss = class_loss(model, batch)
                scope.backward(loss)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()


@fault("mlp", causes.NONFINITE, knowable=1)
def logarithm_of_zero(recorder: Recorder) -> None:
    """The targets of a regression are logarithms of counts, and some counts are 0."""
    points, targets = curve(1280, 1).tensors
    counts = targets.exp().mul(2).floor()
    rows = loader(TensorDataset(points, counts.log()))
    model = mlp(out=1)
    Training(model, adam(model), rows, square_loss, epochs=3).run(recorder)


@fault("mlp", causes.NONFINITE, knowable=30)
def binary_loss_written_by_hand(recorder: Recorder) -> None:
    """y log p + (1 - y) log(1 - p) is NaN as soon as the sigmoid p of a sure prediction is rounded to 1."""
    points, labels = clusters(1280, 1, spread=0.3).tensors
    rows = loader(TensorDataset(3 * points, (labels < 5).float()[:, None]))

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        chances, targets = model(batch[0]).sigmoid(), batch[1]
        return -(targets * chances.log() + (1 - targets) * (1 - chances).log()).mean()

    model = mlp(out=1)
    Training(model, adam(model, lr=1e-2), rows, loss, epochs=5).run(recorder)


class TanhClassifier(nn.Module):
    """A recurrent network of tanh units, whose recurrent weights are three times an orthogonal matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.RNN(1, 32, batch_first=True), nn.Linear(32, WAVES)
        nn.init.orthogonal_(self.rnn.weight_hh_l0, gain=3.0)

    def forward(self, values: Tensor) -> Tensor:
        """Return the logits after the last value."""
        return self.head(self.rnn(values)[0][:, -1])


@fault("lstm", causes.EXPLODING)
def recurrent_gradients_explode(recorder: Recorder) -> None:
    """A recurrent network with large recurrent weights is trained on long sequences by SGD without clipping."""
    values, labels = waves(1280, 1).tensors
    rows = loader(TensorDataset(values.repeat(1, 3, 1), labels))
    lstm_training(lambda net: sgd(net, lr=0.1), TanhClassifier(), batches=rows, validation=None, clip=None).run(
        recorder
    )
