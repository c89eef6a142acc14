"""A hook that only reads, or that reverts its changes, raises no alarm from the tripwire or the audit."""

import copy
import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from loopscope.errors import StateMutationError
from loopscope.hooks import HookPoint
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.contracts.test_misbehaving_hooks import MisbehavingObserver, MisbehavingReader, only_at, train_with
from tests.support import Case, SpyHook, assert_same_bytes, at, train
from tests.support.misbehaving_hooks import MUTATIONS, Scene

pytestmark = pytest.mark.longer

CASE = Case()
REVERTED_MUTATIONS: dict[str, Callable[[Scene], object]] = {}
do_nothing = lambda *args, **options: None


def harmless(function: Callable[[Scene], object]) -> Callable[[Scene], object]:
    REVERTED_MUTATIONS[function.__name__] = function
    return function


def parameters(scene: Scene) -> list[nn.Parameter]:
    return [*scene.model.parameters()]


@harmless
def measure_a_norm_by_clipping_to_infinity(scene):
    torch.nn.utils.clip_grad_norm_(parameters(scene), float("inf"))


@harmless
def measure_a_norm_one_by_one(scene):
    torch.nn.utils.clip_grad_norm_(parameters(scene), float("inf"), foreach=False)


@harmless
def clip_values_to_infinity(scene):
    torch.nn.utils.clip_grad_value_(parameters(scene), float("inf"))


@harmless
def measure_the_total_norm(scene):
    torch.nn.utils.get_total_norm([p.grad for p in parameters(scene) if p.grad is not None])


@harmless
def register_and_remove_a_full_backward_hook(scene):
    scene.module.register_full_backward_hook(do_nothing).remove()


@harmless
def register_and_remove_a_backward_pre_hook(scene):
    scene.module.register_full_backward_pre_hook(do_nothing).remove()


@harmless
def register_and_remove_a_forward_hook(scene):
    scene.module.register_forward_hook(do_nothing).remove()


@harmless
def register_and_remove_a_forward_hook_with_options(scene):
    scene.module.register_forward_hook(do_nothing, with_kwargs=True, always_call=True).remove()


@harmless
def register_and_remove_a_forward_pre_hook(scene):
    scene.module.register_forward_pre_hook(do_nothing, with_kwargs=True).remove()


@harmless
def register_and_remove_a_state_dict_hook(scene):
    scene.module.register_state_dict_post_hook(do_nothing).remove()


@harmless
def register_and_remove_a_state_dict_pre_hook(scene):
    scene.module.register_state_dict_pre_hook(do_nothing).remove()


@harmless
def register_and_remove_a_loading_hook(scene):
    scene.module.register_load_state_dict_post_hook(do_nothing).remove()


@harmless
def register_and_remove_a_hook_on_a_parameter(scene):
    scene.parameter.register_hook(do_nothing).remove()


@harmless
def register_and_remove_a_hook_after_accumulation(scene):
    scene.parameter.register_post_accumulate_grad_hook(do_nothing).remove()


@harmless
def register_and_remove_a_hook_before_steps(scene):
    scene.optimizer.register_step_pre_hook(do_nothing).remove()


@harmless
def register_and_remove_hooks_of_the_optimizer(scene):
    scene.optimizer.register_step_post_hook(do_nothing).remove()
    scene.optimizer.register_state_dict_post_hook(do_nothing).remove()


@harmless
def register_and_remove_a_hook_on_all_modules(scene):
    nn.modules.module.register_module_forward_hook(do_nothing).remove()


@harmless
def register_and_remove_a_backward_hook_on_all_modules(scene):
    nn.modules.module.register_module_full_backward_hook(do_nothing).remove()


@harmless
def read_state_dict(scene):
    scene.model.state_dict()
    scene.optimizer.state_dict()
    scene.task.scheduler.state_dict()


@harmless
def zero_a_copy_of_the_model(scene):
    m = copy.deepcopy(scene.model)
    m.requires_grad_(False)
    [p.zero_() for p in m.parameters()]


