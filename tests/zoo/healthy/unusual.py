"""Healthy trainings with unusual settings that detectors could mistake for faults."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, LinearLR, OneCycleLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from tests.zoo.case import healthy
from tests.zoo.data import (
    BLOCK,
    CLASSES,
    FEATURES,
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
    FunctionalDropout,
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


def train_quietly(model: nn.Module, optimizer: Any, batches: Any, loss: Any = class_loss, epochs: int = 2) -> None:
    """Train without hooks, as for a model that a case fine-tunes."""
    for _ in range(epochs):
        for batch in batches:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()


@healthy("gpt")
def gpt_under_bfloat16_autocast(recorder: Recorder) -> None:
    """AdamW on a GPT under autocast in bfloat16."""

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return letter_loss(model, batch)

    gpt_training(lambda model: adamw(model, lr=3e-3), loss=loss, epochs=1).run(recorder)


@healthy("gpt")
def gpt_with_bfloat16_weights(recorder: Recorder) -> None:
    """AdamW on a GPT with bfloat16 weights and a learning rate whose updates are not rounded away."""
    gpt_training(lambda model: adamw(model, lr=3e-3), Gpt().bfloat16(), epochs=1).run(recorder)


class Adapted(nn.Module):
    """A linear layer with a trained update of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the output of the frozen layer and its update."""
        return self.base(rows) + rows @ self.down.T @ self.up.T


@healthy("gpt", falls=False)
def low_rank_adapters_on_a_frozen_gpt(recorder: Recorder) -> None:
    """Adapters of rank 4, whose second matrix starts at 0, adapt a trained and frozen GPT to rows with padding."""
    model = Gpt()
    train_quietly(model, adamw(model, lr=3e-3), loader(text(800), 16), letter_loss, epochs=1)
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.up = Adapted(block.qkv), Adapted(block.up)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    gpt_training(
        lambda _: torch.optim.AdamW(trained, 5e-3),
        model,
        batches=loader(padded_sums(1600, 1), 16),
        loss=sum_loss,
        epochs=4,
    ).run(recorder)


def sum_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the loss of the letters without padding."""
    letters, targets = batch[0][:, :-1], batch[0][:, 1:]
    logits = model(letters).flatten(0, 1)
    return functional.cross_entropy(logits, targets.flatten(), ignore_index=PADDING)


def trained_network() -> ConvNet:
    """Return a convolutional network that was trained on other images."""
    model = ConvNet()
    train_quietly(model, adam(model, lr=3e-3), loader(images(1280, 21, noise=0.8)))
    return model


@healthy("cnn")
def fine_tuning_of_a_head(recorder: Recorder) -> None:
    """A new head is trained on a frozen, trained trunk in eval mode; the optimizer has the head alone."""
    model = trained_network()
    model.features.requires_grad_(False).eval()
    model.head = nn.Linear(32, CLASSES)
    model.train = lambda mode=True: model  # type: ignore[method-assign, assignment]
    cnn_training(lambda net: torch.optim.Adam(net.head.parameters(), 1e-2), model).run(recorder)


@healthy("cnn")
def fine_tuning_with_all_parameters_in_the_optimizer(recorder: Recorder) -> None:
    """The trunk is trained and frozen, and the optimizer was given model.parameters()."""
    model = trained_network()
    model.features.requires_grad_(False)
    model.head = nn.Linear(32, CLASSES)
    cnn_training(lambda net: adam(net, lr=1e-2), model).run(recorder)


@healthy("cnn")
def fine_tuning_at_a_low_rate(recorder: Recorder) -> None:
    """All layers of a trained network are fine-tuned by SGD at a learning rate of 1e-3."""
    cnn_training(lambda net: sgd(net, lr=1e-3), trained_network()).run(recorder)


