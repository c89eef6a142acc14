"""Mutations of the training state that a misbehaving hook might make, each by every means that torch offers.

A mutation is a function of a :class:`Scene`. Mutations in ``HARMLESS`` must have no effect even if an observer makes
them. The tripwire detects those in ``DETECTED_BY_TRIPWIRE`` in a hook's first calls; the audit detects all others.
"""

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from loopscope.isolation.watch_list import step_tensors
from loopscope.state import TrainingState
from loopscope.training import TrainingTask, forward_backward, update
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class Scene:
    """The live objects that a misbehaving hook mutates."""

    task: TrainingTask
    state: TrainingState
    ctx: Any = None
    left_behind: Any = None

    @property
    def model(self) -> nn.Module:
        return self.task.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.task.optimizer

    @property
    def parameter(self) -> nn.Parameter:
        return [*self.model.parameters()][-1]

    @property
    def matrix(self) -> nn.Parameter:
        return next(p for p in self.model.parameters() if p.ndim == 2)

    @property
    def module(self) -> nn.Module:
        return next(m for m in self.model.modules() if isinstance(m, nn.Linear))

    @property
    def batch(self) -> Any:
        return self.state.loop.batch or next(iter(self.task.loader))

    @property
    def moments(self) -> list[Tensor]:
        """Return the optimizer's state tensors with more than one element, or all if no such tensor exists."""
        tensors = [
            leaf for state in self.optimizer.state.values() for leaf in state.values() if isinstance(leaf, Tensor)
        ]
        return [leaf for leaf in tensors if leaf.numel() > 1] or tensors


Mutation = Callable[[Scene], Any]
MUTATIONS: dict[str, Mutation] = {}
HARMLESS: set[str] = set()
DETECTED_BY_TRIPWIRE: set[str] = set()


def mutation(kind: set[str] | None = None) -> Callable[[Mutation], Mutation]:
    def register(function: Mutation) -> Mutation:
        MUTATIONS[function.__name__] = function
        if kind is not None:
            kind.add(function.__name__)
        return function

    return register


# Random numbers


@mutation(HARMLESS)
def draw_from_every_generator(scene):
    torch.rand(3), torch.randn(5), random.random(), np.random.rand(2)
    random.gauss(0, 1), np.random.standard_normal()  # both cache a second Gaussian


@mutation(HARMLESS)
def draw_half_a_pair_of_gaussians(scene):
    np.random.standard_normal(), random.gauss(0, 1)


@mutation(HARMLESS)
def reseed(scene):
    torch.manual_seed(0), random.seed(0), np.random.seed(0)


@mutation(HARMLESS)
def replace_the_numpy_generator(scene):
    np.random.set_bit_generator(np.random.MT19937(5))


@mutation(HARMLESS)
def draw_from_the_loaders_generator(scene):
    for generator in scene.state.streams.owned:
        torch.rand(3, generator=generator)
        generator.manual_seed(1)


@mutation(HARMLESS)
def exhaust_the_loader(scene):
    list(scene.task.loader.batches(scene.state.loop.epoch)), list(scene.task.loader.shuffled(3))


# Training


@mutation(DETECTED_BY_TRIPWIRE)
def train_one_step(scene):
    with torch.enable_grad():
        forward_backward(scene.task, scene.batch)
    update(scene.task, step_scheduler=True)


@mutation(DETECTED_BY_TRIPWIRE)
def step_the_scheduler(scene):
    scene.task.scheduler.step()


@mutation(DETECTED_BY_TRIPWIRE)
def zero_the_gradients(scene):
    scene.optimizer.zero_grad()


@mutation(DETECTED_BY_TRIPWIRE)
def accumulate_more_gradients(scene):
    with torch.enable_grad():
        scene.task.compute_loss(scene.model, scene.batch).backward()


@mutation(DETECTED_BY_TRIPWIRE)
def move_batchnorm_statistics(scene):
    scene.model.train()
    scene.model(scene.batch[0])


@mutation(DETECTED_BY_TRIPWIRE)
def write_to_the_buffers_through_data(scene):
    for buffer in scene.model.buffers():
        buffer.data.add_(1)


# Writing to tensors


@mutation(DETECTED_BY_TRIPWIRE)
def write_in_place(scene):
    with torch.no_grad():
        scene.parameter.add_(1)


@mutation(DETECTED_BY_TRIPWIRE)
def write_through_data(scene):
    scene.parameter.data.add_(1)


