"""Trainings rebuilt after public threads whose cause is known, each with its healthy twin.

Their authors had not seen the detectors; models and data are smaller here. The links lead to the threads.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from tests.zoo import causes
from tests.zoo.case import Build, Model, fault, healthy
from tests.zoo.data import CLASSES, FEATURES, clusters, generator, images, loader
from tests.zoo.models import square_loss
from tests.zoo.recorder import Recorder
from tests.zoo.training import Training, adam, adamw, sgd

Pair = Callable[[Recorder, bool], None]


def pair(model: Model, expected: tuple[str, ...], *, falls: bool = True) -> Callable[[Pair], Pair]:
    """Register a function as a training with a fault, and as its healthy twin.

    Args:
        model: the kind of model.
        expected: ids of findings that name the cause.
        falls: whether the loss of the twin falls.
    """

    def register(train: Pair) -> Pair:
        name = f"thread_{train.__name__}"
        fault(model, expected)(_build(train, name, train.__doc__ or "", is_broken=True))
        twin = f"The twin of `{name.replace('_', '-')}` without its fault."
        healthy(model, falls=falls)(_build(train, f"{name}_twin", twin, is_broken=False))
        return train

    return register


def _build(train: Pair, name: str, sentence: str, *, is_broken: bool) -> Build:
    def build(recorder: Recorder) -> None:
        train(recorder, is_broken)

    build.__name__, build.__doc__, build.__module__ = name, sentence, __name__
    return build


def of_batch(compute: Callable[..., Tensor]) -> Callable[[nn.Module, list[Tensor]], Tensor]:
    """Return a loss of a model and a batch that passes the tensors of the batch one by one."""
    return lambda model, batch: compute(model, *batch)


class Vae(nn.Module):
    """An autoencoder of the points of clusters with a Gaussian code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(FEATURES, 64), mlp_of(4, 64, FEATURES)
        self.mean, self.log_variance = nn.Linear(64, 4), nn.Linear(64, 4)

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map points to their reconstructions, and to the means and logarithms of variances of their codes."""
        hidden = self.encoder(points).relu()
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        return self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp()), mean, log_variance


def mlp_of(*widths: int) -> nn.Sequential:
    """Return a perceptron with these widths, from the inputs to the outputs."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@pair("mlp", causes.SAME_OUTPUTS)  # github.com/zdebruine/MMVAE/pull/19
def reconstruction_averaged_and_kl_summed(recorder: Recorder, is_broken: bool) -> None:
    """The reconstruction of an autoencoder is averaged over its elements, but its KL term summed over all."""

    def loss(model: nn.Module, points: Tensor, _: Tensor) -> Tensor:
        outputs, mean, log_variance = model(points)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        share = 1 if is_broken else 1 / points.numel()
        return functional.mse_loss(outputs, points) + share * divergence

    model = Vae()
    Training(model, adam(model), loader(clusters(1280, 1)), of_batch(loss), epochs=10).run(recorder)


@pair("lstm", causes.NO_GRADIENT_LEFT)  # github.com/SeanNaren/warp-ctc/issues/59
def fewer_frames_than_labels(recorder: Recorder, is_broken: bool) -> None:
    """An encoder leaves fewer frames than labels, and zero_infinity turns the infinite CTC loss into 0."""
    stride, sounds = (10, 2)[not is_broken], torch.randn(11, 16, generator=generator(0))
    labels = torch.randint(1, 11, (1000, 5), generator=generator(1))
    frames = sounds[labels.repeat_interleave(8, 1)] + 0.3 * torch.randn(1000, 40, 16, generator=generator(2))

    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = nn.Conv1d(16, 64, 5, stride, 2), nn.Linear(64, 11)

        def forward(self, sound: Tensor) -> Tensor:
            return self.out(self.conv(sound.transpose(1, 2)).transpose(1, 2).relu()).log_softmax(-1)

    def loss(model: nn.Module, sound: Tensor, spoken: Tensor) -> Tensor:
        outputs = model(sound).transpose(0, 1)
        lengths = torch.full((len(sound),), len(outputs)), torch.full((len(sound),), 5)
        return functional.ctc_loss(outputs, spoken, *lengths, zero_infinity=True)

    model = Speech()
    Training(model, adam(model, 3e-3), loader(TensorDataset(frames, labels)), of_batch(loss)).run(recorder)


