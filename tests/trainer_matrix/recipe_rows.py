"""Loops of well-known methods, each in its shortest form."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from tests.trainer_matrix import tiny
from tests.trainer_matrix.row import VARIANTS, Attach, row, rows
from tests.trainer_matrix.tiny import classification_loss, classifier, drawn, loader


@rows("Diffusion model (DDPM) with an average of its weights")
def ddpm(attach: Attach, accumulate: int = 1, clip: float = 0.0, evaluates: bool = False) -> None:
    images, steps = drawn(24, 1, 8, 8), 10
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.2, steps), 0)
    times = nn.Embedding(steps, 8)
    body = nn.Sequential(nn.Conv2d(9, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 1, 3, padding=1))
    model = nn.ModuleDict({"times": times, "body": body})
    average = deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def loss_of(model: Any, batch: Tensor) -> Tensor:
        time, noise = torch.randint(steps, (len(batch),)), torch.randn_like(batch)
        share = kept[time][:, None, None, None]
        noisy = share.sqrt() * batch + (1 - share).sqrt() * noise
        moments = model["times"](time)[:, :, None, None].expand(-1, -1, 8, 8)
        return nn.functional.mse_loss(model["body"](torch.cat([noisy, moments], 1)), noise) / accumulate

    with attach(model, optimizer, loss=loss_of, accumulate=accumulate) as scope:
        for _ in range(2):
            for index, batch in enumerate(scope.batches(loader(images)), start=1):
                scope.backward(loss_of(model, batch))
                if index % accumulate:
                    continue
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                        mean.lerp_(weight, 0.1)
            if evaluates and not attach.is_bare:
                scope.evaluate(lambda: {"val_loss": loss_of(model, images).item()})


class Actor(nn.Module):
    """A policy and a value over observations of four numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.policy, self.value = nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, seen: Tensor) -> tuple[Any, Tensor]:
        """Return the distribution of actions and the values."""
        hidden = self.body(seen)
        return torch.distributions.Categorical(logits=self.policy(hidden)), self.value(hidden).squeeze(-1)


def rollout(model: Actor, length: int = 12) -> tuple[Tensor, ...]:
    """Act in a random walk whose reward is a small distance from its origin."""
    place, rows = torch.randn(4), []
    with torch.no_grad():
        for _ in range(length):
            policy, value = model(place)
            action = policy.sample()
            after = place + 0.1 * torch.randn(4) + (action.float() - 0.5)
            rows.append((place, action, policy.log_prob(action), -after.norm() - value))
            place = after
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


@rows("PPO", variants={name: VARIANTS[name] for name in ("plain", "clipping", "evaluation")})
def ppo(attach: Attach, clip: float = 0.5, evaluates: bool = False) -> None:
    model = Actor()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        seen, action, before, advantage = batch
        policy, value = model(seen)
        ratio = (policy.log_prob(action) - before).exp()
        gained = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        return 0.5 * (advantage - value).square().mean() - gained - 0.01 * policy.entropy().mean()

    with attach(model, optimizer, loss=loss_of, loop="step") as scope:
        for _ in range(3):
            data = torch.utils.data.TensorDataset(*rollout(model))
            for batch in scope.batches(loader(data)):
                scope.backward(loss_of(model, batch))
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
            if evaluates and not attach.is_bare:
                scope.evaluate(lambda: {"val_reward": rollout(model)[3].mean().item()})


@row("DQN with a target network and a replay buffer", "")
def dqn(attach: Attach) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    target = deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    memory = [(drawn(4, seed=number), number % 2, drawn(1, seed=-number)) for number in range(1, 9)]

    def sample() -> Any:
        rows = [memory[index] for index in torch.randint(len(memory), (4,))]
        return (
            torch.stack([row[0] for row in rows]),
            torch.tensor([row[1] for row in rows]),
            torch.cat([row[2] for row in rows]),
        )

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        seen, action, reward = batch
        wanted = reward + 0.9 * target(seen + 0.1).max(1).values
        return nn.functional.smooth_l1_loss(model(seen).gather(1, action[:, None]).squeeze(1), wanted)

    with attach(model, optimizer, loss=loss_of, loop="step") as scope:
        batches = scope.batches(iter(sample, None))
        for step in range(8):
            memory.append((torch.randn(4), step % 2, torch.randn(1)))
            optimizer.zero_grad()
            scope.backward(loss_of(model, next(batches)))
            optimizer.step()
            if step % 3 == 2:
                target.load_state_dict(model.state_dict())