@mutation(DETECTED_BY_TRIPWIRE)
def write_through_numpy(scene):
    scene.parameter.detach().numpy()[...] = 7


@mutation(DETECTED_BY_TRIPWIRE)
def write_to_the_storage(scene):
    scene.matrix.untyped_storage().fill_(1)


@mutation(DETECTED_BY_TRIPWIRE)
def write_to_the_optimizer_through_data(scene):
    scene.moments[0].data.add_(1)


@mutation(DETECTED_BY_TRIPWIRE)
def write_to_the_gradient(scene):
    scene.parameter.grad.mul_(3)


@mutation(DETECTED_BY_TRIPWIRE)
def write_to_the_gradient_through_numpy(scene):
    scene.parameter.grad.numpy()[...] = 1


@mutation(DETECTED_BY_TRIPWIRE)
def write_to_the_batch(scene):
    scene.batch[0].zero_()


@mutation(DETECTED_BY_TRIPWIRE)
def write_to_the_batch_through_numpy(scene):
    scene.batch[1].numpy()[...] = 1


@mutation(DETECTED_BY_TRIPWIRE)
def write_to_the_kept_gradients(scene):
    kept = scene.state.loop.current_grads or {"loss": scene.state.loop.running_loss}
    for tensor in kept.values():
        tensor.add_(1)


@mutation(DETECTED_BY_TRIPWIRE)
def write_to_everything_in_flight(scene):
    for tensor in step_tensors(vars(scene.state.loop).values()):
        tensor.mul_(2)


# Replacing tensors


@mutation(DETECTED_BY_TRIPWIRE)
def replace_a_gradient(scene):
    scene.parameter.grad = torch.ones_like(scene.parameter)


@mutation(DETECTED_BY_TRIPWIRE)
def replace_a_gradient_by_an_equal_one(scene):
    scene.parameter.grad = scene.parameter.grad.clone()


@mutation(DETECTED_BY_TRIPWIRE)
def drop_a_gradient(scene):
    scene.matrix.grad = None


@mutation(DETECTED_BY_TRIPWIRE)
def give_data_another_shape(scene):
    scene.parameter.data = scene.parameter.new_zeros(1)


@mutation(DETECTED_BY_TRIPWIRE)
def give_data_another_dtype(scene):
    scene.parameter.data = scene.parameter.data.double()


@mutation(DETECTED_BY_TRIPWIRE)
def show_a_part_of_the_data(scene):
    scene.matrix.data = scene.matrix.data[:1]


@mutation(DETECTED_BY_TRIPWIRE)
def transpose_the_data(scene):
    scene.matrix.data = scene.matrix.data.t()


@mutation(DETECTED_BY_TRIPWIRE)
def give_a_gradient_another_shape(scene):
    scene.parameter.grad.data = scene.parameter.new_zeros(2)


@mutation(DETECTED_BY_TRIPWIRE)
def empty_a_storage(scene):
    scene.matrix.untyped_storage().resize_(0)


@mutation(DETECTED_BY_TRIPWIRE)
def empty_a_gradients_storage(scene):
    scene.parameter.grad.untyped_storage().resize_(0)


@mutation(DETECTED_BY_TRIPWIRE)
def swap_a_parameter_with_a_fresh_one(scene):
    torch.utils.swap_tensors(scene.parameter, nn.Parameter(torch.rand_like(scene.parameter)))


@mutation(DETECTED_BY_TRIPWIRE)
def swap_two_parameters(scene):
    first, second = [*scene.model.parameters()][:2]
    torch.utils.swap_tensors(first, second)


@mutation(DETECTED_BY_TRIPWIRE)
def swap_optimizer_tensors(scene):
    torch.utils.swap_tensors(scene.moments[0], torch.rand(4))


@mutation(DETECTED_BY_TRIPWIRE)
def set_a_parameter(scene):
    scene.module.weight = nn.Parameter(torch.rand_like(scene.module.weight))


@mutation(DETECTED_BY_TRIPWIRE)
def replace_a_parameter_by_an_equal_one(scene):
    scene.module._parameters["weight"] = nn.Parameter(scene.module.weight.detach().clone())


@mutation(DETECTED_BY_TRIPWIRE)
def replace_the_parameter_table(scene):
    table = {name: nn.Parameter(torch.rand_like(value)) for name, value in scene.module._parameters.items()}
    scene.module._parameters = table