@pair("mlp", causes.BROADCAST, falls=False)  # github.com/RITCHIEHuang/DeepRL_Algorithms/issues/13
def advantages_are_a_column(recorder: Recorder, is_broken: bool) -> None:
    """The advantages of a policy gradient have the shape (N, 1) and the ratios (N,), so that the product is N × N."""
    model, states = mlp_of(4, 64, 3), torch.randn(256, 4, generator=generator(0))
    optimizer = adam(model)
    with recorder.attach(model, optimizer) as scope:
        for _ in scope.batches([states] * 200):
            policy = Categorical(logits=model(states))
            actions = policy.sample()
            rewards = (actions == states[:, :3].argmax(1)).float()
            advantages = (rewards - rewards.mean())[:, None] if is_broken else rewards - rewards.mean()
            ratio = (policy.log_prob(actions) - policy.log_prob(actions).detach()).exp()
            optimizer.zero_grad()
            scope.backward(-torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean())
            optimizer.step()


class Discs(nn.Module):
    """A convolutional network with a logit for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Conv2d(1, 12, 3, padding=1), nn.Conv2d(12, 12, 3, padding=1)
        self.layers = nn.Sequential(first, nn.BatchNorm2d(12), nn.ReLU(), second, nn.ReLU(), nn.Conv2d(12, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """Map images to logits."""
        return self.layers(pixels)


@pair("cnn", causes.NOT_PROBABILITIES)  # github.com/qubvel/segmentation_models/issues/95
def masks_from_0_to_255(recorder: Recorder, is_broken: bool) -> None:
    """The masks of a segmentation are 0 and 255 instead of 0 and 1, so that the loss becomes negative."""
    axis, centres = torch.arange(16.0), 10 * torch.rand(640, 2, 1, generator=generator(0)) + 3
    rows, columns = ((axis - centres[:, index]).square() for index in (0, 1))
    masks = (rows[:, :, None] + columns[:, None] < 12).float()[:, None]
    pixels = 0.5 * masks + 0.4 * torch.randn(640, 1, 16, 16, generator=generator(1))

    def loss(model: nn.Module, shown: Tensor, mask: Tensor) -> Tensor:
        outputs = model(shown)
        shares = outputs.sigmoid()
        dice = 1 - (2 * (shares * mask).sum() + 1) / (shares.sum() + mask.sum() + 1)
        return functional.binary_cross_entropy_with_logits(outputs, mask) + dice

    model, data = Discs(), TensorDataset(pixels, masks * (255 if is_broken else 1))
    Training(model, adam(model, 2e-3), loader(data, 20), of_batch(loss)).run(recorder)


def key_words(rows: int, seed: int, length: int = 20) -> TensorDataset:
    """Return rows of words, of which one in the first six names one of four classes, with padding of 0 at the end."""
    labels = torch.randint(4, (rows,), generator=generator(seed))
    words = torch.randint(10, 60, (rows, length), generator=generator(seed + 1))
    places = torch.randint(6, (rows,), generator=generator(seed + 2))
    words[torch.arange(rows), places] = 1 + labels
    ends = torch.randint(8, length, (rows, 1), generator=generator(seed + 3))
    return TensorDataset(words.where(torch.arange(length) < ends, 0), labels)


class WordAttention(nn.Module):
    """Attention of one query over words, with a mask of padding, or with a softmax over another dimension."""

    def __init__(self, *, is_inverted: bool = False, dim: int = 1) -> None:
        super().__init__()
        self.words, self.score, self.out = nn.Embedding(60, 32), nn.Linear(32, 1), nn.Linear(32, 4)
        self.is_inverted, self.dim = is_inverted, dim

    def forward(self, words: Tensor) -> Tensor:
        """Map words to the logits of their classes."""
        hidden, hidden_words = self.words(words), (words == 0) != self.is_inverted
        scores = self.score(hidden).squeeze(-1)
        if self.dim == 1:
            scores = scores.masked_fill(hidden_words, -1e9)
        return self.out((scores.softmax(self.dim)[..., None] * hidden).sum(1))


@pair("gpt", causes.SAME_OUTPUTS)  # github.com/InseeFrLab/torchTextClassifiers/pull/92
def mask_of_padding_is_inverted(recorder: Recorder, is_broken: bool) -> None:
    """The mask of an attention is inverted, so that only the padding takes part."""
    model = WordAttention(is_inverted=is_broken)
    Training(model, adamw(model, 3e-3), loader(key_words(2000, 1))).run(recorder)


@pair("lstm", causes.OVER_BATCH)  # github.com/PetrochukM/PyTorch-NLP/issues/2
def attention_normalised_over_the_batch(recorder: Recorder, is_broken: bool) -> None:
    """The softmax of an attention runs over the rows of the batch and not over the words."""
    model, data = WordAttention(dim=0 if is_broken else 1), key_words(2000, 1)
    Training(model, adam(model, 2e-3), loader(data, 40)).run(recorder)


@pair("mlp", causes.DOUBLE_SOFTMAX)  # github.com/pyg-team/pytorch_geometric/issues/2916
def log_softmax_before_a_binary_loss(recorder: Recorder, is_broken: bool) -> None:
    """A classifier of several labels ends with a log-softmax, and gets a binary cross-entropy with logits."""
    points, numbers = clusters(1280, 1).tensors
    labels = torch.stack([numbers >> bit & 1 for bit in range(4)], 1).float()
    model = mlp_of(FEATURES, 64, 4)
    layers = nn.Sequential(model, nn.LogSoftmax(1)) if is_broken else model

    def loss(trained: nn.Module, rows: Tensor, bits: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(trained(rows), bits)

    Training(layers, adam(layers), loader(TensorDataset(points, labels)), of_batch(loss)).run(recorder)


class Listed(nn.Module):
    """A perceptron whose hidden layers are in a list of Python, or in a module list."""

    def __init__(self, *, is_registered: bool) -> None:
        super().__init__()
        hidden = [nn.Linear(FEATURES, 64), nn.Linear(64, 64), nn.Linear(64, 64)]
        self.hidden = nn.ModuleList(hidden) if is_registered else hidden
        self.head = nn.Linear(64, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        """Map points to the logits of their classes."""
        for layer in self.hidden:
            points = layer(points).relu()
        return self.head(points)


@pair("mlp", causes.NOT_REGISTERED)  # github.com/pytorch/pytorch/issues/715
def hidden_layers_in_a_list(recorder: Recorder, is_broken: bool) -> None:
    """The hidden layers are in a list of Python, so that they are no parameters of the model."""
    model = Listed(is_registered=not is_broken)
    Training(model, adam(model), loader(clusters(1280, 1))).run(recorder)


@pair("mlp", causes.BOUNDED_LOGITS)  # github.com/ustcllm/RecStudio/issues/21
def cosines_without_a_temperature(recorder: Recorder, is_broken: bool) -> None:
    """A contrastive loss compares cosines without a temperature, so that its logits are between −1 and 1."""

    def loss(model: nn.Module, points: Tensor, _: Tensor) -> Tensor:
        views = [functional.normalize(model(points + 0.3 * torch.randn_like(points)), dim=1) for _ in range(2)]
        logits = views[0] @ views[1].T
        return functional.cross_entropy(logits if is_broken else logits / 0.1, torch.arange(len(points)))

    model = mlp_of(FEATURES, 128, 32)
    Training(model, adam(model), loader(clusters(1280, 1), 128), of_batch(loss), epochs=20).run(recorder)


@pair("cnn", causes.NEVER_LOADED)  # github.com/pytorch/examples/issues/1029
def checkpoint_with_another_prefix(recorder: Recorder, is_broken: bool) -> None:
    """The keys of a checkpoint have a prefix, so that strict=False loads nothing into the frozen layers."""
    trained = nn.Sequential(mlp_of(FEATURES, 64, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    optimizer, (points, labels) = adam(trained, 3e-3), clusters(1280, 1).tensors
    for _ in range(200):
        optimizer.zero_grad()
        functional.cross_entropy(trained(points), labels).backward()
        optimizer.step()
    base = mlp_of(FEATURES, 64, 32)
    prefix = "model." if is_broken else ""
    base.load_state_dict({prefix + name: value for name, value in trained[0].state_dict().items()}, strict=False)
    base.requires_grad_(False)
    head = nn.Linear(32, 2)
    data = TensorDataset(points, labels % 2)
    Training(nn.Sequential(base, nn.ReLU(), head), adam(head), loader(data)).run(recorder)


@pair("cnn", causes.NONFINITE)  # github.com/open-mmlab/mmdetection/issues/3901
def widths_of_boxes_are_negative(recorder: Recorder, is_broken: bool) -> None:
    """Some boxes are given by their size instead of their second corner, so that logarithms of widths are NaN."""
    points, corners = clusters(1280, 1).tensors[0], 4 * torch.rand(1280, 4, generator=generator(2)) + 1
    boxes = torch.cat([corners[:, :2], corners[:, :2] + corners[:, 2:]], 1)
    if is_broken:
        boxes[7::100, 2:] -= boxes[7::100, :2] + 6

    def loss(model: nn.Module, rows: Tensor, box: Tensor) -> Tensor:
        return functional.smooth_l1_loss(model(rows), torch.log(box[:, 2:] - box[:, :2]))

    model = mlp_of(FEATURES, 64, 2)
    Training(model, sgd(model, 0.02), loader(TensorDataset(points, boxes)), of_batch(loss)).run(recorder)


@pair("mlp", causes.NONFINITE)  # github.com/adambielski/siamese-triplet/issues/18
def root_of_a_distance_of_zero(recorder: Recorder, is_broken: bool) -> None:
    """Pairs of a contrastive loss contain equal rows, and the root of their distance 0 has an infinite gradient."""
    points, labels = clusters(1280, 1).tensors
    others = torch.randint(1280, (1280,), generator=generator(3)).where(torch.arange(1280) % 40 > 0, torch.arange(1280))

    def loss(model: nn.Module, first: Tensor, second: Tensor, same: Tensor) -> Tensor:
        squares = (model(first) - model(second)).square().sum(1)
        distances = (squares if is_broken else squares + 1e-8).sqrt()
        return (same * squares + (1 - same) * (1 - distances).clamp(min=0).square()).mean()

    data = TensorDataset(points, points[others], (labels == labels[others]).float())
    model = mlp_of(FEATURES, 64, 16)
    Training(model, adam(model), loader(data), of_batch(loss)).run(recorder)


@pair("lstm", causes.CLASS_IGNORED)  # github.com/nyu-mll/jiant/issues/925
def ignored_index_is_a_class(recorder: Recorder, is_broken: bool) -> None:
    """The most frequent tag has the number of the padding, which the loss ignores."""
    words = torch.randint(1, 80, (1500, 16), generator=generator(0))
    tags = torch.randint(5, (80,), generator=generator(1)).where(torch.arange(80) >= 30, 0)[words]
    is_padding = torch.arange(16) >= torch.randint(8, 17, (1500, 1), generator=generator(2))
    targets = tags.masked_fill(is_padding, 0 if is_broken else -100)
    model = nn.Sequential(nn.Embedding(80, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))

    def loss(trained: nn.Module, row: Tensor, target: Tensor) -> Tensor:
        ignored = 0 if is_broken else -100
        return functional.cross_entropy(trained(row).flatten(0, 1), target.flatten(), ignore_index=ignored)

    data = TensorDataset(words.masked_fill(is_padding, 0), targets)
    Training(model, adam(model, 3e-3), loader(data, 30), of_batch(loss)).run(recorder)


class InMemory(Dataset[tuple[Tensor, Tensor]]):
    """Images that are normalised when they are read, in place or not."""

    def __init__(self, data: TensorDataset, *, in_place: bool) -> None:
        self.pixels, self.labels = data.tensors
        self.in_place = in_place

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pixels = self.pixels[index] if self.in_place else self.pixels[index].clone()
        return pixels.sub_(0.3).div_(0.35), self.labels[index]


@pair("cnn", causes.INPUTS_DRIFT)  # github.com/facebookresearch/pycls/pull/21
def images_normalised_in_place(recorder: Recorder, is_broken: bool) -> None:
    """A data set normalises its images in place, so that every epoch normalises them once more."""
    pixels, labels = images(640, 1).tensors
    data = InMemory(TensorDataset(pixels / 4, labels), in_place=is_broken)
    layers = nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(256, CLASSES))
    Training(model, adam(model), loader(data), epochs=10).run(recorder)


@pair("mlp", causes.RATE_TOO_LOW)  # github.com/ThilinaRajapakse/simpletransformers/issues/234
def head_with_the_rate_of_its_encoder(recorder: Recorder, is_broken: bool) -> None:
    """A new head on a trained encoder gets the small learning rate that is right for the encoder."""
    encoder = mlp_of(FEATURES, 256, 32)
    points, labels = clusters(1280, 1).tensors
    old = nn.Sequential(encoder, nn.ReLU(), nn.Linear(32, CLASSES))
    optimizer = adam(old)
    for _ in range(200):
        optimizer.zero_grad()
        functional.cross_entropy(old(points), labels).backward()
        optimizer.step()
    head = nn.Linear(32, 2)
    rates = 4e-6, (4e-6 if is_broken else 1e-2)
    groups = [{"params": part.parameters(), "lr": rate} for part, rate in zip((encoder, head), rates, strict=True)]
    data = TensorDataset(points, (torch.randperm(CLASSES, generator=generator(5)) % 2)[labels])
    Training(nn.Sequential(encoder, nn.ReLU(), head), torch.optim.AdamW(groups), loader(data)).run(recorder)


@pair("mlp", causes.NORM_MOMENTUM)  # github.com/pytorch/pytorch/issues/4741
def momentum_of_keras_in_batchnorm(recorder: Recorder, is_broken: bool) -> None:
    """BatchNorm has the momentum 0.99 of Keras, where it means the opposite, and gets small batches."""
    norm = nn.BatchNorm1d(64, momentum=0.99 if is_broken else 0.05)
    model = nn.Sequential(nn.Linear(FEATURES, 64), norm, nn.ReLU(), nn.Linear(64, 1))
    points = torch.randn(1600, FEATURES, generator=generator(0))
    data = TensorDataset(points, points[:, :1] * points[:, 1:2] + points[:, 2:3])
    held_out = [*loader(TensorDataset(*(part[:400] for part in data.tensors)), 400)]
    Training(model, adam(model), loader(data, 8), square_loss, held_out, epochs=4).run(recorder)


class Reader(nn.Module):
    """An encoder and a decoder over letters, and the letters that it generates."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.out = nn.Embedding(14, 48), nn.Linear(48, 14)
        self.encoder, self.decoder = (nn.GRU(48, 48, batch_first=True) for _ in range(2))

    def forward(self, source: Tensor, read: Tensor) -> Tensor:
        """Map the source and the letters that the decoder reads to the logits of its outputs."""
        state = self.encoder(self.letters(source))[1]
        return self.out(self.decoder(self.letters(read), state)[0])

    @torch.no_grad()
    def generated(self, source: Tensor) -> Tensor:
        """Return the likeliest letters, each after those before."""
        read = torch.full((len(source), 1), 13)
        for _ in range(source.shape[1]):
            read = torch.cat([read, self(source, read)[:, -1:].argmax(-1)], 1)
        return read[:, 1:]


