"""Faults of parameters: missing gradients, optimizers of other parameters, and initial values."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo import causes
from tests.zoo.case import fault
from tests.zoo.data import FEATURES
from tests.zoo.models import ConvNet, Gpt, LstmClassifier, mlp
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


class UnusedAdapter(nn.Module):
    """A perceptron with an adapter that ``forward`` does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.adapter = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 64))
        self.head = nn.Linear(64, 10)

    def forward(self, points: Tensor) -> Tensor:
        """Return the logits."""
        return self.head(self.trunk(points))


@fault("mlp", causes.NO_GRADIENT)
def adapter_is_not_called(recorder: Recorder) -> None:
    """A perceptron has an adapter that its forward pass does not call."""
    mlp_training(model=UnusedAdapter(), epochs=3).run(recorder)


class DetachedTrunk(ConvNet):
    """A convolutional network whose features are detached before the head."""

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits of detached features."""
        hidden = self.features(pixels).mean((2, 3)).detach()
        return self.head(hidden)


@fault("cnn", causes.NO_GRADIENT)
def trunk_is_detached(recorder: Recorder) -> None:
    """The features of a convolutional network are detached before the head, left from a visualisation."""
    cnn_training(model=DetachedTrunk()).run(recorder)


class FrozenEmbedding(Gpt):
    """A GPT that computes its embeddings without gradients."""

    def forward(self, letters: Tensor) -> Tensor:
        """Return the logits, with embeddings outside of the graph."""
        with torch.no_grad():
            hidden = self.tokens(letters) + self.positions.weight[: letters.shape[1]]
            hidden = self.blocks[0](hidden)
        for block in self.blocks[1:]:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


@fault("gpt", causes.NO_GRADIENT)
def no_grad_around_the_first_layers(recorder: Recorder) -> None:
    """The forward pass of a GPT computes embeddings and first block under torch.no_grad."""
    gpt_training(lambda model: adamw(model, lr=3e-3), FrozenEmbedding()).run(recorder)


@fault("lstm", causes.NO_GRADIENT)
def loss_of_a_detached_copy(recorder: Recorder) -> None:
    """The LSTM's output is turned into a new tensor by torch.tensor(...), so that only the head is trained."""

    class Copying(LstmClassifier):
        def forward(self, values: Tensor) -> Tensor:
            states = torch.tensor(self.lstm(values)[0].tolist())
            return self.head(states[:, -1])

    lstm_training(model=Copying(), epochs=3).run(recorder)


@fault("lstm", causes.WITHOUT_OPTIMIZER, knowable=0)
def head_is_not_in_the_optimizer(recorder: Recorder) -> None:
    """The optimizer of an LSTM classifier was given the parameters of the LSTM alone."""
    lstm_training(lambda model: torch.optim.Adam(model.lstm.parameters(), 1e-2), epochs=3).run(recorder)