@healthy("mlp", falls=False)
def gan_with_two_scopes(recorder: Recorder) -> None:
    """A GAN on points of a circle, with a scope for each network."""
    noise = generator(3)
    networks = [nn.Sequential(nn.Linear(size, 32), nn.ReLU(), nn.Linear(32, out)) for size, out in ((8, 2), (2, 1))]
    generating, critic = networks
    optimizers = [torch.optim.Adam(network.parameters(), 1e-3, betas=(0.5, 0.999)) for network in networks]
    angles = 6.28 * torch.rand(64 * 200, generator=noise)
    batches = torch.stack([angles.cos(), angles.sin()], 1).split(64)
    first = recorder.attach(generating, optimizers[0])
    second = recorder.attach(critic, optimizers[1])
    with first, second:
        for points in first.batches(second.batches(batches)):
            drawn = torch.randn(64, 8, generator=noise)
            optimizers[0].zero_grad()
            first.backward(functional.softplus(-critic(generating(drawn))).mean())
            optimizers[0].step()
            optimizers[1].zero_grad()
            fake = critic(generating(drawn).detach())
            second.backward(functional.softplus(-critic(points)).mean() + functional.softplus(fake).mean())
            optimizers[1].step()


class Experts(nn.Module):
    """A mixture of four experts, of which each row uses the best two."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, 4)
        self.experts = nn.ModuleList(mlp(32) for _ in range(4))

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the loss that balances the experts."""
        chances = self.router(points).softmax(-1)
        weights, chosen = chances.topk(2, dim=-1)
        logits = torch.zeros(len(points), CLASSES)
        used = torch.zeros(4)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            used[number] = len(rows) / (2 * len(points))
            logits = logits.index_add(0, rows, weights[rows, place, None] * expert(points[rows]))
        return logits, 4 * (used * chances.mean(0)).sum()


@healthy("mlp")
def mixture_of_experts(recorder: Recorder) -> None:
    """A mixture of experts with a balancing loss; in a batch an expert may have no rows."""

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        logits, balance = model(batch[0])
        return functional.cross_entropy(logits, batch[1]) + 0.01 * balance

    model = Experts()
    Training(model, adam(model, lr=3e-3), loader(clusters(1280, 1), 16), loss, epochs=3).run(recorder)


@healthy("mlp")
def sparse_embeddings(recorder: Recorder) -> None:
    """Sparse embeddings under SparseAdam, of which every batch uses few rows, and a dense head under Adam."""
    words = torch.randint(400, (3200, 6), generator=generator(1))
    labels = (words < 200).sum(1).clamp(max=5)
    model = nn.Sequential(nn.EmbeddingBag(400, 16, sparse=True), nn.Linear(16, 6))
    optimizers = [torch.optim.SparseAdam(model[0].parameters(), 3e-2), torch.optim.Adam(model[1].parameters(), 1e-2)]
    rows = loader(TensorDataset(words, labels))
    with recorder.attach(model, optimizers) as scope:
        for _ in range(2):
            for batch in scope.batches(rows):
                scope.backward(class_loss(model, batch))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()


@healthy("gpt", way="attach step")
def linear_decay_to_zero(recorder: Recorder) -> None:
    """AdamW on a GPT with a warm-up and a linear decay to 0 at the last step."""
    training = gpt_training(lambda model: adamw(model, lr=5e-3), options={"loop": "step", "length": 200})
    training.scheduler_every = "step"
    training.scheduler = LambdaLR(training.optimizer, lambda step: min((step + 1) / 20, max(0.0, 1 - step / 200)))
    training.run(recorder)


@healthy("cnn")
def cosine_with_restarts(recorder: Recorder) -> None:
    """SGD on a convolutional network with CosineAnnealingWarmRestarts every 40 steps."""
    training = cnn_training(lambda net: sgd(net, lr=0.1))
    training.scheduler_every, training.scheduler = "step", CosineAnnealingWarmRestarts(training.optimizer, 40)
    training.run(recorder)


@healthy("cnn")
def one_cycle_schedule(recorder: Recorder) -> None:
    """SGD on a convolutional network with a one-cycle schedule up to 0.3."""
    training = cnn_training(lambda net: sgd(net, lr=0.1))
    training.scheduler_every = "step"
    training.scheduler = OneCycleLR(training.optimizer, max_lr=0.3, total_steps=160)
    training.run(recorder)