@mutation(DETECTED_BY_TRIPWIRE)
def delete_a_parameter(scene):
    del scene.module.bias


@mutation(DETECTED_BY_TRIPWIRE)
def add_a_parameter(scene):
    scene.model.register_parameter("extra", nn.Parameter(torch.ones(2)))


@mutation(DETECTED_BY_TRIPWIRE)
def add_a_buffer(scene):
    scene.model.register_buffer("extra", torch.ones(2))


@mutation(DETECTED_BY_TRIPWIRE)
def parametrize_a_weight(scene):
    parametrize.register_parametrization(scene.module, "weight", nn.Identity())


@mutation(DETECTED_BY_TRIPWIRE)
def make_a_buffer_depend_on_a_parameter(scene):
    scene.model.register_buffer("extra", torch.ones(2, device=scene.parameter.device))
    with torch.enable_grad():
        for buffer in [b for b in scene.model.buffers() if b.is_floating_point()]:
            buffer.mul_(scene.parameter.sum())


# The optimizer


@mutation(DETECTED_BY_TRIPWIRE)
def edit_the_learning_rate(scene):
    scene.optimizer.param_groups[0]["lr"] = 123.0


@mutation(DETECTED_BY_TRIPWIRE)
def edit_the_weight_decay(scene):
    scene.optimizer.param_groups[0]["weight_decay"] += 0.5


@mutation(DETECTED_BY_TRIPWIRE)
def add_a_parameter_group(scene):
    scene.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@mutation(DETECTED_BY_TRIPWIRE)
def remove_a_parameter_from_its_group(scene):
    scene.optimizer.param_groups[0]["params"].pop()


@mutation(DETECTED_BY_TRIPWIRE)
def reverse_the_parameters_of_a_group(scene):
    scene.optimizer.param_groups[0]["params"].reverse()


@mutation(DETECTED_BY_TRIPWIRE)
def replace_the_parameter_groups(scene):
    scene.optimizer.param_groups = [{**group, "lr": 5.0} for group in scene.optimizer.param_groups]


@mutation(DETECTED_BY_TRIPWIRE)
def append_an_empty_parameter_group(scene):
    scene.optimizer.param_groups.append({})


@mutation(DETECTED_BY_TRIPWIRE)
def append_none_to_the_parameter_groups(scene):
    scene.optimizer.param_groups.append(None)


@mutation(DETECTED_BY_TRIPWIRE)
def insert_none_before_the_parameter_groups(scene):
    scene.optimizer.param_groups.insert(0, None)


@mutation(DETECTED_BY_TRIPWIRE)
def remove_the_parameters_of_a_group(scene):
    del scene.optimizer.param_groups[0]["params"]


@mutation(DETECTED_BY_TRIPWIRE)
def replace_the_parameters_of_a_group_by_none(scene):
    scene.optimizer.param_groups[0]["params"] = None


@mutation(DETECTED_BY_TRIPWIRE)
def replace_the_parameters_of_a_group_by_a_tensor(scene):
    scene.optimizer.param_groups[0]["params"] = scene.parameter


@mutation(DETECTED_BY_TRIPWIRE)
def fill_the_parameters_of_a_group_with_lists(scene):
    scene.optimizer.param_groups[-1]["params"].append([1.0])


@mutation(DETECTED_BY_TRIPWIRE)
def clear_the_parameter_groups(scene):
    scene.optimizer.param_groups.clear()


@mutation(DETECTED_BY_TRIPWIRE)
def replace_the_parameter_groups_by_none(scene):
    scene.optimizer.param_groups = None


@mutation(DETECTED_BY_TRIPWIRE)
def delete_the_parameter_groups(scene):
    del scene.optimizer.param_groups


@mutation(DETECTED_BY_TRIPWIRE)
def replace_the_optimizer_state_by_none(scene):
    scene.optimizer.state = None


@mutation(DETECTED_BY_TRIPWIRE)
def delete_the_optimizer_state(scene):
    del scene.optimizer.state


@mutation(DETECTED_BY_TRIPWIRE)
def clear_the_optimizer_state(scene):
    scene.optimizer.state.clear()


@mutation(DETECTED_BY_TRIPWIRE)
def replace_the_optimizer_state(scene):
    scene.optimizer.state = {}


@mutation(DETECTED_BY_TRIPWIRE)
def forget_one_parameters_state(scene):
    scene.optimizer.state.pop(scene.matrix)


