"""Changes without a new version or pointer: classes, lists of numbers, flags."""

import pytest
import torch
from loopscope.errors import StateMutationError
from loopscope.isolation import Call, Isolation
from loopscope.state import RandomStreams, TrainingState
from torch import nn
from torch.optim import lr_scheduler

SCHEDULERS = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "multi_step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4]),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
    ),
}


class Complex(nn.Module):
    """A complex parameter and buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.register_buffer("b", torch.randn(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w + self.b


class Doubled(nn.Parameter):
    """Another class of parameter."""


class OtherSGD(torch.optim.SGD):
    """Another class of optimizer."""


class OtherBatchNorm(nn.BatchNorm1d):
    """Another class of module."""


class Run:
    """A small run, trained for one step."""

    def __init__(self, model: nn.Module, scheduler: str = "lambda") -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.optimizer.param_groups[0]["limits"] = [0.1, {"high": [1.0]}]
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        inputs = torch.ones(5, 4, dtype=next(model.parameters()).dtype)
        self.scaler = torch.amp.GradScaler("cpu", enabled=not inputs.is_complex())
        self.scaler.scale(model(inputs).abs().sum()).backward()
        self.scaler.step(self.optimizer)
        self.state = TrainingState(
            model, self.optimizer, RandomStreams(1), scheduler=self.scheduler, scaler=self.scaler
        )

    @property
    def parameter(self) -> nn.Parameter:
        return next(self.model.parameters())

    @property
    def moment(self) -> torch.Tensor:
        return self.optimizer.state[self.parameter]["momentum_buffer"]

    @property
    def buffer(self) -> torch.Tensor:
        return next(self.model.buffers())


def real(scheduler: str = "lambda") -> Run:
    return Run(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), scheduler)


def observe(run: Run, mutation, call: int) -> str:
    """Let an observer change the state in its n-th call; return the error."""
    isolation = Isolation(run.state)
    try:
        for step in range(1, call + 1):
            with isolation.visit():
                isolation.observe(
                    Call("spy", "POST_STEP", step), lambda step=step: mutation(run) if step == call else None
                )
    except StateMutationError as error:
        return str(error).removeprefix(f"Hook 'spy' at POST_STEP of step {call} may only read, but changed the ")
    return ""


def set_class(owner, kind) -> None:
    owner.__class__ = kind


CHANGES = {
    "base_lrs": (lambda run: run.scheduler.base_lrs.__setitem__(0, 1.0), "the scheduler (base_lrs)"),
    "last_lr": (lambda run: run.scheduler._last_lr.append(1.0), "the scheduler (_last_lr)"),
    "int_for_float": (lambda run: run.scheduler._last_lr.__setitem__(0, True), "the scheduler (_last_lr)"),
    "list_in_group": (lambda run: run.optimizer.param_groups[0]["limits"][1]["high"].pop(), "groups (limits)"),
    "defaults": (lambda run: run.optimizer.defaults.update(lr=1), "training state: "),
    "scaler_tensor": (lambda run: run.scaler._scale.mul_(2), "the scaler (_scale)"),
    "scaler_table": (lambda run: run.scaler._per_optimizer_states.clear(), "(_per_optimizer_states)"),
    "scheduler_class": (lambda run: set_class(run.scheduler, lr_scheduler.ExponentialLR), "class of the scheduler"),
    "optimizer_class": (lambda run: set_class(run.optimizer, OtherSGD), "class of the optimizer"),
    "scaler_class": (lambda run: set_class(run.scaler, type("S", (torch.amp.GradScaler,), {})), "of the scaler"),
    "module_class": (lambda run: set_class(run.model[1], OtherBatchNorm), "the class of modules/1"),
    "frozen": (lambda run: run.parameter.requires_grad_(False), "parameters/0.weight (its requires_grad)"),
    "parameter_class": (lambda run: set_class(run.parameter, Doubled), ""),
    "shape": (lambda run: run.parameter.data.t_(), ""),
    "negative_parameter": (lambda run: negate(run.parameter), ""),
}


def negate(tensor: torch.Tensor) -> None:
    tensor.data = torch._neg_view(tensor.data)


@pytest.mark.parametrize("call", [2, 5])
@pytest.mark.parametrize("name", [name for name, (_, named) in CHANGES.items() if named])
def test_observer_is_caught_at_any_call(name, call):
    change, named = CHANGES[name]
    assert named in observe(real(), change, call)


@pytest.mark.parametrize("name", CHANGES)
def test_intervention_is_rolled_back(name):
    run = real()
    digest, kinds = run.state.digest(), [type(item) for item in (*vars(run).values(), run.parameter, run.model[1])]
    isolation = Isolation(run.state, audit=True)
    with isolation.visit():
        isolation.intervene(Call("spy", "POST_STEP", 1), lambda: CHANGES[name][0](run), mutates=True)
    assert run.state.digest() == digest
    assert [type(item) for item in (*vars(run).values(), run.parameter, run.model[1])] == kinds
    assert not run.parameter.is_neg()


@pytest.mark.parametrize("call", [2, 5])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_numbers_of_every_scheduler_are_watched(scheduler, call):
    def change(run: Run) -> None:
        numbers = next(value for value in vars(run.scheduler).values() if isinstance(value, (list, dict)))
        numbers.clear()

    assert "training state: " in observe(real(scheduler), change, call)


COMPLEX = {
    "parameter": lambda run: run.parameter,
    "buffer": lambda run: run.buffer,
    "gradient": lambda run: run.parameter.grad,
    "moment": lambda run: run.moment,
}


@pytest.mark.parametrize("call", [2, 8])
@pytest.mark.parametrize("view", [torch.conj, torch._neg_view])
@pytest.mark.parametrize("place", COMPLEX)
def test_lazy_bits_of_complex_tensors_are_seen(place, view, call):
    """They change no version and no pointer, but the bytes, which these calls compare."""

    def change(run: Run) -> None:
        tensor = COMPLEX[place](run)
        tensor.data = view(tensor.data)

    assert "training state: " in observe(Run(Complex()), change, call)


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view])
@pytest.mark.parametrize("place", COMPLEX)
def test_lazy_bits_are_rolled_back(place, view):
    run = Run(Complex())
    tensor, digest = COMPLEX[place](run), run.state.digest()
    bits = tensor.is_conj(), tensor.is_neg()
    isolation = Isolation(run.state, audit=True)
    with isolation.visit():
        isolation.intervene(
            Call("spy", "POST_STEP", 1), lambda: setattr(tensor, "data", view(tensor.data)), mutates=True
        )
    assert run.state.digest() == digest
    assert (tensor.is_conj(), tensor.is_neg()) == bits


def test_idle_observer_is_innocent_with_lazy_bits():
    """The gradient of a complex parameter often has the conjugate bit."""
    run = Run(Complex())
    run.parameter.grad = run.parameter.grad.conj()
    run.parameter.data = run.parameter.data.conj()
    assert observe(run, lambda run: run.parameter.norm(), 5) == ""


def to_a_vector(run: Run) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(run.model.parameters()), run.model.parameters())


EQUAL = {
    "vector": to_a_vector,
    "clone": lambda run: setattr(run.parameter, "data", run.parameter.data.clone()),
    "clone_of_buffer": lambda run: setattr(run.buffer, "data", run.buffer.data.clone()),
    "clone_of_moment": lambda run: setattr(run.moment, "data", run.moment.data.clone()),
    "own_state": lambda run: run.model.load_state_dict(run.model.state_dict()),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_values_in_other_memory_are_innocent(name):
    """Once for a vector: afterwards all parameters share its memory, and leaving that is a change."""
    run = real()
    isolation = Isolation(run.state)
    for step in range(1, 2 if name == "vector" else 7):
        with isolation.visit():
            isolation.observe(Call("spy", "POST_STEP", step), lambda: EQUAL[name](run))


@pytest.mark.parametrize("name", ["vector", "clone"])
def test_other_values_in_other_memory_are_seen(name):
    def change(run: Run) -> None:
        EQUAL[name](run)
        run.parameter.data = run.parameter.data + 1

    assert "parameters/0.weight" in observe(real(), change, 2)


def test_parameter_that_leaves_shared_memory_is_seen():
    run = real()
    to_a_vector(run)
    assert "parameters/0.weight" in observe(run, EQUAL["clone"], 2)


def test_script_may_freeze_parameters_between_visits():
    """As a GAN does in every step: no hook is blamed, and the watch list is not built again, which takes longer."""
    run = real()
    isolation, watch_lists = Isolation(run.state), set()
    for step in range(1, 9):
        run.parameter.requires_grad_(step % 2 == 0)
        with isolation.visit():
            isolation.observe(Call("spy", "POST_STEP", step), lambda: None)
        watch_lists.add(isolation._tripwire.watch)
    assert len(watch_lists) == 1
    with pytest.raises(StateMutationError, match="its requires_grad"), isolation.visit():
        isolation.observe(Call("spy", "POST_STEP", 9), lambda: run.parameter.requires_grad_(False))
