import gc
import weakref
from contextlib import suppress

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from loopscope.isolation import StateCopy
from loopscope.state import RandomStreams, TrainingState
from loopscope.training import forward_backward, update
from torch import nn

from tests.support import CASES, Case, Tally, build, differences
from tests.support.misbehaving_hooks import EMPTYING, HARMLESS, MUTATIONS, Scene, train_one_step

CASE = Case()


def trained(case: Case = CASE, steps: int = 1) -> tuple[Scene, TrainingState]:
    """Build a run and take ``steps`` steps, so that it has gradients and optimizer state."""
    task, state = build(case)
    scene = Scene(task, state)
    for _ in range(steps):
        forward_backward(task, next(iter(task.loader)))
        update(task, step_scheduler=True)
    return scene, state


def bare_state(model: nn.Module, **parts) -> TrainingState:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters or [nn.Parameter(torch.zeros(1))], lr=0.1)
    return TrainingState(model, optimizer, RandomStreams(1), **parts)


def holder(**buffers: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return module


@pytest.mark.parametrize("case", [case for case in CASES if case.loop == "epoch"], ids=str)
def test_restore_undoes_training(case):
    scene, state = trained(case)
    original = state.digest()
    snapshot = StateCopy(streams=True).save(state)
    for _ in range(3):
        train_one_step(scene)
    assert differences(original, state.digest()) != []
    snapshot.restore(state)
    assert differences(original, state.digest()) == []


def test_snapshot_can_be_restored_repeatedly():
    scene, state = trained()
    original = state.digest()
    snapshot = StateCopy(streams=True).save(state)
    for _ in range(2):
        train_one_step(scene)
        snapshot.restore(state)
        assert differences(original, state.digest()) == []


def test_restore_removes_optimizer_state_created_after_save():
    """The gradients are None again."""
    task, state = build(Case())
    snapshot = StateCopy(streams=True).save(state)
    train_one_step(Scene(task, state))
    snapshot.restore(state)
    assert dict(state.optimizer.state) == {}
    assert [parameter.grad for parameter in task.model.parameters()] == [None] * 6


def test_empty_state_copy_cannot_be_restored():
    _, state = trained()
    with pytest.raises(RuntimeError, match="the state copy is empty"):
        StateCopy().restore(state)


def test_snapshot_buffers_are_reused_across_saves():
    """The gradients are new tensors at every step."""
    scene, state = trained()
    snapshot = StateCopy(streams=True).save(state)
    pointers = {name: tensor.data_ptr() for name, tensor in snapshot.tensors.items()}
    for _ in range(3):
        train_one_step(scene)
        snapshot.save(state)
    assert {name: tensor.data_ptr() for name, tensor in snapshot.tensors.items()} == pointers


@pytest.mark.longer
def test_released_gradients_are_freed():
    scene, state = trained()
    snapshot = StateCopy(streams=True).save(state)
    gradient = weakref.ref(scene.parameter.grad)
    snapshot.release()
    scene.optimizer.zero_grad()
    gc.collect()
    assert gradient() is None


def test_restore_preserves_object_identities():
    scene, state = trained()
    moments, groups, tables = (
        scene.moments,
        state.optimizer.param_groups,
        [m._parameters for m in scene.model.modules()],
    )
    parameters = [*scene.model.parameters()]
    gradients = [parameter.grad for parameter in parameters]
    snapshot = StateCopy(streams=True).save(state)
    for name in ("load_an_old_optimizer_state", "replace_the_parameter_table", "replace_the_parameter_groups"):
        MUTATIONS[name](scene)
    snapshot.restore(state)
    assert all(a is b for a, b in zip(parameters, scene.model.parameters(), strict=True))
    assert all(a is b.grad for a, b in zip(gradients, parameters, strict=True))
    assert all(a is b for a, b in zip(moments, scene.moments, strict=True))
    assert all(a is b._parameters for a, b in zip(tables, scene.model.modules(), strict=True))
    assert state.optimizer.param_groups is groups


def test_restored_parameter_views_still_share_storage():
    flat = torch.arange(6.0)
    model = nn.Module()
    model.first, model.second = nn.Parameter(flat[:4].view(2, 2)), nn.Parameter(flat[4:])
    state = bare_state(model)
    snapshot = StateCopy(streams=True).save(state)
    model.first.data = torch.zeros(2, 2)
    model.second.data = model.second.data.clone()
    flat.zero_()
    snapshot.restore(state)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5]
    flat[0] = 9
    assert model.first[0, 0] == 9


@pytest.mark.parametrize("had_one", [True, False])
def test_gradient_is_restored_as_same_object_or_none(had_one):
    model = nn.Linear(2, 2)
    model.weight.grad = gradient = torch.ones(2, 2) if had_one else None
    state = bare_state(model)
    snapshot = StateCopy(streams=True).save(state)
    model.weight.grad = None if had_one else torch.ones(2, 2)
    snapshot.restore(state)
    assert model.weight.grad is gradient


DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.complex64,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
]