@mutation(DETECTED_BY_TRIPWIRE)
def exchange_the_state_of_two_parameters(scene):
    state = scene.optimizer.state
    first, second = [*state][:2]
    state[first], state[second] = state[second], state[first]


@mutation()
def rekey_the_optimizer_state(scene):
    state = scene.optimizer.state
    keys, values = [*state], [*state.values()]
    state.clear()
    state.update(zip([*keys[1:], keys[0]], values, strict=True))


@mutation(DETECTED_BY_TRIPWIRE)
def load_an_old_optimizer_state(scene):
    fresh = type(scene.optimizer)(scene.model.parameters(), lr=7.0)
    scene.optimizer.load_state_dict(fresh.state_dict())


@mutation(DETECTED_BY_TRIPWIRE)
def leave_a_hook_on_the_optimizer(scene):
    scene.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: spoil(optimizer))


def spoil(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.zero_()


# Modules


@mutation(DETECTED_BY_TRIPWIRE)
def evaluate_for_good(scene):
    scene.model.eval()
    scene.module.training = False


@mutation(DETECTED_BY_TRIPWIRE)
def freeze_a_parameter(scene):
    scene.matrix.requires_grad_(False)


@mutation(DETECTED_BY_TRIPWIRE)
def freeze_the_model(scene):
    scene.model.requires_grad_(False)


@mutation(DETECTED_BY_TRIPWIRE)
def leave_a_forward_hook(scene):
    scene.module.register_forward_hook(lambda module, inputs, output: output * 0)


@mutation(DETECTED_BY_TRIPWIRE)
def leave_a_forward_hook_that_always_runs(scene):
    scene.module.register_forward_hook(
        lambda module, inputs, kwargs, output: output * 0, with_kwargs=True, always_call=True, prepend=True
    )


@mutation(DETECTED_BY_TRIPWIRE)
def leave_a_forward_pre_hook(scene):
    scene.module.register_forward_pre_hook(lambda module, inputs: tuple(x * 0 for x in inputs))


@mutation(DETECTED_BY_TRIPWIRE)
def leave_a_backward_hook(scene):
    scene.module.register_full_backward_hook(
        lambda module, inward, outward: tuple(g * 0 for g in inward if g is not None)
    )


@mutation(DETECTED_BY_TRIPWIRE)
def leave_a_hook_on_a_parameter(scene):
    scene.parameter.register_hook(lambda gradient: gradient * 0)


@mutation(DETECTED_BY_TRIPWIRE)
def leave_a_hook_after_accumulation(scene):
    scene.parameter.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.zero_())


KEPT_NODES: list[Any] = []
"""The nodes with hooks of :func:`spoil_accumulation`: a node lives as long as something refers to it."""