@pair("lstm", causes.TARGETS_READ)  # github.com/Currie32/Text-Summarization-with-Amazon-Reviews/issues/3
def decoder_without_a_start_symbol(recorder: Recorder, is_broken: bool) -> None:
    """The decoder reads the letters that it is to predict, since the start symbol is forgotten."""
    source = torch.randint(1, 13, (1500, 4), generator=generator(0))
    starts, model = torch.full((1500, 1), 13), Reader()

    def loss(trained: nn.Module, row: Tensor, target: Tensor) -> Tensor:
        read = target if is_broken else torch.cat([starts[: len(row)], target[:, :-1]], 1)
        return functional.cross_entropy(trained(row, read).flatten(0, 1), target.flatten())

    held_out = source[:200]
    measure = lambda: {"val_token_acc": (model.generated(held_out) == held_out.flip(1)).float().mean().item()}
    data = TensorDataset(source, source.flip(1))
    validation = [[held_out, held_out.flip(1)]]
    Training(model, adam(model, 5e-3), loader(data, 30), of_batch(loss), validation, epochs=6, measure=measure).run(
        recorder
    )


@pair("mlp", causes.INPUT_SCALE)  # github.com/ageron/handson-ml3/pull/20
def raw_columns_of_a_table(recorder: Recorder, is_broken: bool) -> None:
    """The raw columns of a table, of very different scales, go into a regression instead of the normalised ones."""
    normal = torch.randn(1600, 4, generator=generator(0))
    raw = normal * torch.tensor([1.9, 12.0, 1100.0, 2.0]) + torch.tensor([3.9, 28.0, 1400.0, -119.6])
    targets = (0.8 * normal[:, 0] + 0.3 * normal[:, 1] * normal[:, 3])[:, None]
    model, data = mlp_of(4, 30, 30, 1), TensorDataset(raw if is_broken else normal, targets)
    Training(model, adam(model, 3e-3), loader(data), square_loss, epochs=8).run(recorder)