@harmless
def train_a_copy_of_the_model(scene):
    m = copy.deepcopy(scene.model)
    with torch.enable_grad():
        scene.task.compute_loss(m, scene.batch).backward()


@harmless
def copy_the_optimizer(scene):
    copy.deepcopy(scene.optimizer)


@harmless
def load_the_models_own_values(scene):
    scene.model.load_state_dict({k: v.clone() for k, v in scene.model.state_dict().items()})


@harmless
def load_the_models_own_tensors(scene):
    scene.model.load_state_dict(scene.model.state_dict())


@harmless
def differentiate_in_eval_mode(scene):
    scene.model.eval()
    with torch.enable_grad():
        torch.autograd.grad(scene.task.compute_loss(scene.model, scene.batch), parameters(scene), allow_unused=True)
    scene.model.train()


@harmless
def call_the_model_with_copies(scene):
    m = scene.model
    m.eval()
    torch.func.functional_call(m, {k: v.clone() for k, v in m.named_parameters()}, (scene.batch[0],))
    m.train()


@harmless
def eval_then_train(scene):
    scene.model.eval()
    scene.model.train()


@harmless
def run_forward_in_eval_mode(scene):
    scene.model.eval()
    scene.model(scene.batch[0])
    scene.model.train()


@harmless
def no_grad_blocks(scene):
    with torch.no_grad(), torch.enable_grad(), torch.inference_mode():
        pass


@harmless
def run_forward_under_autocast(scene):
    scene.model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        scene.model(scene.batch[0])
    scene.model.train()


@harmless
def change_the_default_dtype_and_back(scene):
    torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(torch.float32)


@harmless
def change_determinism_and_back(scene):
    b = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(not b)
    torch.use_deterministic_algorithms(b)


@harmless
def change_the_threads_and_back(scene):
    n = torch.get_num_threads()
    torch.set_num_threads(n + 1)
    torch.set_num_threads(n)


@harmless
def read_through_numpy(scene):
    scene.parameter.detach().numpy().sum()


@harmless
def read_through_data(scene):
    scene.parameter.data.norm()
    [p.grad.data.norm() for p in parameters(scene) if p.grad is not None]


@harmless
def requires_grad_and_back(scene):
    scene.matrix.requires_grad_(False)
    scene.matrix.requires_grad_(True)


@harmless
def change_the_learning_rate_and_back(scene):
    g = scene.optimizer.param_groups[0]
    lr = g["lr"]
    g["lr"] = 1
    g["lr"] = lr


@harmless
def set_an_attribute_and_delete_it(scene):
    scene.model.extra = 1
    del scene.model.extra


@harmless
def exchange_data_and_back(scene):
    w = scene.matrix.data
    scene.matrix.data = torch.zeros_like(w)
    scene.matrix.data = w


@harmless
def drop_a_gradient_and_restore_it(scene):
    g = scene.parameter.grad
    scene.parameter.grad = None
    scene.parameter.grad = g


@harmless
def add_nothing(scene):
    with torch.no_grad():
        scene.parameter.add_(0)


@harmless
def multiply_by_one(scene):
    scene.parameter.grad is not None and scene.parameter.grad.mul_(1)


@harmless
def write_the_state_to_a_file(scene):
    torch.save(scene.model.state_dict(), io.BytesIO())


@harmless
def print_everything(scene):
    repr(scene.model), repr(scene.optimizer), str(scene.task.scheduler.__dict__)


@harmless
def named_everything(scene):
    list(scene.model.named_modules()), list(scene.model.named_parameters()), list(scene.model.named_buffers())


@harmless
def apply_nothing(scene):
    scene.model.apply(do_nothing)


@harmless
def read_through_dlpack(scene):
    torch.from_dlpack(scene.parameter.detach()).sum()


@harmless
def make_a_graph_and_drop_it(scene):
    with torch.enable_grad():
        (scene.parameter * 2).sum()


@harmless
def run_backward_on_a_copy(scene):
    with torch.enable_grad():
        p = scene.parameter.detach().clone().requires_grad_()
        (p**2).sum().backward()