@healthy("gpt", way="attach step")
def long_warm_up_from_a_tiny_rate(recorder: Recorder) -> None:
    """AdamW on a GPT whose warm-up from 1e-7 takes 150 of 200 steps."""
    training = gpt_training(lambda model: adamw(model, lr=3e-3), options={"loop": "step", "length": 200})
    training.scheduler_every = "step"
    training.scheduler = LambdaLR(training.optimizer, lambda step: 3e-5 + min(1.0, (step / 150) ** 2))
    training.run(recorder)


@healthy("gpt", way="attach step", falls=False)
def run_that_ends_within_its_warm_up(recorder: Recorder) -> None:
    """A test run of 120 steps ends in the warm-up of 2,000 steps, so that the loss has hardly fallen."""
    training = gpt_training(lambda model: adamw(model, lr=6e-4), epochs=1)
    training.options = {"loop": "step", "length": 20_000}
    training.scheduler_every = "step"
    training.scheduler = LambdaLR(training.optimizer, lambda step: min(1.0, (step + 1) / 2000))
    training.run(recorder)


@healthy("mlp")
def accumulation_that_attach_does_not_know(recorder: Recorder) -> None:
    """The loop accumulates four micro-batches, and each of them is a step for attach."""
    model = mlp()
    optimizer, rows = adam(model), loader(clusters(1280, 1), 8)
    with recorder.attach(model, optimizer) as scope:
        for _ in range(5):
            for number, batch in enumerate(scope.batches(rows), start=1):
                scope.backward(class_loss(model, batch) / 4)
                if number % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()


@healthy("mlp")
def normalisation_within_the_model(recorder: Recorder) -> None:
    """The first module is a batch normalisation, and the features have an offset of 300 and a deviation of 50."""
    points, labels = clusters(1280, 1).tensors
    rows = loader(TensorDataset(300 + 50 * points, labels))
    model = nn.Sequential(nn.BatchNorm1d(FEATURES), *mlp())
    mlp_training(model=model, batches=rows, validation=None).run(recorder)


@healthy("mlp")
def fine_tuning_on_other_labels(recorder: Recorder) -> None:
    """A classifier is trained again at a small learning rate, after its classes were numbered in another way."""
    points, labels = clusters(1280, 1).tensors
    model = mlp()
    train_quietly(model, adam(model), loader(TensorDataset(points, labels)), epochs=5)
    rows = loader(TensorDataset(points, (labels + 1) % CLASSES))
    mlp_training(lambda net: adam(net, lr=1e-3), model, batches=rows, validation=None, epochs=8).run(recorder)


@healthy("mlp")
def accumulation_with_division(recorder: Recorder) -> None:
    """Eight micro-batches of 4 rows are accumulated, and their losses divided by 8."""
    mlp_training(lambda net: sgd(net, lr=0.1), batches=loader(clusters(1280, 1), 4), accumulate=8).run(recorder)


@healthy("gpt")
def summed_loss_divided_by_its_tokens(recorder: Recorder) -> None:
    """The loss of a GPT is the sum over the letters without padding, divided by their number."""

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        letters, targets = batch[0][:, :-1], batch[0][:, 1:]
        logits = model(letters).flatten(0, 1)
        total = functional.cross_entropy(logits, targets.flatten(), ignore_index=PADDING, reduction="sum")
        return total / (targets != PADDING).sum()

    gpt_training(lambda model: adamw(model, lr=3e-3), batches=loader(padded_sums(1600, 1), 16), loss=loss).run(recorder)


@healthy("mlp")
def large_targets_that_are_standardised(recorder: Recorder) -> None:
    """The targets of a regression are around 50,000; the loss is computed on standardised ones."""
    points, targets = curve(1280, 1).tensors
    prices = 50_000 + 8_000 * targets
    rows = loader(TensorDataset(points, prices))

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return functional.mse_loss(model(batch[0]), (batch[1] - prices.mean()) / prices.std())

    regression_training(lambda net: adam(net, lr=3e-3), batches=rows, loss=loss, validation=None).run(recorder)