@rows(
    "Truncated backpropagation through time (LSTM)",
    variants={name: VARIANTS[name] for name in ("plain", "clipping", "evaluation")},
)
def tbptt(attach: Attach, clip: float = 0.0, evaluates: bool = False) -> None:
    text, width = tiny.chosen(12, 4, 49), 8
    model = nn.ModuleDict(
        {
            "in": nn.Embedding(12, width),
            "body": nn.LSTM(width, width, 2, dropout=0.1, batch_first=True),
            "out": nn.Linear(width, 12),
        }
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def run(model: Any, rows: Tensor, memory: Any) -> tuple[Tensor, Any]:
        hidden, memory = model["body"](model["in"](rows[:, :-1]), memory)
        return nn.functional.cross_entropy(model["out"](hidden).flatten(0, 1), rows[:, 1:].flatten()), memory

    with attach(model, optimizer, loss=lambda model, batch: run(model, batch, None)[0]) as scope:
        for _ in range(2):
            memory = None
            for batch in scope.batches([text[:, start : start + 9] for start in range(0, 40, 8)]):
                loss, memory = run(model, batch, memory)
                memory = tuple(part.detach() for part in memory)
                scope.backward(loss)
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
            if evaluates and not attach.is_bare:
                scope.evaluate(lambda: {"val_loss": run(model, text, None)[0].item()})


@row("Sharpness-aware minimisation (SAM)", "two backward passes")
def sam(attach: Attach) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    weights = [*model.parameters()]
    with attach(model, optimizer, loss=classification_loss) as scope:
        for batch in scope.batches(loader()):
            scope.backward(classification_loss(model, batch))
            with torch.no_grad():
                norm = torch.stack([weight.grad.norm() for weight in weights]).norm()
                shifts = [0.05 * weight.grad / norm for weight in weights]
                torch._foreach_add_(weights, shifts)
            optimizer.zero_grad()
            classification_loss(model, batch).backward()
            with torch.no_grad():
                torch._foreach_sub_(weights, shifts)
            optimizer.step()
            optimizer.zero_grad()


class ClosureSAM(torch.optim.SGD):
    """SAM whose step evaluates a closure at the shifted weights."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        """Shift the weights, evaluate again, shift back and step."""
        loss = torch.enable_grad()(closure)()
        weights = [weight for group in self.param_groups for weight in group["params"]]
        norm = torch.stack([weight.grad.norm() for weight in weights]).norm()
        shifts = [0.05 * weight.grad / norm for weight in weights]
        torch._foreach_add_(weights, shifts)
        torch.enable_grad()(closure)()
        torch._foreach_sub_(weights, shifts)
        super().step()
        return loss


@row("Sharpness-aware minimisation (SAM)", "closure")
def closure_sam(attach: Attach) -> None:
    model = classifier()
    optimizer = ClosureSAM(model.parameters(), 0.1)
    with attach(model, optimizer, loss=classification_loss, hooks=[]) as scope:
        for batch in scope.batches(loader()):

            def closure(batch: Any = batch) -> Tensor:
                optimizer.zero_grad()
                loss = classification_loss(model, batch)
                loss.backward()
                return loss

            optimizer.step(scope.closure(closure))


def gan_parts() -> tuple[nn.Module, nn.Module, Any, Any]:
    """Create a generator and a discriminator with their optimizers."""
    generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    discriminator = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
    return generator, discriminator, *(torch.optim.Adam(part.parameters(), 1e-2) for part in (generator, discriminator))


def scored(score: Tensor, wanted: float) -> Tensor:
    """Return the loss of scores that should all have one sign."""
    return nn.functional.binary_cross_entropy_with_logits(score, torch.full_like(score, wanted))


@row("GAN", "two scopes without loss=")
def gan(attach: Attach) -> None:
    generator, discriminator, first, second = gan_parts()
    with attach(generator, first) as of_generator, attach(discriminator, second) as of_discriminator:
        noises = of_generator.batches(iter(lambda: torch.randn(4, 4), None))
        for real, _ in of_discriminator.batches(loader()):
            noise = next(noises)
            second.zero_grad()
            of_discriminator.backward(
                scored(discriminator(real), 1) + scored(discriminator(generator(noise).detach()), 0)
            )
            second.step()
            first.zero_grad()
            of_generator.backward(scored(discriminator(generator(noise)), 1))
            first.step()


@row("GAN", "two scopes with loss= and also=")
def gan_with_also(attach: Attach) -> None:
    generator, discriminator, first, second = gan_parts()

    def fooling(model: nn.Module, noise: Tensor) -> Tensor:
        return scored(discriminator(model(noise)), 1)

    def telling(model: nn.Module, batch: Any) -> Tensor:
        return scored(model(batch[0]), 1) + scored(model(generator(torch.randn(4, 4)).detach()), 0)

    with (
        attach(generator, first, loss=fooling, also={"discriminator": discriminator}) as of_generator,
        attach(discriminator, second, loss=telling, also={"generator": generator}) as of_discriminator,
    ):
        noises = of_generator.batches(iter(lambda: torch.randn(4, 4), None))
        for batch in of_discriminator.batches(loader()):
            second.zero_grad()
            of_discriminator.backward(telling(discriminator, batch))
            second.step()
            first.zero_grad()
            of_generator.backward(fooling(generator, next(noises)))
            first.step()


@row("Distillation from a frozen teacher", "")
def distillation(attach: Attach) -> None:
    model, teacher = classifier(), classifier().eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        wanted = teacher(batch[0]).softmax(-1)
        return classification_loss(model, batch) + nn.functional.kl_div(
            model(batch[0]).log_softmax(-1), wanted, reduction="batchmean"
        )

    ordinary(attach, model, optimizer, loss_of)


def ordinary(attach: Attach, model: nn.Module, optimizer: Any, loss_of: Any, data: Any = None, **options: Any) -> None:
    """Train one epoch in an ordinary loop."""
    with attach(model, optimizer, loss=loss_of, **options) as scope:
        for batch in scope.batches(loader(data)):
            scope.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()


@row("Loss with a gradient penalty", "")
def gradient_penalty(attach: Attach) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
        return classification_loss(model, batch) + 0.1 * slope.square().mean()

    ordinary(attach, model, torch.optim.AdamW(model.parameters(), 1e-2), loss_of)


@row("Activation checkpointing with dropout", "")
def checkpointing(attach: Attach) -> None:
    model = tiny.LanguageModel()
    for block in model.blocks:
        plain = block.forward
        block.forward = lambda *inputs, plain=plain, **named: checkpoint(plain, *inputs, use_reentrant=False, **named)
    ordinary(attach, model, torch.optim.AdamW(model.parameters(), 1e-2), tiny.language_loss, tiny.token_rows())


@row("Sparse gradients of an embedding (SparseAdam)", "")
def sparse(attach: Attach) -> None:
    model = nn.Sequential(nn.Embedding(tiny.VOCABULARY, 8, sparse=True), nn.Flatten(0, 1))
    optimizer = torch.optim.SparseAdam(model.parameters(), 1e-2)

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    ordinary(attach, model, optimizer, loss_of, tiny.token_rows(), hooks=[])


@row("Spectral norm and weight norm", "")
def normed(attach: Attach) -> None:
    body = [
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)),
        nn.ReLU(),
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)),
    ]
    model = nn.Sequential(*body)
    ordinary(attach, model, torch.optim.AdamW(model.parameters(), 1e-2), classification_loss)


@row("Averaged weights (torch.optim.swa_utils)", "")
def averaged(attach: Attach) -> None:
    model = classifier()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, 0.05)
    with attach(model, optimizer, loss=classification_loss, scheduler=scheduler) as scope:
        for _ in range(2):
            for batch in scope.batches(loader()):
                scope.backward(classification_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            average.update_parameters(model)
            scheduler.step()
    torch.optim.swa_utils.update_bn(loader(), average)


@row("Layers that are frozen and unfrozen during training", "")
def unfreezing(attach: Attach) -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with attach(model, optimizer, loss=classification_loss) as scope:
        for epoch in range(3):
            model[0].requires_grad_(epoch != 1)
            for batch in scope.batches(loader()):
                scope.backward(classification_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()


@row("torch.compile", "")
def compiled(attach: Attach) -> None:
    inner = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(inner.parameters(), 1e-2)
    model: Any = torch.compile(inner, backend="aot_eager")
    with attach(model, optimizer, loss=classification_loss) as scope:
        for batch in scope.batches(loader()):
            scope.backward(classification_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()


# Gradients that no single backward pass computes


def private_gradients(model: nn.Module, batch: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield the clipped mean gradients of single rows, with noise (DP-SGD)."""
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss_of(weights: dict[str, Tensor], point: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, weights, (point[None],)), label[None])

    rows = vmap(grad(loss_of), in_dims=(None, 0, 0), randomness="different")(weights, *batch)
    norms = torch.stack([row.flatten(1).norm(dim=1) for row in rows.values()]).norm(dim=0)
    shares = (0.5 / norms).clamp(max=1.0)
    for name, weight in model.named_parameters():
        clipped = torch.einsum("n,n...->...", shares, rows[name])
        yield weight, (clipped + 0.1 * torch.randn_like(weight)) / len(norms)


@row("DP-SGD with torch.func", "")
def private(attach: Attach) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attach(model, optimizer) as scope:
        for batch in scope.batches(loader()):
            for weight, gradient in private_gradients(model, batch):
                weight.grad = gradient
            scope.gradients_ready()
            optimizer.step()
            optimizer.zero_grad()


@row("Gradients from torch.autograd.grad", "")
def manual_gradients(attach: Attach) -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    weights = [*model.parameters()]
    with attach(model, optimizer) as scope:
        for batch in scope.batches(loader()):
            loss = classification_loss(model, batch)
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight.grad = gradient
            scope.gradients_ready(loss.detach())
            optimizer.step()


@row("Several backward passes in one step", "")
def several_backwards(attach: Attach) -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with attach(model, optimizer) as scope:
        for batch in scope.batches(loader()):
            loss = classification_loss(model, batch)
            loss.backward(retain_graph=True)
            (0.1 * loss).backward()
            scope.gradients_ready(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
