"""Faults of data, labels and losses."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import ConcatDataset, TensorDataset

from tests.zoo import causes
from tests.zoo.case import fault
from tests.zoo.data import (
    BLOCK,
    PADDING,
    VOCABULARY,
    clusters,
    curve,
    generator,
    images,
    loader,
    padded_sums,
    ratings,
    reversed_letters,
    text,
    waves,
)
from tests.zoo.models import (
    ConvNet,
    Gpt,
    LstmClassifier,
    Ratings,
    Reversing,
    class_loss,
    letter_loss,
    mlp,
    reversing_loss,
    square_loss,
)
from tests.zoo.recorder import Recorder
from tests.zoo.training import (
    Training,
    adam,
    adamw,
    cnn_training,
    gpt_training,
    lstm_training,
    mlp_training,
    regression_training,
    sgd,
)


@fault("mlp", causes.REPEATED_ROWS)
def data_duplicated_by_the_loader(recorder: Recorder) -> None:
    """The loader appends the same shard of 64 rows twenty times, so that a perceptron memorises it."""
    shard = clusters(64, 1, spread=2.5)
    rows = loader(ConcatDataset([shard] * 20))
    validation = [*loader(clusters(256, 3, spread=2.5), 256)]
    mlp_training(model=mlp(256, 256), batches=rows, validation=validation).run(recorder)


@fault("gpt", causes.REPEATED_ROWS)
def every_worker_yields_the_same_text(recorder: Recorder) -> None:
    """Each of eight workers yields the whole text of 100 rows, so that every row occurs eight times in an epoch."""
    rows = text(100).tensors[0].repeat(8, 1)
    gpt_training(lambda model: adamw(model, lr=3e-3), batches=loader(TensorDataset(rows), 16), epochs=4).run(recorder)


@fault("mlp", causes.OVERFITTING, knowable=40)
def perceptron_overfits_tiny_data(recorder: Recorder) -> None:
    """A wide perceptron is trained on 64 noisy rows for a hundred epochs, and its validation loss rises."""
    rows = loader(clusters(64, 1, spread=2.5))
    validation = [*loader(clusters(512, 3, spread=2.5), 512)]
    mlp_training(model=mlp(256, 256), batches=rows, validation=validation, epochs=100).run(recorder)


@fault("cnn", causes.OVERFITTING, knowable=60)
def cnn_overfits_noisy_images(recorder: Recorder) -> None:
    """A convolutional network memorises 96 very noisy images."""
    rows, validation = loader(images(96, 1, noise=2.5)), [*loader(images(256, 4, noise=2.5), 128)]
    training = cnn_training(lambda net: adam(net, lr=1e-2), ConvNet(width=16), batches=rows, validation=validation)
    training.epochs = 60
    training.run(recorder)


@fault("mlp", causes.LABELS_UNRELATED, hidden=True)
def labels_are_shuffled(recorder: Recorder) -> None:
    """The labels were sorted, so that they do not belong to their rows."""
    points, labels = clusters(6400, 1).tensors
    rows = loader(TensorDataset(points, labels.sort().values))
    validation = [*loader(clusters(256, 3), 256)]
    mlp_training(batches=rows, validation=validation, epochs=1).run(recorder)


@fault("cnn", causes.LABELS_UNRELATED, hidden=True)
def images_are_shuffled_without_their_labels(recorder: Recorder) -> None:
    """The images were shuffled in place, and their labels were not."""
    pixels, labels = images(1280, 1).tensors
    order = torch.randperm(len(pixels), generator=generator(7))
    training = cnn_training(batches=loader(TensorDataset(pixels[order], labels)))
    training.run(recorder)


@fault("mlp", causes.INPUT_SCALE)
def pixels_from_0_to_255(recorder: Recorder) -> None:
    """A perceptron gets raw pixels from 0 to 255."""
    pixels, labels = images(1280, 1).tensors
    raw = ((pixels - pixels.min()) / (pixels.max() - pixels.min()) * 255).round().flatten(1)
    model = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    mlp_training(lambda net: sgd(net, lr=0.01), model, batches=loader(TensorDataset(raw, labels)), validation=None).run(
        recorder
    )


@fault("cnn", causes.CONSTANT_INPUTS)
def pixels_divided_as_integers(recorder: Recorder) -> None:
    """Pixels from 0 to 254 are divided by 255 as integers, so that every input of a CNN is 0."""
    pixels, labels = images(1280, 1).tensors
    raw = ((pixels - pixels.min()) / (pixels.max() - pixels.min()) * 254).long()
    rows = loader(TensorDataset((raw // 255).float(), labels))
    cnn_training(lambda model: adam(model, lr=3e-3), batches=rows, validation=None).run(recorder)


@fault("lstm", causes.INPUT_SCALE)
def sequences_with_a_huge_offset(recorder: Recorder) -> None:
    """The waves are prices around 5,000, and the LSTM gets them without normalisation."""
    values, labels = waves(1280, 1).tensors
    rows = loader(TensorDataset(5000 + 20 * values, labels))
    lstm_training(lambda model: adam(model, lr=1e-2), batches=rows, validation=None).run(recorder)


@fault("mlp", causes.INPUT_SCALE)
def one_feature_is_a_year(recorder: Recorder) -> None:
    """The features of a regression contain a year and an income, next to standardised ones."""
    points, targets = curve(1280, 1).tensors
    points = points.clone()
    points[:, 3] = 2000 + 8 * points[:, 3]
    points[:, 4] = 40_000 + 12_000 * points[:, 4]
    rows = loader(TensorDataset(points, targets))
    regression_training(batches=rows, validation=None).run(recorder)


@fault("gpt", causes.NO_MASK)
def gpt_without_causal_mask(recorder: Recorder) -> None:
    """The attention of a GPT has no causal mask, so that it sees the letter that it predicts."""
    gpt_training(lambda model: adamw(model, lr=3e-3), Gpt(causal=False), epochs=3).run(recorder)


@fault("gpt", causes.TARGETS_READ + causes.WRONG_SHIFT)
def targets_of_gpt_are_its_inputs(recorder: Recorder) -> None:
    """The loss of a GPT compares each output with the letter at the same position."""

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        letters = batch[0][:, :-1]
        return functional.cross_entropy(model(letters).flatten(0, 1), letters.flatten())

    gpt_training(loss=loss).run(recorder)


@fault("mlp", causes.RECTIFIED)
def relu_after_the_last_layer(recorder: Recorder) -> None:
    """A perceptron ends with a ReLU, and cross_entropy gets its outputs."""
    mlp_training(model=nn.Sequential(*mlp(), nn.ReLU()), epochs=3).run(recorder)


@fault("mlp", causes.OVER_BATCH)
def log_softmax_over_the_batch(recorder: Recorder) -> None:
    """The log-softmax of a loss has dim=0."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        points, labels = batch
        return functional.nll_loss(functional.log_softmax(model(points), dim=0), labels)

    mlp_training(loss=loss).run(recorder)