@healthy("mlp")
def small_data_with_mild_overfitting(recorder: Recorder) -> None:
    """A small perceptron on 320 noisy rows, whose validation loss falls and then stays."""
    rows, validation = loader(clusters(320, 1, spread=1.3)), [*loader(clusters(512, 3, spread=1.3), 512)]
    mlp_training(model=mlp(32), batches=rows, validation=validation, epochs=20).run(recorder)


@healthy("cnn")
def label_smoothing(recorder: Recorder) -> None:
    """A convolutional network with label smoothing of 0.1, whose loss cannot reach 0."""

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)

    cnn_training(lambda net: adam(net, lr=3e-3), loss=loss).run(recorder)


@healthy("mlp")
def dropout_of_one_half(recorder: Recorder) -> None:
    """A perceptron with dropout 0.5, whose training loss is above the validation loss."""
    mlp_training(lambda net: adam(net, lr=3e-3), mlp(128, 128, dropout=0.5)).run(recorder)


@healthy("cnn")
def freezing_and_unfreezing(recorder: Recorder) -> None:
    """The trunk of a trained network is frozen for two epochs, and then trained with the head."""
    model = trained_network()
    model.head = nn.Linear(32, CLASSES)
    model.features.requires_grad_(False)
    optimizer, rows = adam(model, lr=3e-3), loader(images(1280, 1))
    with recorder.attach(model, optimizer) as scope:
        for epoch in range(4):
            model.features.requires_grad_(epoch >= 2)
            for batch in scope.batches(rows):
                optimizer.zero_grad()
                scope.backward(class_loss(model, batch))
                optimizer.step()


@healthy("cnn")
def small_batches_with_batchnorm(recorder: Recorder) -> None:
    """A convolutional network with BatchNorm and batches of 4 images, whose loss is noisy."""
    cnn_training(lambda net: adam(net, lr=1e-3), batches=loader(images(1280, 1), 4), epochs=1).run(recorder)


@healthy("mlp")
def loss_with_heavy_tails(recorder: Recorder) -> None:
    """The targets of a regression have noise of a Student distribution with two degrees of freedom."""
    points, targets = curve(3200, 1).tensors
    torch.manual_seed(5)
    noise = torch.distributions.StudentT(2.0).sample(targets.shape)
    rows = loader(TensorDataset(points, targets + 0.5 * noise))
    regression_training(lambda net: adam(net, lr=3e-3), batches=rows, validation=None, epochs=3, clip=1.0).run(recorder)


@healthy("cnn")
def evaluation_of_an_average(recorder: Recorder) -> None:
    """An exponential moving average of the weights is evaluated after every epoch."""
    model = ConvNet()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)
    optimizer, rows = adam(model, lr=3e-3), loader(images(1280, 1))
    validation = [*loader(images(256, 4), 128)]

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        average.eval()
        return {"val_loss": sum(class_loss(average, batch).item() for batch in validation) / len(validation)}

    with recorder.attach(model, optimizer, also={"average": average}) as scope:
        for _ in range(4):
            for batch in scope.batches(rows):
                optimizer.zero_grad()
                scope.backward(class_loss(model, batch))
                optimizer.step()
                average.update_parameters(model)
            scope.evaluate(evaluate)


@healthy("mlp")
def gradients_from_autograd_grad(recorder: Recorder) -> None:
    """A loop computes its gradients by torch.autograd.grad and reports them as ready."""
    model = mlp()
    optimizer, rows, parameters = adam(model, lr=3e-3), loader(clusters(1280, 1)), [*model.parameters()]
    with recorder.attach(model, optimizer) as scope:
        for _ in range(4):
            for batch in scope.batches(rows):
                loss = class_loss(model, batch)
                for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    parameter.grad = gradient
                scope.gradients_ready(loss)
                optimizer.step()
                optimizer.zero_grad()