@harmless
def run_forward_in_train_mode(scene):
    scene.ctx and scene.ctx.forward(scene.batch[0], train=True)


@harmless
def measure_gradients(scene):
    scene.ctx and scene.ctx.compute_batch_gradients(scene.batch)


@harmless
def take_a_hessian(scene):
    with torch.enable_grad():
        p = scene.parameter.detach()
        torch.func.hessian(lambda x: (x**2).sum())(p.flatten()[:3])


@harmless
def decompose(scene):
    torch.linalg.svd(scene.matrix.detach())


@harmless
def flatten_the_parameters(scene):
    torch.nn.utils.parameters_to_vector(scene.model.parameters())


@harmless
def read_optimizer_state(scene):
    scene.optimizer.state.get(scene.parameter)


@harmless
def read_the_learning_rate(scene):
    scene.task.scheduler.get_last_lr()


@harmless
def saved_tensor_hooks(scene):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        pass


@harmless
def parametrize_a_copy(scene):
    m = copy.deepcopy(scene.module)
    nn.utils.parametrize.register_parametrization(m, "weight", nn.Identity())


@harmless
def count_operations(scene):
    scene.model.eval()
    with FlopCounterMode(display=False):
        scene.model(scene.batch[0])
    scene.model.train()


@harmless
def detect_anomalies(scene):
    with torch.autograd.set_detect_anomaly(True):
        pass


@harmless
def silence_numpy(scene):
    with np.errstate(all="ignore"):
        pass


@pytest.fixture(autouse=True)
def mutations(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, mutation in REVERTED_MUTATIONS.items():
        monkeypatch.setitem(MUTATIONS, name, mutation)


def assert_no_alarm(kind: type, names: list[str], *, audit: bool) -> None:
    mutator = only_at(kind, HookPoint.POST_BACKWARD, HookPoint.POST_EPOCH)(names)
    assert_same_bytes(train_with(mutator, CASE, audit=audit), CASE)
    assert mutator.done == 4


@pytest.mark.some_rows(2)
@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("name", REVERTED_MUTATIONS)
def test_harmless_mutation_raises_no_alarm(name: str) -> None:
    """Under audit, a mutation that is undone leaves every byte of the run as it was."""
    assert_no_alarm(MisbehavingObserver, [name], audit=True)


@pytest.mark.parametrize("audit", [False, True])
@pytest.mark.parametrize("kind", [MisbehavingObserver, MisbehavingReader])
def test_all_harmless_mutations_together_raise_no_alarm(kind: type, audit: bool) -> None:
    """Observers and reading interventions pass with the tripwire alone and under audit."""
    assert_no_alarm(kind, [*REVERTED_MUTATIONS], audit=audit)


def clipping(limits: dict[int, float]) -> SpyHook:
    """Make an observer that clips the gradients of some steps."""

    def clip(ctx) -> None:
        if ctx.step in limits:
            torch.nn.utils.clip_grad_norm_(ctx.model.parameters(), limits[ctx.step])

    return at(SpyHook, HookPoint.POST_BACKWARD)(clip)


@pytest.mark.guarantee("observers-change-nothing")
def test_observer_rewriting_equal_bytes_is_allowed() -> None:
    """An observer that always rewrites equal bytes passes, and is caught at the first step that differs."""
    always = dict.fromkeys(range(1, 10), float("inf"))
    assert_same_bytes(train(CASE, [clipping(always)], steps=9, audit=False), CASE, 9)
    run = train(CASE, [clipping({**always, 7: 1e-3})], steps=9, audit=False, raises=StateMutationError)
    assert "at POST_BACKWARD of step 7 may only read" in str(run.error)


def test_late_rewrite_of_equal_bytes_needs_audit() -> None:
    """The tripwire raises on equal bytes first written at step 7; the audit compares them and accepts."""
    late = {7: float("inf")}
    assert_same_bytes(train(CASE, [clipping(late)], steps=9, audit=True), CASE, 9)
    run = train(CASE, [clipping(late)], steps=9, audit=False, raises=StateMutationError)
    assert "at POST_BACKWARD of step 7 may only read" in str(run.error)