@fault("mlp", causes.ONE_CLASS)
def cross_entropy_over_one_output(recorder: Recorder) -> None:
    """A classifier of two classes has one output, and its loss is cross_entropy."""
    points, labels = clusters(1280, 1).tensors
    rows = loader(TensorDataset(points, labels % 2))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        return functional.cross_entropy(model(inputs)[:, :1], torch.zeros_like(targets))

    mlp_training(batches=rows, loss=loss, validation=None).run(recorder)


@fault("mlp", causes.LOSS_FACTOR)
def loss_times_the_size_of_the_data(recorder: Recorder) -> None:
    """The mean loss of a batch is multiplied by the number of rows of the data set, and clipping limits the harm."""
    mlp_training(loss=lambda model, batch: 1280 * class_loss(model, batch), clip=1.0).run(recorder)


@fault("mlp", causes.OTHER_WEIGHTS_EVALUATED)
def evaluation_of_a_copy(recorder: Recorder) -> None:
    """The evaluation gets a copy of the model from before the training."""
    model = mlp()
    copied, optimizer, rows = copy.deepcopy(model), adam(model), loader(clusters(1280, 1))
    (held_out,) = loader(clusters(256, 3), 256)
    with recorder.attach(model, optimizer) as scope:
        for _ in range(5):
            for batch in scope.batches(rows):
                scope.backward(class_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            scope.evaluate(lambda: {"val_loss": class_loss(copied, held_out).item()})


@fault("mlp", causes.NO_LOG_SOFTMAX)
def nll_loss_of_logits(recorder: Recorder) -> None:
    """The loss of a perceptron is nll_loss, which gets its logits."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        points, labels = batch
        return functional.nll_loss(model(points), labels)

    mlp_training(loss=loss).run(recorder)


@fault("cnn", causes.NO_LOG_SOFTMAX)
def nll_loss_of_probabilities(recorder: Recorder) -> None:
    """A network of images ends with a softmax, and nll_loss gets its probabilities."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        pixels, labels = batch
        return functional.nll_loss(model(pixels).softmax(-1), labels)

    cnn_training(lambda model: sgd(model, lr=0.05), loss=loss).run(recorder)


@fault("mlp", causes.DROPOUT, knowable=0)
def dropout_of_nearly_all_inputs(recorder: Recorder) -> None:
    """A perceptron has dropout of 0.9, where keeping 0.9 was meant."""
    first, *others = mlp()
    mlp_training(model=nn.Sequential(first, nn.Dropout(0.9), *others)).run(recorder)


@fault("mlp", causes.DOUBLE_SOFTMAX)
def softmax_before_cross_entropy(recorder: Recorder) -> None:
    """A perceptron ends with a softmax, and cross_entropy applies another one."""
    mlp_training(model=nn.Sequential(*mlp(), nn.Softmax(dim=-1)), epochs=3).run(recorder)


class ProbableWaves(LstmClassifier):
    """An LSTM classifier that returns probabilities."""

    def forward(self, values: Tensor) -> Tensor:
        """Return probabilities in place of logits."""
        return torch.softmax(super().forward(values), dim=-1)


@fault("lstm", causes.DOUBLE_SOFTMAX)
def probabilities_into_cross_entropy(recorder: Recorder) -> None:
    """An LSTM returns probabilities for its users, and the training passes them to CrossEntropyLoss."""
    lstm_training(lambda model: adam(model, lr=1e-2), ProbableWaves(), epochs=4).run(recorder)


@fault("mlp", causes.DOUBLE_SOFTMAX)
def sigmoid_before_bce_with_logits(recorder: Recorder) -> None:
    """A binary classifier ends with a sigmoid, and binary_cross_entropy_with_logits applies another one."""
    points, labels = clusters(1280, 1).tensors
    rows = loader(TensorDataset(points, (labels < 5).float()[:, None]))
    model = nn.Sequential(*mlp(out=1), nn.Sigmoid())

    def loss(net: nn.Module, batch: list[Tensor]) -> Tensor:
        return functional.binary_cross_entropy_with_logits(net(batch[0]), batch[1])

    mlp_training(model=model, batches=rows, loss=loss, validation=None).run(recorder)


def summed_class_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the sum of the cross-entropy over the rows."""
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


@fault("cnn", causes.SUMMED)
def loss_is_summed_under_sgd(recorder: Recorder) -> None:
    """The loss of a convolutional network is summed over 32 rows, at a learning rate for means."""
    cnn_training(lambda model: sgd(model, lr=0.05), loss=summed_class_loss).run(recorder)


@fault("gpt", causes.SUMMED)
def loss_of_tokens_is_summed(recorder: Recorder) -> None:
    """The loss of a GPT is summed over 512 tokens, and SGD has a learning rate for means."""

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        letters = batch[0]
        logits = model(letters[:, :-1]).flatten(0, 1)
        return functional.cross_entropy(logits, letters[:, 1:].flatten(), reduction="sum")

    gpt_training(lambda model: sgd(model, lr=0.02), loss=loss, clip=None).run(recorder)


@fault("gpt", causes.PADDING)
def padding_counts_in_the_loss(recorder: Recorder) -> None:
    """A GPT learns sums of about 9 letters in rows of 33, and predicts their padding, too."""
    rows, validation = loader(padded_sums(1600, 1), 16), [*loader(padded_sums(64, 2), 64)]
    gpt_training(lambda model: adamw(model, lr=3e-3), batches=rows, validation=validation).run(recorder)


@fault("lstm", causes.PADDING)
def padding_counts_in_the_loss_of_an_lstm(recorder: Recorder) -> None:
    """An LSTM language model predicts the padding of short rows."""

    class LetterLstm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, 32, padding_idx=PADDING)
            self.lstm = nn.LSTM(32, 64, batch_first=True)
            self.head = nn.Linear(64, VOCABULARY)

        def forward(self, letters: Tensor) -> Tensor:
            return self.head(self.lstm(self.tokens(letters))[0])

    model, rows = LetterLstm(), loader(padded_sums(1600, 1), 16)
    Training(model, adam(model, lr=3e-3), rows, letter_loss, epochs=2, clip=1.0).run(recorder)


@fault("gpt", (*causes.IGNORED_LABELS, *causes.NONFINITE), way="attach step")
def some_batches_have_only_ignored_labels(recorder: Recorder) -> None:
    """Long prompts push all labels of some batches of 2 rows out of the context, so that their mean loss is NaN."""
    model = Gpt()
    optimizer = adamw(model, lr=1e-3)
    rows = text(2 * 200).tensors[0]
    prompts = torch.randint(8, 60, (len(rows), 1), generator=generator(2))
    labels = rows[:, 1:].masked_fill(torch.arange(BLOCK)[None, :] < prompts, -100)
    batches = [*zip(rows[:, :-1].split(2), labels.split(2), strict=True)]
    with recorder.attach(model, optimizer, loop="step", length=200) as scope:
        for letters, targets in scope.batches(batches):
            scope.backward(functional.cross_entropy(model(letters).flatten(0, 1), targets.flatten()))
            optimizer.step()
            optimizer.zero_grad()


@fault("gpt", causes.IGNORED_LABELS)
def answers_are_cut_off(recorder: Recorder) -> None:
    """The labels of the prompts are -100, and the context ends before the answers, except in one row of eight."""
    letters = text(1600).tensors[0]
    labels = torch.full_like(letters[:, 1:], -100)
    labels[::8, -2:] = letters[::8, -2:]
    rows = loader(TensorDataset(letters[:, :-1], labels), 16)

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    gpt_training(batches=rows, loss=loss, validation=None).run(recorder)


@fault("mlp", causes.LEAK, hidden=True)
def validation_rows_are_in_the_training_data(recorder: Recorder) -> None:
    """Rows were augmented before the split, so that all validation rows are in the training data, too."""
    data = clusters(320, 1, spread=2.5)
    validation = [*loader(TensorDataset(data.tensors[0][:128], data.tensors[1][:128]), 128)]
    mlp_training(model=mlp(128, 128), batches=loader(data), validation=validation, epochs=25).run(recorder)


@fault("cnn", causes.SORTED_DATA)
def images_sorted_by_class(recorder: Recorder) -> None:
    """The images are sorted by class, as in their folders, and not shuffled."""
    pixels, labels = images(1280, 1).tensors
    order = labels.argsort(stable=True)
    rows = loader(TensorDataset(pixels[order], labels[order]), shuffle=False)
    cnn_training(lambda model: sgd(model, lr=0.05), batches=rows, epochs=5).run(recorder)


@fault("mlp", causes.SORTED_DATA)
def points_of_few_classes_sorted(recorder: Recorder) -> None:
    """The rows of three classes are sorted, so that a batch in four has rows of two classes."""
    points, labels = clusters(1280, 1).tensors
    chosen = (labels < 3).nonzero().flatten()
    order = chosen[labels[chosen].argsort(stable=True)]
    rows = loader(TensorDataset(points[order], labels[order]), shuffle=False)
    mlp_training(batches=rows, epochs=12).run(recorder)


@fault("lstm", causes.SORTED_DATA)
def sequences_sorted_by_class(recorder: Recorder) -> None:
    """Sequences are read from one file per class, one after the other."""
    values, labels = waves(1280, 1).tensors
    order = labels.argsort(stable=True)
    rows = loader(TensorDataset(values[order], labels[order]), shuffle=False)
    lstm_training(lambda model: adam(model, lr=1e-2), batches=rows).run(recorder)


@fault("mlp", ("targets-not-normalised", "initial-loss-high", *causes.INPUT_SCALE), hidden=True)
def targets_in_thousands(recorder: Recorder) -> None:
    """The targets of a regression are prices around 50,000, so that 200 steps of Adam cannot reach them."""
    points, targets = curve(1280, 1).tensors
    rows = loader(TensorDataset(points, 50_000 + 8_000 * targets))
    regression_training(batches=rows, validation=None).run(recorder)


@fault("mlp", (*causes.LABELS_UNRELATED, "targets-off-by-one"), hidden=True)
def labels_of_the_next_row(recorder: Recorder) -> None:
    """The labels are shifted by one row, since one row was dropped from the points and not from the labels."""
    points, labels = clusters(6400, 1).tensors
    rows = loader(TensorDataset(points[1:], labels[:-1]))
    mlp_training(batches=rows, epochs=1).run(recorder)


@fault("mlp", causes.BROADCAST)
def targets_broadcast_in_the_loss(recorder: Recorder) -> None:
    """Predictions of shape (32, 1) minus targets of shape (32,) give a table of 32 x 32 differences."""
    points, targets = curve(1280, 1).tensors
    rows = loader(TensorDataset(points, targets.squeeze(1)))

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    regression_training(batches=rows, loss=loss, validation=None).run(recorder)


@fault("cnn", ("augmentation-too-strong", *causes.LABELS_UNRELATED), hidden=True)
def rows_are_mixed_by_a_wrong_reshape(recorder: Recorder) -> None:
    """Images of shape (32, 16, 16, 1) are reshaped where they should be permuted, which mixes their pixels."""
    pixels, labels = images(6400, 1, noise=1.0).tensors
    mixed = pixels.expand(-1, 4, -1, -1).permute(0, 2, 3, 1).reshape(-1, 4, 16, 16)[:, :1]
    rows = loader(TensorDataset(mixed[torch.randperm(6400, generator=generator(1))], labels))
    cnn_training(batches=rows, validation=None, epochs=1).run(recorder)


@fault("mlp", causes.OUT_OF_REACH)
def regression_ends_with_a_relu(recorder: Recorder) -> None:
    """A perceptron for a regression ends with a ReLU, and half of the targets are negative."""
    regression_training(model=nn.Sequential(mlp(out=1), nn.ReLU()), epochs=3).run(recorder)


@fault("mlp", causes.OUT_OF_REACH)
def regression_ends_with_a_sigmoid(recorder: Recorder) -> None:
    """A perceptron for a regression ends with a sigmoid, and its targets go from −5 to 5."""
    rows = loader(curve(1280, 1, scale=3.0))
    model = nn.Sequential(mlp(out=1), nn.Sigmoid())
    regression_training(model=model, batches=rows, validation=None, epochs=3).run(recorder)


@fault("mlp", causes.EXTREME_TARGETS)
def missing_targets_are_a_number(recorder: Recorder) -> None:
    """Three of a hundred targets of a regression are missing, and are −999 in the file."""
    points, targets = curve(1280, 1).tensors
    targets[torch.rand(len(targets), generator=generator(8)) < 0.03] = -999.0
    regression_training(batches=loader(TensorDataset(points, targets)), validation=None).run(recorder)


@fault("mlp", causes.MEAN_OUTPUT, knowable=200)
def diffusion_predicts_other_noise(recorder: Recorder) -> None:
    """A denoiser is trained on noise that is drawn again instead of the noise that was added to its inputs."""

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        noisy = 0.7 * batch[0] + 0.7 * torch.randn_like(batch[0])
        return functional.mse_loss(model(noisy), torch.randn_like(batch[0]))

    points = clusters(1280, 1).tensors[0]
    model = mlp(out=points.shape[1])
    regression_training(model=model, batches=loader(TensorDataset(points)), loss=loss, validation=None, epochs=8).run(
        recorder
    )


@fault("mlp", causes.NOT_PROBABILITIES)
def several_labels_under_cross_entropy(recorder: Recorder) -> None:
    """Rows with about three labels of ten, as zeros and ones, are trained with cross_entropy."""
    points, labels = clusters(1280, 1).tensors
    several = functional.one_hot(labels, 10) + functional.one_hot((labels + 3) % 10, 10)
    several[points[:, 0] > 0, 0] = 1
    rows = loader(TensorDataset(points, several.clamp(max=1).float()))

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    mlp_training(batches=rows, loss=loss, validation=None, epochs=3).run(recorder)


@fault("mlp", causes.NO_LOG_SOFTMAX)
def student_gives_kl_div_its_probabilities(recorder: Recorder) -> None:
    """A student is distilled with kl_div of its probabilities, of which no logarithm is taken."""
    torch.manual_seed(3)
    teacher = mlp()

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        with torch.no_grad():
            soft = (teacher(batch[0]) / 2).softmax(-1)
        return 4 * functional.kl_div((model(batch[0]) / 2).softmax(-1), soft, reduction="batchmean")

    mlp_training(loss=loss, validation=None, epochs=3).run(recorder)


@fault("gpt", causes.FREQUENCIES, knowable=100)
def outputs_are_flattened_in_another_order(recorder: Recorder) -> None:
    """A transposition, copied from a recurrent network, puts the logits of each time next to each other."""

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        (letters,) = batch
        logits = model(letters[:, :-1]).transpose(0, 1)
        return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), letters[:, 1:].flatten())

    gpt_training(lambda model: adamw(model, lr=3e-3), loss=loss).run(recorder)


@fault("mlp", causes.MEAN_OUTPUT, knowable=100)
def factors_of_unit_variance(recorder: Recorder) -> None:
    """A recommender keeps the initialisation of nn.Embedding, so that its first ratings have a deviation of 6."""
    model = Ratings(std=1.0)
    Training(model, adam(model), loader(ratings(6400, 1), 64), square_loss, epochs=3).run(recorder)


@fault("gpt", causes.NO_MASK)
def decoder_without_mask(recorder: Recorder) -> None:
    """The decoder of an encoder-decoder model gets no mask, so that each position sees the letter it should predict."""
    model = Reversing(causal=False)
    Training(model, adam(model, lr=3e-3), loader(reversed_letters(1600, 1), 16), reversing_loss, epochs=2).run(recorder)


@fault("mlp", causes.TRAINED_REFERENCE, knowable=50)
def reference_is_the_model_itself(recorder: Recorder) -> None:
    """A preference loss compares the model with a reference that is no copy, so that it is ln 2 at every step."""
    model = mlp()
    reference = model

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        points, labels = batch
        with torch.no_grad():
            expected = -functional.cross_entropy(reference(points), labels, reduction="none")
        advantage = -functional.cross_entropy(model(points), labels, reduction="none") - expected
        return -functional.logsigmoid(advantage).mean()

    mlp_training(model=model, loss=loss).run(recorder)


@fault("mlp", causes.FREQUENCIES, knowable=100)
def rare_classes_with_shuffled_labels(recorder: Recorder) -> None:
    """Four fifths of the labels are one class, and a merge of two tables has put labels to other rows."""
    points, labels = clusters(6400, 1).tensors
    shuffled = labels.clamp(max=2)[torch.randperm(len(labels), generator=generator(5))]
    mlp_training(batches=loader(TensorDataset(points, shuffled)), validation=None, epochs=2).run(recorder)