@fault("gpt", causes.WITHOUT_OPTIMIZER, knowable=0)
def norms_are_in_no_group(recorder: Recorder) -> None:
    """Parameter groups of a GPT sort by names, and lose the norms and the embeddings."""
    model = Gpt()
    named = dict(model.named_parameters())
    decayed = [item for name, item in named.items() if name.endswith("weight") and "blocks" in name and item.ndim == 2]
    plain = [item for name, item in named.items() if name.endswith("bias")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    gpt_training(lambda _: torch.optim.AdamW(groups, 3e-3), model).run(recorder)


@fault("cnn", causes.WITHOUT_OPTIMIZER, knowable=0)
def optimizer_before_the_new_head(recorder: Recorder) -> None:
    """The head of a convolutional network is replaced after the optimizer was created."""
    model = ConvNet()
    optimizer = sgd(model, lr=0.05)
    model.head = nn.Linear(32, 10)
    cnn_training(lambda _: optimizer, model).run(recorder)


@fault("mlp", causes.WITHOUT_OPTIMIZER, knowable=0)
def optimizer_before_weight_tensors_change(recorder: Recorder) -> None:
    """After the optimizer was created, an initialisation assigns new nn.Parameter objects to two of three layers."""
    model = mlp()
    optimizer = adam(model)
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(nn.init.kaiming_normal_(torch.empty_like(layer.weight)))
    mlp_training(lambda _: optimizer, model).run(recorder)


@fault("gpt", causes.FROZEN, knowable=0)
def block_is_frozen_by_mistake(recorder: Recorder) -> None:
    """One of three blocks of a GPT is still frozen from an earlier experiment."""
    model = Gpt(layers=3)
    model.blocks[1].requires_grad_(False)
    gpt_training(lambda net: adamw(net, lr=3e-3), model).run(recorder)


@fault("cnn", (*causes.FROZEN, "frozen-random-weights"), hidden=True, knowable=0)
def trunk_with_random_weights_is_frozen(recorder: Recorder) -> None:
    """The trunk of a convolutional network is frozen as in fine-tuning, but its weights were never trained."""
    model = ConvNet()
    model.features.requires_grad_(False)
    cnn_training(lambda net: adam(net, lr=3e-3), model).run(recorder)


class PlainList(nn.Module):
    """A perceptron whose hidden layers are in a Python list, which does not register them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 64)
        self.hidden = [nn.Linear(64, 64) for _ in range(3)]
        self.head = nn.Linear(64, 10)

    def forward(self, points: Tensor) -> Tensor:
        """Return the logits."""
        states = functional.relu(self.first(points))
        for layer in self.hidden:
            states = functional.relu(layer(states))
        return self.head(states)


@fault("mlp", causes.NOT_REGISTERED, knowable=0)
def layers_in_a_python_list(recorder: Recorder) -> None:
    """The hidden layers of a perceptron are in a Python list, so that model.parameters() lacks them."""
    mlp_training(model=PlainList()).run(recorder)


@fault("gpt", causes.UNTIED, knowable=0)
def embeddings_untied_by_deepcopy(recorder: Recorder) -> None:
    """The head of a GPT is a deep copy of the embedding, although both should be one matrix."""
    model = Gpt()
    model.head.weight = copy.deepcopy(model.tokens.weight)
    gpt_training(lambda net: adamw(net, lr=3e-3), model).run(recorder)


@fault("mlp", causes.INITIAL_SCALE, knowable=0)
def initial_weights_of_1e_4(recorder: Recorder) -> None:
    """A deeper perceptron starts with weights of standard deviation 1e-4."""
    model = mlp(64, 64, 64, 64)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=1e-4)
    mlp_training(lambda net: sgd(net, lr=0.05), model).run(recorder)


@fault("gpt", causes.INITIAL_SCALE, knowable=0)
def initial_weights_of_std_1(recorder: Recorder) -> None:
    """All matrices of a GPT start with a standard deviation of 1 in place of 0.02."""
    gpt_training(model=Gpt(std=1.0)).run(recorder)


@fault("mlp", (*causes.INITIAL_SCALE, "nonfinite"), knowable=0)
def deep_relu_network_explodes_at_start(recorder: Recorder) -> None:
    """A perceptron of eight layers starts with normal weights of standard deviation 1."""
    model = mlp(*[64] * 8)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight)
    mlp_training(model=model).run(recorder)


@fault("mlp", causes.SYMMETRIC_INIT, knowable=0)
def constant_initial_weights(recorder: Recorder) -> None:
    """All weights of a perceptron start at 0.05."""
    model = mlp()
    for weight in model.parameters():
        nn.init.constant_(weight, 0.05)
    mlp_training(model=model).run(recorder)


@fault("mlp", causes.SYMMETRIC_INIT, knowable=0)
def zero_initial_weights(recorder: Recorder) -> None:
    """All weights of the hidden layers of a perceptron for a regression start at 0."""
    model = mlp(out=1)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.zeros_(layer.weight)
    regression_training(model=model).run(recorder)


@fault("mlp", causes.DEAD_UNITS)
def biases_of_minus_10(recorder: Recorder) -> None:
    """The biases of a ReLU layer start at -10, so that all its units are 0."""
    model = mlp()
    nn.init.constant_(model[2].bias, -10.0)
    mlp_training(model=model).run(recorder)


@fault("mlp", (*causes.DEAD_UNITS, *causes.RATE_TOO_HIGH))
def relus_die_in_a_huge_step(recorder: Recorder) -> None:
    """The first steps of SGD are so large that most ReLUs of a perceptron are 0 from then on."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 4.0)

    training = mlp_training(optimizer, mlp(64, 64, 64))
    training.scheduler = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: 1.0 if step < 5 else 0.01)
    training.scheduler_every = "step"
    training.run(recorder)


@fault("mlp", (*causes.DEAD_UNITS, "saturated-units", *causes.INITIAL_SCALE))
def tanh_units_are_saturated(recorder: Recorder) -> None:
    """The weights of a network of tanh units are multiplied by 30, so that its units are at -1 or 1."""
    model = mlp(64, 64, 64, activation=nn.Tanh)
    with torch.no_grad():
        for layer in (model[0], model[2], model[4]):
            layer.weight.mul_(30)
    mlp_training(lambda net: sgd(net, lr=0.02), model).run(recorder)


@fault("mlp", causes.VANISHING)
def gradients_vanish_in_a_sigmoid_network(recorder: Recorder) -> None:
    """A perceptron of twelve sigmoid layers is trained by SGD."""
    mlp_training(lambda net: sgd(net, lr=0.1), mlp(*[32] * 12, activation=nn.Sigmoid)).run(recorder)


class MaskedInput(ConvNet):
    """A convolutional network whose mask of the inputs is all zero."""

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits of masked inputs."""
        mask = torch.zeros_like(pixels)
        return super().forward(pixels * mask)


@fault("cnn", (*causes.CONSTANT_OUTPUT, "inputs-constant"), knowable=50)
def inputs_are_multiplied_by_zero(recorder: Recorder) -> None:
    """A mask of the inputs is 0 everywhere, so that a convolutional network sees no image."""
    cnn_training(model=MaskedInput()).run(recorder)