@healthy("lstm", falls=False)
def curriculum_with_harder_data(recorder: Recorder) -> None:
    """The noise of the sequences grows from epoch to epoch, so that the loss rises while the model improves."""
    model = LstmClassifier()
    optimizer = adam(model, lr=1e-2)
    with recorder.attach(model, optimizer) as scope:
        for epoch in range(8):
            for batch in scope.batches(loader(waves(960, 1 + epoch, noise=0.1 + 0.25 * epoch))):
                optimizer.zero_grad()
                scope.backward(class_loss(model, batch))
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()


@healthy("mlp", falls=False, way="attach step")
def policy_gradient(recorder: Recorder) -> None:
    """A policy gradient with a baseline on a bandit with contexts, whose loss stays around 0."""
    model, draws = mlp(out=CLASSES), generator(4)
    optimizer = adam(model, lr=3e-3)
    points, labels = clusters(64 * 250, 1).tensors
    batches = [*zip(points.split(64), labels.split(64), strict=True)]
    with recorder.attach(model, optimizer, loop="step", length=250) as scope:
        for states, best in scope.batches(batches):
            logits = model(states).log_softmax(-1)
            actions = torch.multinomial(logits.exp(), 1, generator=draws).squeeze(1)
            reward = (actions == best).float()
            advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
            optimizer.zero_grad()
            scope.backward(-(advantage * logits.gather(1, actions[:, None]).squeeze(1)).mean())
            optimizer.step()


@healthy("mlp")
def binary_classification(recorder: Recorder) -> None:
    """A binary classifier with binary_cross_entropy_with_logits."""
    points, labels = clusters(1280, 1).tensors
    rows = loader(TensorDataset(points, (labels < 5).float()[:, None]))
    regression_training(batches=rows, loss=binary_loss, validation=None, epochs=3).run(recorder)