def bytes_of(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_any_dtype_is_restored(dtype):
    """The data of the parameter was replaced and the storage of the buffer was overwritten."""
    noise = torch.randint(0, 2 if dtype is torch.bool else 256, (64,), dtype=torch.uint8)
    parameter = nn.Parameter(noise.view(dtype).clone(), requires_grad=False)
    model = holder(buffer=noise.flip(0).view(dtype).clone())
    model.register_parameter("parameter", parameter)
    state = bare_state(model)
    original = bytes_of(parameter), bytes_of(model.buffer)
    snapshot = StateCopy(streams=True).save(state)
    parameter.data = torch.zeros(3)
    model.buffer.untyped_storage().fill_(0)
    snapshot.restore(state)
    assert (bytes_of(parameter), bytes_of(model.buffer)) == original
    assert parameter.dtype is dtype


LAYOUTS = {
    "expanded": torch.arange(3.0)[:, None].expand(3, 4),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "channels last": torch.arange(48.0).view(2, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "strided": torch.arange(12.0)[::3],
    "overlapping": torch.arange(5.0).unfold(0, 3, 1),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(3.0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_memory_layout_is_restored(layout):
    """The tensor object, its values and its strides are those before the change."""
    tensor = LAYOUTS[layout].clone() if layout in ("empty", "scalar") else LAYOUTS[layout]
    model = holder(buffer=tensor)
    values, stride = tensor.tolist(), tensor.stride()
    state = bare_state(model)
    snapshot = StateCopy(streams=True).save(state)
    model.buffer.untyped_storage().fill_(1)
    model.buffer.data = torch.zeros(2)
    snapshot.restore(state)
    assert model.buffer is tensor
    assert (tensor.tolist(), tensor.stride()) == (values, stride)


def test_sparse_gradient_is_restored():
    model = nn.Embedding(5, 2, sparse=True)
    model(torch.tensor([1, 3])).square().sum().backward()
    state = bare_state(model)
    gradient, original = model.weight.grad, state.digest()
    snapshot = StateCopy(streams=True).save(state)
    with torch.no_grad():
        gradient.mul_(2)
        gradient.zero_()
    snapshot.restore(state)
    assert model.weight.grad is gradient
    assert differences(original, state.digest()) == []


def test_extra_state_is_restored_and_not_shared():
    """The snapshot has a separate copy of extras, which can be restored twice."""
    tally = Tally()
    state = bare_state(nn.Linear(1, 1), extras={"tally": tally})
    snapshot = StateCopy(streams=True).save(state)
    for _ in range(2):
        tally.count += 5
        tally.table.zero_()
        snapshot.restore(state)
        assert (tally.count, tally.table.tolist()) == (0, [0, 1, 2, 3])


def test_gradient_scaler_is_restored():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    model = nn.Linear(1, 1)
    state = bare_state(model, scaler=scaler)
    scaler.scale(model(torch.ones(1)).sum()).backward()
    original = state.digest()
    snapshot = StateCopy(streams=True).save(state)
    scaler.step(state.optimizer)
    scaler.update()
    assert scaler.get_scale() == 16.0
    snapshot.restore(state)
    assert differences(original, state.digest()) == []
    assert scaler.get_scale() == 8.0


def schedulers(optimizer):
    lr_scheduler = torch.optim.lr_scheduler
    warm = lr_scheduler.LinearLR(optimizer, 0.1)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 3)
    yield lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[2])
    yield lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=9)
    yield lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    yield lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize("index", range(4))
def test_scheduler_and_its_optimizer_settings_are_restored(index):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = [*schedulers(optimizer)][index]
    optimizer.step()
    state = TrainingState(model, optimizer, RandomStreams(1), scheduler=scheduler)
    original = state.digest()
    snapshot = StateCopy(streams=True).save(state)
    for _ in range(3):
        scheduler.step()
    assert differences(original, state.digest()) != []
    snapshot.restore(state)
    assert differences(original, state.digest()) == []


def test_module_generators_are_restored():
    model = nn.Linear(1, 1)
    model.rounding = torch.Generator().manual_seed(3)
    state = bare_state(model)
    original = state.digest()
    snapshot = StateCopy(streams=True).save(state)
    torch.rand(2, generator=model.rounding)
    assert differences(original, state.digest()) == ["generators/0"]
    snapshot.restore(state)
    assert differences(original, state.digest()) == []


def test_changes_by_the_run_between_saves_remain():
    """The second save includes a new module, a new parameter group and a frozen parameter."""
    scene, state = trained()
    snapshot = StateCopy(streams=True).save(state)
    scene.matrix.requires_grad_(False)
    scene.model.add_module("head", nn.Linear(2, 2))
    scene.optimizer.add_param_group({"params": [*scene.model.head.parameters()]})
    scene.module.weight.data = torch.full_like(scene.module.weight, 2.0)
    original = state.digest()
    snapshot.save(state)
    for name in ("write_in_place", "freeze_the_model", "remove_a_parameter_from_its_group", "delete_a_parameter"):
        MUTATIONS[name](scene)
    snapshot.restore(state)
    assert differences(original, state.digest()) == []


def test_parameter_hooks_still_run_after_swapped_tensors():
    model = nn.Linear(1, 1, bias=False)
    seen = []
    model.weight.register_hook(lambda gradient: seen.append("gradient"))
    model.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    state = bare_state(model)
    snapshot = StateCopy(streams=True).save(state)
    torch.utils.swap_tensors(model.weight, nn.Parameter(torch.ones(1, 1)))
    snapshot.restore(state)
    model(torch.ones(1)).backward()
    assert seen == ["gradient", "accumulated"]


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_left_on_a_parameter_no_longer_act(register):
    model = nn.Linear(1, 1, bias=False)
    state = bare_state(model)
    snapshot = StateCopy(streams=True).save(state)
    seen = []
    getattr(model.weight, register)(lambda tensor: seen.append(1))
    snapshot.restore(state)
    model(torch.ones(1)).backward()
    assert seen == []


def test_prehooks_left_on_gradient_accumulation_are_dropped():
    """The restore replaces the accumulation node."""
    model = nn.Linear(1, 1, bias=False)
    state = bare_state(model)
    snapshot = StateCopy().save(state)
    node = model.weight.expand(1, 1).grad_fn.next_functions[0][0]
    node.register_prehook(lambda gradients: tuple(gradient * 0 for gradient in gradients))
    snapshot.restore(state)
    model(torch.ones(1)).backward()
    assert model.weight.grad == 1
    assert node is not torch.autograd.graph.get_gradient_edge(model.weight).node


def test_earlier_hooks_on_accumulation_remain():
    model = nn.Linear(1, 1, bias=False)
    seen = []
    node = model.weight.expand(1, 1).grad_fn.next_functions[0][0]
    node.register_prehook(lambda gradients: seen.append(1))
    state = bare_state(model)
    snapshot = StateCopy().save(state)
    kept = model(torch.ones(1)) ** 2
    snapshot.restore(state)
    model(torch.ones(1)).backward()
    assert seen == [1]
    assert kept.requires_grad


def test_modules_outside_the_module_tree_are_restored():
    """A module is stored in a list attribute."""
    model = nn.Linear(1, 1)
    model.teacher = [nn.BatchNorm1d(1)]
    state = bare_state(model)
    original = state.digest()
    snapshot = StateCopy(streams=True).save(state)
    model.teacher[0](torch.randn(4, 1))
    assert differences(original, state.digest()) != []
    snapshot.restore(state)
    assert differences(original, state.digest()) == []


def test_every_tensor_of_a_snapshot_is_digested():
    for case in CASES[:12]:
        _, state = trained(case)
        digested = {id(tensor) for tensor in state.tensors().values()}
        snapshot = StateCopy(streams=True).save(state)
        copied = snapshot._persistent.structure.tensors + snapshot._temporary[0].tensors
        assert [tensor for tensor in copied if id(tensor) not in digested] == []


class GuardianMachine(RuleBasedStateMachine):
    """Saves, mutations, steps of the run and restores in any order: a restored state is the saved one."""

    def __init__(self) -> None:
        super().__init__()
        self.scene, self.state = trained(Case(model="tied"))
        self.snapshots = [StateCopy(streams=True), StateCopy(streams=True)]
        self.saved: list[dict[str, int] | None] = [None, None]
        self.intact = True
        self.emptied = False

    @precondition(lambda self: self.intact)
    @rule(slot=st.integers(0, 1))
    def save(self, slot):
        self.snapshots[slot].save(self.state)
        self.saved[slot] = self.state.digest()

    @precondition(lambda self: self.intact)
    @rule()
    def train(self):
        train_one_step(self.scene)

    @precondition(lambda self: any(self.saved) and not self.emptied)
    @rule(name=st.sampled_from(sorted(MUTATIONS.keys() - HARMLESS - {"enter_inference_mode"})))
    def damage(self, name):
        with suppress(RuntimeError, AttributeError, IndexError, KeyError, TypeError, ValueError):
            MUTATIONS[name](self.scene)  # a mutation may fail after an earlier one
        self.intact = False
        self.emptied = name in EMPTYING

    @precondition(lambda self: any(self.saved))
    @rule(slot=st.integers(0, 1))
    def restore(self, slot):
        if self.saved[slot] is not None:
            self.snapshots[slot].restore(self.state)
            assert differences(self.saved[slot], self.state.digest()) == []
            self.intact, self.emptied = True, False

    def teardown(self):
        for snapshot, saved in zip(self.snapshots, self.saved, strict=True):
            if saved is not None:
                snapshot.restore(self.state)


def test_swapped_meta_optimizer_tensor_is_restored():
    """The tensor was swapped with one on the meta device."""
    scene, state = trained(Case())
    original, snapshot = state.digest(), StateCopy().save(state)
    torch.utils.swap_tensors(scene.moments[0], torch.empty(4, device="meta"))
    snapshot.restore(state)
    assert differences(original, state.digest()) == []


TestGuardian = pytest.mark.longer(GuardianMachine.TestCase)
TestGuardian.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