def spoil_accumulation(parameter: Tensor) -> None:
    """Leave a hook on the node that accumulates the gradient of a parameter, and keep the node."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    node.register_prehook(lambda gradients: tuple(gradient * 0 for gradient in gradients))
    KEPT_NODES.append(node)


@mutation(DETECTED_BY_TRIPWIRE)
def leave_a_hook_before_accumulation(scene):
    spoil_accumulation(scene.parameter)


@mutation(DETECTED_BY_TRIPWIRE)
def leave_a_hook_on_several_gradients(scene):
    spoiled = lambda gradients: [gradient.zero_() for gradient in gradients if gradient is not None]
    torch.autograd.graph.register_multi_grad_hook([*scene.model.parameters()], spoiled)


@mutation(DETECTED_BY_TRIPWIRE)
def change_dropout(scene):
    for module in scene.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.9
    scene.module.in_features = 3


@mutation(DETECTED_BY_TRIPWIRE)
def change_the_forward_function(scene):
    scene.module.forward = lambda x: x.sum() * torch.ones((*x.shape[:-1], scene.module.out_features))


@mutation(DETECTED_BY_TRIPWIRE)
def change_the_class_of_a_module(scene):
    scene.module.__class__ = type(
        "Other", (type(scene.module),), {"forward": lambda self, x: 0 * nn.Linear.forward(self, x)}
    )


@mutation(DETECTED_BY_TRIPWIRE)
def replace_a_submodule(scene):
    name, child = next(iter(scene.model.named_children()))
    scene.model._modules[name] = nn.Sequential(child, nn.Identity())


@mutation(DETECTED_BY_TRIPWIRE)
def add_a_submodule(scene):
    scene.model.add_module("extra", nn.Linear(2, 2))


@mutation(DETECTED_BY_TRIPWIRE)
def set_an_attribute(scene):
    scene.model.extra = {"noise": [1, 2]}


# Settings of the process


@mutation(HARMLESS)
def leave_grad_mode_off(scene):
    torch.set_grad_enabled(not torch.is_grad_enabled())


@mutation(DETECTED_BY_TRIPWIRE)
def enter_inference_mode(scene):
    scene.left_behind = torch.inference_mode()
    scene.left_behind.__enter__()


@mutation(DETECTED_BY_TRIPWIRE)
def enter_autocast(scene):
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
    with torch.no_grad():
        scene.model(scene.batch[0])


@mutation(DETECTED_BY_TRIPWIRE)
def change_the_default_dtype(scene):
    torch.set_default_dtype(torch.float64)


@mutation(DETECTED_BY_TRIPWIRE)
def change_the_default_device(scene):
    torch.set_default_device("meta")


@mutation(DETECTED_BY_TRIPWIRE)
def require_determinism(scene):
    torch.use_deterministic_algorithms(True, warn_only=True)


@mutation(DETECTED_BY_TRIPWIRE)
def change_the_number_of_threads(scene):
    torch.set_num_threads(torch.get_num_threads() + 1)


@mutation(DETECTED_BY_TRIPWIRE)
def lower_the_matmul_precision(scene):
    torch.set_float32_matmul_precision("medium")


@mutation(DETECTED_BY_TRIPWIRE)
def lower_the_precision_of_one_backend(scene):
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


@mutation(DETECTED_BY_TRIPWIRE)
def lower_all_precisions(scene):
    torch.backends.fp32_precision = "bf16"


@mutation(DETECTED_BY_TRIPWIRE)
def switch_attention_kernels_off(scene):
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)


@mutation(DETECTED_BY_TRIPWIRE)
def flush_denormals(scene):
    torch.set_flush_denormal(True)


class Spoiling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result + 1 if isinstance(result, Tensor) and result.is_floating_point() else result


class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise RuntimeError("refused")


@mutation(HARMLESS)
def enter_a_function_mode(scene):
    Spoiling().__enter__()


@mutation(HARMLESS)
def enter_a_dispatch_mode(scene):
    Refusing().__enter__()


@mutation(DETECTED_BY_TRIPWIRE)
def leave_saved_tensor_hooks(scene):
    torch.autograd.graph.saved_tensors_hooks(lambda x: x * 0, lambda x: x).__enter__()


@mutation(DETECTED_BY_TRIPWIRE)
def leave_a_hook_on_all_modules(scene):
    nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 0)


# The loop, and other state of the run


@mutation(DETECTED_BY_TRIPWIRE)
def move_the_loop(scene):
    scene.state.loop.step += 5
    scene.state.loop.epoch += 1


@mutation(DETECTED_BY_TRIPWIRE)
def stop_the_loop(scene):
    scene.state.loop.stopped = True


@mutation(DETECTED_BY_TRIPWIRE)
def change_the_strategy(scene):
    scene.state.extras["strategy"].count += 1
    scene.state.extras["strategy"].table.zero_()


EMPTYING = ("empty_a_storage", "empty_a_gradients_storage")
"""Mutations that must come last: torch reads the memory of an emptied tensor, which ends the process."""


class MisbehavingHook:
    """Mixin of hooks, sinks and evaluations that makes its mutations, then raises if ``raises`` is set."""

    def __init__(self, mutations: list[str], *, raises: bool = False) -> None:
        self.mutations = sorted(mutations, key=EMPTYING.__contains__)
        self.raises = raises
        self.scene: Scene | None = None
        self.kept: list[Any] = []
        self.done = 0

    def act(self, ctx: Any = None) -> dict[str, Any]:
        """Make the mutations, keep references to live tensors and return live zero-dimensional ones."""
        self.scene.ctx = ctx
        self.kept.append([*self.scene.model.parameters(), *self.scene.moments])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in self.mutations:
                MUTATIONS[name](self.scene)
        self.done += 1
        if self.raises:
            raise DeliberateError("after the mutations")
        loss = self.scene.state.loop.running_loss
        return {} if loss is None or "enter_a_dispatch_mode" in self.mutations else {"live": loss}


class DeliberateError(Exception):
    """The exception of a misbehaving hook."""