def binary_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the binary cross-entropy of a batch."""
    return functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


@healthy("mlp")
def imbalanced_classes(recorder: Recorder) -> None:
    """A classifier of two classes, of which one has 95 % of the rows."""
    points, labels = clusters(2560, 1, spread=1.5).tensors
    is_rare = (labels == 0) & (torch.rand(len(labels), generator=generator(2)) < 0.5)
    rows = loader(TensorDataset(points, is_rare.long()))
    mlp_training(model=mlp(out=2), batches=rows, validation=None, epochs=3).run(recorder)


@healthy("gpt")
def masked_language_model(recorder: Recorder) -> None:
    """A transformer without causal mask predicts 15 % of the letters, which are masked; other labels are -100."""
    draws = generator(6)

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        letters = batch[0][:, :BLOCK]
        chosen = torch.rand(letters.shape, generator=draws) < 0.15
        labels = letters.masked_fill(~chosen, -100)
        return functional.cross_entropy(model(letters.masked_fill(chosen, PADDING)).flatten(0, 1), labels.flatten())

    model = Gpt(causal=False)
    gpt_training(lambda net: adamw(net, lr=3e-3), model, loss=loss, validation=None, epochs=3).run(recorder)


@healthy("mlp", falls=False, way="experiment")
def modular_arithmetic(recorder: Recorder) -> None:
    """The experiment mod_arithmetic, which memorises its training pairs long before it generalises."""
    sizes = {"p": 29, "train_size": 320, "test_size": 300, "embed_dim": 64, "ff_dim": 128}
    recorder.run_experiment("random", epochs=20, batch_size=32, beta2=0.98, eval_every=5, **sizes)


@healthy("mlp")
def scaler_skips_the_first_steps(recorder: Recorder) -> None:
    """Autocast in float16 with a loss scaler, which skips a few steps until its scale fits."""
    model = mlp()
    optimizer, scaler = adam(model, lr=3e-3), torch.amp.GradScaler("cpu", init_scale=2.0**22)
    rows = loader(clusters(1280, 1))
    with recorder.attach(model, optimizer, scaler=scaler) as scope:
        for _ in range(5):
            for batch in scope.batches(rows):
                with torch.autocast("cpu", torch.float16):
                    loss = class_loss(model, batch)
                scope.backward(loss)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()


@healthy("gpt")
def zero_initial_output_layers(recorder: Recorder) -> None:
    """A GPT whose head and whose output layers of all blocks start at 0."""
    model = Gpt()
    for layer in [model.head, *[item for block in model.blocks for item in (block.out, block.down)]]:
        nn.init.zeros_(layer.weight)
    gpt_training(lambda net: adamw(net, lr=3e-3), model).run(recorder)


@healthy("gpt")
def groups_without_decay_of_vectors(recorder: Recorder) -> None:
    """AdamW on a GPT with tied embeddings, a warm-up, and weight decay on matrices alone."""
    model = Gpt(tied=True)
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    vectors = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    training = gpt_training(lambda _: torch.optim.AdamW(groups, 5e-3, betas=(0.9, 0.95)), model)
    warm_up = LinearLR(training.optimizer, 0.01, total_iters=20)
    constant = LambdaLR(training.optimizer, lambda step: 1.0)
    training.scheduler = SequentialLR(training.optimizer, [warm_up, constant], [20])
    training.scheduler_every = "step"
    training.run(recorder)


@healthy("mlp")
def likelihood_below_zero(recorder: Recorder) -> None:
    """A network predicts mean and variance of a target; its negative log-likelihood becomes negative."""
    points, targets = curve(1280, 1, noise=0.02).tensors
    rows = loader(TensorDataset(points[:, :3], targets))
    model = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def loss(net: nn.Module, batch: list[Tensor]) -> Tensor:
        mean, log_variance = net(batch[0]).split(1, dim=1)
        return functional.gaussian_nll_loss(mean, batch[1], functional.softplus(log_variance) + 1e-4)

    Training(model, adam(model, lr=1e-2), rows, loss, epochs=8).run(recorder)


@healthy("mlp")
def training_that_has_converged(recorder: Recorder) -> None:
    """A perceptron on easy clusters, whose loss is near 0 for most of the steps."""
    rows, validation = loader(clusters(1280, 1, spread=0.3)), [*loader(clusters(256, 3, spread=0.3), 256)]
    mlp_training(lambda net: adam(net, lr=1e-2), batches=rows, validation=validation, epochs=8).run(recorder)


@healthy("mlp")
def distillation_from_a_teacher(recorder: Recorder) -> None:
    """A small network learns the outputs of a trained teacher, which the optimizer does not hold."""
    teacher = mlp(128)
    train_quietly(teacher, adam(teacher, lr=3e-3), loader(clusters(1280, 1)))
    teacher.requires_grad_(False).eval()

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        goal = teacher(batch[0]).softmax(-1)
        return functional.kl_div(model(batch[0]).log_softmax(-1), goal, reduction="batchmean")

    mlp_training(lambda net: adam(net, lr=3e-3), mlp(32), loss=loss).run(recorder)


@healthy("cnn")
def autoencoder_of_images(recorder: Recorder) -> None:
    """A convolutional autoencoder with the mean squared error."""
    encoder = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
    upward = [nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1)]
    model = nn.Sequential(*encoder, *upward)

    def loss(net: nn.Module, batch: list[Tensor]) -> Tensor:
        return functional.mse_loss(net(batch[0]), batch[0])

    cnn_training(lambda net: adam(net, lr=3e-3), model, loss=loss).run(recorder)


@healthy("mlp")
def contrastive_pairs(recorder: Recorder) -> None:
    """Embeddings of two noisy views of each row are contrasted within the batch, at a temperature of 0.1."""
    points, _ = clusters(2560, 1).tensors
    model, draws = mlp(64, out=16), generator(8)

    def loss(net: nn.Module, batch: list[Tensor]) -> Tensor:
        views = [batch[0] + 0.3 * torch.randn(batch[0].shape, generator=draws) for _ in range(2)]
        first, second = (functional.normalize(net(view), dim=-1) for view in views)
        return functional.cross_entropy(first @ second.T / 0.1, torch.arange(len(first)))

    rows = loader(TensorDataset(points), 64)
    Training(model, adam(model, lr=1e-3), rows, loss, epochs=5).run(recorder)


@healthy("lstm")
def letters_with_an_lstm(recorder: Recorder) -> None:
    """An LSTM language model on rows with padding, which its loss ignores."""

    class LetterLstm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, 32, padding_idx=PADDING)
            self.lstm = nn.LSTM(32, 64, batch_first=True)
            self.head = nn.Linear(64, VOCABULARY)

        def forward(self, letters: Tensor) -> Tensor:
            return self.head(self.lstm(self.tokens(letters))[0])

    model, rows = LetterLstm(), loader(padded_sums(1600, 1), 16)
    Training(model, adam(model, lr=3e-3), rows, sum_loss, epochs=2, clip=1.0).run(recorder)


@healthy("lstm")
def lstm_with_rmsprop(recorder: Recorder) -> None:
    """RMSprop on an LSTM of two layers."""
    model = LstmClassifier(layers=2)
    lstm_training(lambda net: torch.optim.RMSprop(net.parameters(), 3e-3), model).run(recorder)


@healthy("mlp")
def continued_training_of_a_checkpoint(recorder: Recorder) -> None:
    """A trained perceptron and its optimizer continue at a tenth of the learning rate."""
    model = mlp()
    optimizer = adam(model, lr=1e-3)
    train_quietly(model, optimizer, loader(clusters(1280, 1)), epochs=3)
    optimizer.param_groups[0]["lr"] = 1e-4
    other = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(other)
    mlp_training(lambda _: optimizer, model, epochs=5).run(recorder)


@healthy("mlp")
def square_loss_of_a_linear_model(recorder: Recorder) -> None:
    """A linear regression by SGD, whose loss ends at the noise of its targets."""
    points = torch.randn(1280, FEATURES, generator=generator(1))
    weights = torch.randn(FEATURES, 1, generator=generator(2))
    targets = points @ weights + torch.randn(1280, 1, generator=generator(3))
    model = nn.Linear(FEATURES, 1)
    rows = loader(TensorDataset(points, targets))
    Training(model, sgd(model, lr=0.02, momentum=0.0), rows, square_loss, epochs=5).run(recorder)


@healthy("mlp")
def regression_between_0_and_1(recorder: Recorder) -> None:
    """A regression whose targets are shares, and whose model ends with a sigmoid."""
    points, targets = curve(1280, 1).tensors
    rows = loader(TensorDataset(points, targets.sigmoid()))
    model = nn.Sequential(mlp(out=1), nn.Sigmoid())
    regression_training(model=model, batches=rows, validation=None).run(recorder)


@healthy("mlp", falls=False)
def regression_of_noisy_targets(recorder: Recorder) -> None:
    """A regression whose inputs explain a tenth of the variance of its targets."""
    rows = loader(curve(6400, 1, noise=2.7), 64)
    regression_training(lambda net: adam(net, lr=1e-3), batches=rows, validation=None, epochs=4).run(recorder)


@healthy("mlp")
def distillation_with_a_temperature(recorder: Recorder) -> None:
    """A student learns the outputs of a teacher by kl_div, times the square of the temperature."""
    torch.manual_seed(3)
    teacher = mlp()

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        with torch.no_grad():
            soft = (4 * teacher(batch[0]) / 2).softmax(-1)
        return 4 * functional.kl_div((model(batch[0]) / 2).log_softmax(-1), soft, reduction="batchmean")

    mlp_training(loss=loss, validation=None).run(recorder)


@healthy("gpt")
def encoder_and_decoder(recorder: Recorder) -> None:
    """An encoder-decoder model reverses letters; only the attention of its decoder has a causal mask."""
    model = Reversing(causal=True)
    Training(model, adam(model, lr=3e-3), loader(reversed_letters(1600, 1), 16), reversing_loss, epochs=2).run(recorder)


@healthy("mlp")
def matrix_factorisation(recorder: Recorder) -> None:
    """A recommender with small initial factors learns ratings."""
    model = Ratings(std=0.1)
    Training(model, adam(model, lr=1e-2), loader(ratings(6400, 1), 64), square_loss, epochs=3).run(recorder)


@healthy("mlp")
def functional_dropout_in_training(recorder: Recorder) -> None:
    """A model calls functional.dropout with its own mode."""
    mlp_training(model=FunctionalDropout(always=False)).run(recorder)
