"""Entries of watched tables that change their kind: by the run, an observer or an intervention."""

import collections

import loopscope
import pytest
import torch
from loopscope import HookPoint, InterventionHook, TensorLoader, TrainingHook, random_order
from loopscope.engine import HookManager
from loopscope.errors import StateMutationError
from loopscope.isolation import Call, Isolation
from loopscope.loops import epoch_loop
from loopscope.state import RandomStreams, TrainingState, seed_everything
from loopscope.training import TrainingTask
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.support.cases import some_of

ABSENT = object()
# torch warns at the first tensor of either kind that its support is in beta or will be moved.
pytestmark = [pytest.mark.filterwarnings("ignore:Sparse CSR"), pytest.mark.filterwarnings("ignore:.*quantiz")]


class Tagged(torch.Tensor):
    """A subclass without further attributes."""


@torch.inference_mode()
def inference_tensor() -> torch.Tensor:
    return torch.ones(4)


TENSORS = {
    "tensor": lambda: torch.ones(4),
    "half": lambda: torch.ones(4).half(),
    "longer": lambda: torch.ones(9),
    "expanded": lambda: torch.ones(1).expand(4),
    "conjugate": lambda: torch.ones(4, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "meta": lambda: torch.ones(4, device="meta"),
    "inference": inference_tensor,
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "subclass": lambda: torch.ones(4).as_subclass(Tagged),
    "wrapper": lambda: TwoTensor(torch.ones(4), torch.ones(4)),
    "uninitialised": nn.parameter.UninitializedBuffer,
}
VALUES = {
    "scalar tensor": lambda: torch.tensor(1.0),
    "float": lambda: 1.0,
    "int": lambda: 1,
    "bool": lambda: True,
    "none": lambda: None,
    "list": lambda: [1.0, 2.0],
    "list with tensors": lambda: [torch.ones(2), 1],
    "nested dict": lambda: {"a": {"b": torch.ones(2)}},
    "empty dict": dict,
    "object": lambda: collections.Counter("aab"),
    "parameter": lambda: nn.Parameter(torch.ones(4)),
    "absent": lambda: ABSENT,
}
KINDS = TENSORS | VALUES
PLACES = {
    "buffer": lambda task: task.model[0]._buffers,
    "the only buffer": lambda task: task.model[1]._buffers,
    "parameter": lambda task: task.model[1]._parameters,
    "attribute": lambda task: vars(task.model[1]),
    "optimizer state": lambda task: task.optimizer.state[task.model[0].weight],
    "nested optimizer state": lambda task: task.optimizer.state[task.model[0].weight]["nested"],
    "optimizer state of a parameter": lambda task: task.optimizer.state,
    "option of a group": lambda task: task.optimizer.param_groups[0],
    "scheduler": lambda task: vars(task.scheduler),
}


def both_ways(places, kinds, to):
    """Return (place, old kind, new kind) for every kind, from and to the kinds in ``to``."""
    pairs = [(other, kind) for kind in kinds for other in to if other != kind]
    return [(place, *pair) for place in places for first in pairs for pair in (first, first[::-1])]


CASES = [
    *both_ways(["buffer"], TENSORS, ["tensor"]),
    *both_ways(["buffer"], ["tensor", "sparse", "uninitialised"], ["none"]),
    *both_ways(["the only buffer"], ["tensor", "none"], ["absent"]),
    *both_ways(["parameter"], ["parameter"], ["none", "absent"]),
    *both_ways(["optimizer state"], VALUES, ["tensor"]),
    *both_ways(["optimizer state"], ["float", "none", "list", "sparse", "wrapper"], ["absent"]),
    *both_ways(["optimizer state of a parameter"], ["list", "none"], ["absent", "nested dict"]),
    *both_ways(["attribute", "nested optimizer state"], ["float", "none", "list", "absent"], ["scalar tensor"]),
    *both_ways(["scheduler", "option of a group"], ["float", "none", "nested dict"], ["scalar tensor"]),
    *both_ways(["optimizer state", "attribute", "scheduler"], ["float", "bool"], ["int"]),
]
# The task refuses a model with uninitialised buffers at the start.
CASES = [case for case in CASES if case[1] != "uninitialised"]


def put(task, place: str, kind: str) -> None:
    table = PLACES[place](task)
    key = task.model[0].weight if place == "optimizer state of a parameter" else "entry"
    value = KINDS[kind]()
    if value is ABSENT:
        table.pop(key, None)
    else:
        table[key] = value


class Changing(torch.optim.SGD):
    """An optimizer whose second step also changes another entry."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, lr=0.1)
        self.steps, self.change = 0, lambda: None

    def step(self, closure=None):
        result = super().step(closure)
        self.steps += 1
        if self.steps == 2:
            self.change()
        return result


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def build_task(place: str, old_kind: str, loader_class=TensorLoader) -> TrainingTask:
    """Return a task of three steps with a value of the kind ``old_kind`` at ``place``."""
    seed_everything(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].register_buffer("other", torch.zeros(2))
    optimizer = Changing(model.parameters())
    optimizer.state[model[0].weight] = {"first": torch.ones(1), "nested": {"count": 1}}
    loader = loader_class((torch.randn(12, 4), torch.randint(3, (12,))), 4, random_order(12, seed=1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    task = TrainingTask(model, optimizer, loader, loss, evaluate=lambda m: {}, length=1, scheduler=scheduler)
    put(task, place, old_kind)
    return task


def train_in_epoch_loop(task, hook, audit, folder) -> None:
    state = TrainingState(task.model, task.optimizer, RandomStreams(1), scheduler=task.scheduler)
    epoch_loop(task, HookManager([hook], task, state, audit=audit))


def train_attached(task, hook, audit, folder) -> None:
    scope = loopscope.attach(
        *(task.model, task.optimizer),
        **dict(hooks=[hook], loss=loss, scheduler=task.scheduler, out=folder, display="none", audit=audit),
    )
    with scope:
        for batch in scope.batches([*task.loader]):
            scope.backward(loss(task.model, batch))
            task.optimizer.step()
            task.optimizer.zero_grad()
            task.scheduler.step()


def train_bare(task) -> None:
    for batch in task.loader:
        loss(task.model, batch).backward()
        task.optimizer.step()
        task.optimizer.zero_grad()
        task.scheduler.step()


def comparable(value):
    """Return a value with its type, and tensors as lists, so that the results of two runs can be compared."""
    if isinstance(value, dict):
        return {
            "a parameter" if isinstance(key, nn.Parameter) else key: comparable(item) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [comparable(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return type(value), value
    try:
        return type(value), value.layout, value.dtype, value.to_dense().tolist()
    except (NotImplementedError, RuntimeError, ValueError):  # meta and uninitialised tensors
        return type(value), value.dtype


def final_contents(task):
    """Describe the contents of a task after training."""
    modules = [(module._buffers, module._parameters, vars(module).get("entry", "none")) for module in task.model]
    options = [{key: value for key, value in group.items() if key != "params"} for group in task.optimizer.param_groups]
    return comparable([modules, task.optimizer.state, options, vars(task.scheduler).get("entry", "none")])


def hook_calling(act, base=TrainingHook):
    """Return a hook that calls ``act`` after step 2."""

    def method(self, ctx, model_ctx=None):
        if ctx.step == 2:
            act()
        return {"seen": 1.0}

    method_name = "compute" if base is TrainingHook else "intervene"
    return type(
        "Acting",
        (base,),
        {"name": "acting", "hook_points": {HookPoint.POST_STEP}, "metrics": "seen | 1 | 1 | one", method_name: method},
    )()


LOOPS = {"epoch loop": train_in_epoch_loop, "attached": train_attached}
LOOP_AUDIT_PAIRS = [(loop, audit) for loop in LOOPS for audit in (False, True)]
parametrised = pytest.mark.parametrize(
    ("case", "loop", "audit"),
    some_of((case, *LOOP_AUDIT_PAIRS[index // 2 % len(LOOP_AUDIT_PAIRS)]) for index, case in enumerate(CASES)),
    ids=str,
)


@pytest.mark.longer
@pytest.mark.some_rows(5)
@pytest.mark.guarantee("observers-change-nothing")
@parametrised
def test_run_may_change_kinds(case, loop, audit, tmp_path):
    """The optimizer's second step changes the kind, and the result equals that of a bare loop."""
    place, old_kind, new_kind = case
    for base in (TrainingHook, InterventionHook):
        tasks = [build_task(place, old_kind) for _ in range(2)]
        for task in tasks:
            task.optimizer.change = lambda task=task: put(task, place, new_kind)
        LOOPS[loop](tasks[0], hook_calling(lambda: None, base), audit, tmp_path / base.__name__)
        train_bare(tasks[1])
        assert final_contents(tasks[0]) == final_contents(tasks[1])


@pytest.mark.some_rows(5)
@pytest.mark.guarantee("observers-change-nothing")
@parametrised
def test_observer_that_changes_kinds_is_caught(case, loop, audit, tmp_path):
    """An observer that replaces an entry of the training state by one of another type ends the run."""
    place, old_kind, new_kind = case
    task = build_task(place, old_kind)
    with pytest.raises(
        StateMutationError, match=r"Hook 'acting' at POST_STEP of step 2 .* changed the training state: "
    ):
        LOOPS[loop](task, hook_calling(lambda: put(task, place, new_kind)), audit, tmp_path / "run")


@pytest.mark.some_rows(5)
@pytest.mark.guarantee("interventions-are-undone")
@parametrised
def test_intervention_that_changes_kinds_is_rolled_back(case, loop, audit, tmp_path):
    """An intervention that replaces an entry of the state by one of another type is rolled back."""
    place, old_kind, new_kind = case
    task, other = build_task(place, old_kind), build_task(place, old_kind)
    LOOPS[loop](task, hook_calling(lambda: put(task, place, new_kind), InterventionHook), audit, tmp_path / "run")
    train_bare(other)
    assert final_contents(task) == final_contents(other)


NAMES = {
    ("buffer", "tensor", "none"): "modules/0._buffers.entry.",
    ("buffer", "none", "tensor"): "modules/0._buffers.entry.",
    ("the only buffer", "tensor", "absent"): "modules/1._buffers.entry.",
    ("the only buffer", "absent", "tensor"): "modules/1._buffers.entry.",
    ("parameter", "none", "parameter"): "modules/1._parameters.entry.",
    ("attribute", "tensor", "absent"): "the attributes of modules/1.",
    ("optimizer state", "tensor", "absent"): "optimizer/0.weight.entry.",
    ("optimizer state", "scalar tensor", "float"): "optimizer/0.weight.entry.",
    ("optimizer state of a parameter", "nested dict", "absent"): "optimizer state.parameters/0.weight.",
    ("option of a group", "float", "scalar tensor"): "the optimizer's hyper-parameters or groups (entry).",
    ("scheduler", "float", "scalar tensor"): "the scheduler (entry).",
}


@pytest.mark.parametrize("case", NAMES, ids=str)
def test_error_names_the_changed_entry(case):
    place, old_kind, new_kind = case
    task = build_task(place, old_kind)
    isolation = Isolation(TrainingState(task.model, task.optimizer, RandomStreams(1), scheduler=task.scheduler))
    with pytest.raises(StateMutationError) as caught, isolation.visit():
        isolation.observe(Call("spy", "POST_STEP", 1), lambda: put(task, place, new_kind))
    assert f"changed the training state: {NAMES[case]}" in str(caught.value)


def test_lazy_buffers_in_a_run_are_rolled_back():
    """An intervention that gives an uninitialised buffer its shape leaves it without one."""
    task = build_task("buffer", "none")
    task.model[0]._buffers["entry"] = buffer = nn.parameter.UninitializedBuffer()
    state = TrainingState(task.model, task.optimizer, RandomStreams(1))
    isolation, original = Isolation(state, audit=True), state.digest()
    with isolation.visit():
        isolation.intervene(Call("spy", "POST_STEP", 1), lambda: buffer.materialize((2,)), mutates=True)
    assert type(buffer) is nn.parameter.UninitializedBuffer
    assert state.digest() == original


class WithNone(TensorLoader):
    """A loader of batches that end with None."""

    def batches(self, *arguments):
        for batch in super().batches(*arguments):
            yield (*batch, None)


@pytest.mark.parametrize(("loop", "audit"), LOOP_AUDIT_PAIRS)
def test_batch_may_contain_none(loop, audit, tmp_path):
    task = build_task("buffer", "none", WithNone)
    LOOPS[loop](task, hook_calling(lambda: None), audit, tmp_path / "run")
    assert task.optimizer.steps == 3


GRADIENTS = {
    "none": lambda parameter: None,
    "sparse": lambda parameter: torch.ones(parameter.shape).to_sparse(),
    "expanded": lambda parameter: torch.ones(1).expand(parameter.shape),
    "subclass": lambda parameter: torch.ones(parameter.shape).as_subclass(Tagged),
}


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("audit", [False, True])
def test_gradients_may_change_kind_between_steps(kind, audit):
    task = build_task("buffer", "none")
    weight = task.model[0].weight
    state = TrainingState(task.model, task.optimizer, RandomStreams(1))
    isolation, call = Isolation(state, audit=audit), Call("spy", "POST_STEP", 1)

    def change(gradient=None):
        weight.grad = gradient if gradient is not None else GRADIENTS[kind](weight)

    for _ in range(2):
        for step in (lambda: change(torch.ones_like(weight)), change):
            step()
            gradient = weight.grad
            with isolation.visit():
                isolation.observe(call, lambda: None)
                isolation.intervene(call, lambda: change(torch.zeros_like(weight)), mutates=True)
            assert weight.grad is gradient
    with pytest.raises(StateMutationError, match=r"a gradient was replaced|gradients/0.weight"), isolation.visit():
        isolation.observe(call, lambda: change(torch.zeros_like(weight)))
