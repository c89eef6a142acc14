import re
from collections import namedtuple
from collections.abc import Callable
from functools import partial

import pytest
import torch
from loopscope.errors import StateMutationError
from loopscope.isolation import Call, Isolation
from loopscope.state import RandomStreams, TrainingState
from torch import nn

from tests.support import Case, build
from tests.support.misbehaving_hooks import MUTATIONS, Scene, train_one_step

CALL = Call("spy", "POST_STEP", 1)


def observe(state: TrainingState, mutation) -> str:
    """Let an observer call ``mutation``; return the error's message, empty if no change was detected."""
    isolation = Isolation(state)
    try:
        with isolation.visit():
            isolation.observe(CALL, mutation)
    except StateMutationError as error:
        return str(error)
    return ""


def trained(model: str = "batchnorm_mlp", optimizer: str = "adamw_foreach") -> Scene:
    task, state = build(Case(model, optimizer))
    scene = Scene(task, state)
    train_one_step(scene)
    return scene


NAMES = {
    "write_in_place": "parameters/4.bias",
    "write_to_the_gradient": "gradients/4.bias",
    "replace_a_gradient": "a gradient was replaced",
    "set_a_parameter": "modules/0._parameters.weight",
    "edit_the_learning_rate": "the optimizer's hyper-parameters or groups",
    "evaluate_for_good": "modules/.training",
    "freeze_a_parameter": "parameters/0.weight (its requires_grad)",
    "leave_a_hook_on_a_parameter": "a hook on a parameter",
    "change_the_default_dtype": "default dtype",
    "give_data_another_dtype": "parameters/4.bias",
}


@pytest.fixture(autouse=True)
def default_dtype_restored():
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_tripwire_error_names_the_change(name):
    scene = trained()
    text = observe(scene.state, lambda: MUTATIONS[name](scene))
    assert re.match(
        f"Hook 'spy' at POST_STEP of step 1 may only read, but changed the training state: .*{re.escape(NAMES[name])}",
        text,
    )


@pytest.mark.parametrize("optimizer", ["adamw_foreach", "adafactor", "sgd_momentum"])
def test_optimizer_tensors_are_named(optimizer):
    scene = trained(optimizer=optimizer)
    assert "optimizer/" in observe(scene.state, lambda: scene.moments[0].mul_(2))


def test_batch_and_kept_gradients_are_watched():
    scene = trained()
    loop = scene.state.loop
    loop.batch, loop.prev_step_grads = (torch.ones(2), {"deep": [torch.ones(1)]}), {"0.weight": torch.ones(1)}
    assert "loop/batch/1/deep/0" in observe(scene.state, lambda: loop.batch[1]["deep"][0].zero_())
    assert "loop/prev_step_grads/0.weight" in observe(scene.state, lambda: loop.prev_step_grads["0.weight"].zero_())


def test_reading_tensors_changes_no_state():
    scene = trained()
    assert observe(scene.state, lambda: [p.norm() + p.grad.norm() for p in scene.model.parameters()]) == ""


def test_changes_between_visits_are_accepted():
    """The run may change anything outside visits."""
    scene = trained()
    isolation = Isolation(scene.state)
    for name in (
        "train_one_step",
        "add_a_buffer",
        "set_a_parameter",
        "clear_the_optimizer_state",
        "reverse_the_parameters_of_a_group",
    ):
        MUTATIONS[name](scene)
        with isolation.visit():
            isolation.observe(CALL, lambda: None)


def test_tripwire_misses_writes_of_fused_optimizers():
    """Fused optimizers do not increase the version counters; only the audit detects them."""
    scene = trained(optimizer="adamw_fused")
    original = scene.parameter.clone()
    observe(scene.state, scene.optimizer.step)
    assert not original.equal(scene.parameter)


def test_sparse_and_inference_tensors_can_be_swept():
    model = nn.Embedding(5, 2, sparse=True)
    with torch.inference_mode():
        model.register_buffer("made", torch.ones(2))
    model(torch.tensor([1])).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainingState(model, optimizer, RandomStreams(1))
    assert observe(state, lambda: None) == ""
    assert "gradients/weight" in observe(state, lambda: model.weight.grad.mul_(2))


def test_unreadable_state_counts_as_changed():
    scene = trained()
    assert "can no longer be read" in observe(scene.state, lambda: vars(scene.model).pop("_modules"))


Pair = namedtuple("Pair", "first second")
HOLDERS = {
    "tuple": lambda tensor: (tensor,),
    "tuple in a tuple": lambda tensor: ((1, tensor),),
    "named tuple": lambda tensor: Pair(tensor, 1),
    "tuple in a list": lambda tensor: [(tensor, 1)],
    "tuple in a dict": lambda tensor: {"a": (tensor,)},
    "partial function": lambda tensor: partial(max, tensor),
    "list": lambda tensor: [tensor],
}


@pytest.mark.parametrize("owner", ["module", "optimizer"])
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("calls", [1, 5], ids=["first call", "later call"])
def test_tensors_in_fixed_containers_are_watched(holder: str, owner: str, calls: int) -> None:
    scene, held = trained(), torch.ones(3)
    getattr(scene, owner).held = HOLDERS[holder](held)
    isolation = Isolation(scene.state)
    for call in range(1, calls):
        with isolation.visit():
            isolation.observe(CALL._replace(step=call), lambda: None)
    with pytest.raises(StateMutationError, match="held"), isolation.visit():
        isolation.observe(CALL._replace(step=calls), lambda: held.mul_(2))


@pytest.mark.parametrize("holder", HOLDERS)
def test_bytes_of_held_tensors_are_compared(holder: str) -> None:
    """Writes through .data increment no version; the first calls compare bytes."""
    scene, held = trained(), torch.ones(3)
    scene.module.held = HOLDERS[holder](held)
    assert "held" in observe(scene.state, lambda: held.data.mul_(2))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda outside: outside.data.mul_(2), "other tensors/0"),
        (lambda outside: outside.detach().mul_(2), "other tensors/0"),
        (lambda outside: outside.grad.mul_(2), "gradient of other tensors/0"),
        (lambda outside: setattr(outside, "grad", None), "a parameter that only the optimizer has"),
        (lambda outside: outside.requires_grad_(False), "a parameter that only the optimizer has"),
    ],
    ids=["data", "in place", "gradient", "no gradient", "frozen"],
)
def test_parameters_outside_of_the_model_are_watched(change: Callable[[nn.Parameter], object], named: str) -> None:
    """A learned temperature, or the head of a loss, that only the optimizer holds."""
    scene, outside = trained(), nn.Parameter(torch.ones(4))
    outside.grad = torch.ones(4)
    scene.optimizer.add_param_group({"params": [outside]})
    assert named in observe(scene.state, lambda: change(outside))
