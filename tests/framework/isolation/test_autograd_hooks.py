"""Hooks on gradients: new ones on nodes and tensors, and removed or exchanged ones of the script."""

from collections import OrderedDict
from functools import partial

import pytest
import torch
from loopscope.errors import StateMutationError
from loopscope.isolation import Call, Isolation
from loopscope.state import NODE_HOOKS, RandomStreams, TrainingState, node_hooks
from torch import nn
from torch.autograd import Function, function
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

CALL = Call("spy", "POST_STEP", 1)


def double(gradients, *_):
    return tuple(None if gradient is None else gradient * 2 for gradient in gradients)


class Script:
    """A model, its state, and hooks of the script on a parameter, a module and the optimizer."""

    def __init__(self, make=torch.optim.SGD):
        self.model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.weight, self.kept = self.model[0].weight, []
        self.optimizer = make(self.model.parameters(), lr=0.1)
        self.handles = [self.weight.register_hook(partial(torch.mul, torch.tensor(factor))) for factor in (2, 3)]
        self.weight.register_post_accumulate_grad_hook(lambda p: None)
        self.model[2].register_forward_hook(lambda module, inputs, output: output * 2)
        self.optimizer.register_step_pre_hook(lambda *_: None)
        self.model(torch.ones(4, 2)).sum().backward()
        self.state = TrainingState(self.model, self.optimizer, RandomStreams(1))
        self.isolation = Isolation(self.state)

    def gradient(self):
        self.model.zero_grad()
        self.model(torch.arange(8.0).view(4, 2)).pow(3).sum().backward()
        return self.weight.grad.clone()

    def observe(self, mutation, calls=1):
        """Let the last of ``calls`` calls of an observer mutate; return the error's message."""
        for number in range(calls):
            with self.isolation.visit():
                self.isolation.observe(CALL, (lambda: mutation(self)) if number == calls - 1 else int)

    def intervene(self, mutation):
        with self.isolation.visit():
            self.isolation.intervene(CALL, lambda: mutation(self), mutates=True)


def node_of(script):
    script.kept.append(get_gradient_edge(script.weight).node)
    return script.kept[-1]


def node_of_view(script):
    with torch.enable_grad():
        script.kept.append(script.weight.view_as(script.weight).grad_fn.next_functions[0][0])
    return script.kept[-1]


NEW_HOOKS = {
    "before a node": lambda script: node_of(script).register_prehook(double),
    "after a node": lambda script: node_of(script).register_hook(double),
    "on a node of a view": lambda script: node_of_view(script).register_prehook(double),
    "on a parameter": lambda script: script.weight.register_hook(torch.neg),
    "after accumulation": lambda script: script.model[2].weight.register_post_accumulate_grad_hook(torch.zero_),
    "on several gradients": lambda script: register_multi_grad_hook([*script.model.parameters()], print),
}
EXCHANGES = {
    "remove a hook": lambda script: script.handles[0].remove(),
    "clear the hooks": lambda script: script.weight._backward_hooks.clear(),
    "exchange a hook": lambda script: (script.handles[0].remove(), script.weight.register_hook(torch.neg)),
    "exchange in place": lambda script: script.weight._backward_hooks.update({script.handles[0].id: torch.neg}),
    "reorder the hooks": lambda script: script.weight._backward_hooks.move_to_end(script.handles[0].id),
    "replace the dict": lambda script: setattr(script.weight, "_backward_hooks", OrderedDict({0: torch.neg})),
    "drop the dict": lambda script: setattr(script.weight, "_post_accumulate_grad_hooks", None),
    "new dict": lambda script: setattr(script.model[2].weight, "_backward_hooks", OrderedDict({0: torch.neg})),
    "clear a module": lambda script: script.model[2]._forward_hooks.clear(),
    "replace a module's dict": lambda script: setattr(script.model[2], "_forward_hooks", OrderedDict()),
    "new dict of a module": lambda script: setattr(script.model[0], "_forward_hooks", OrderedDict({0: print})),
    "clear the optimizer": lambda script: script.optimizer._optimizer_step_pre_hooks.clear(),
    "replace the optimizer's dict": lambda script: setattr(
        script.optimizer, "_optimizer_step_pre_hooks", OrderedDict({0: print})
    ),
}
UNSAVED = {
    "add a buffer": lambda script: script.model[1]._non_persistent_buffers_set.add("running_mean"),
    "replace the set": lambda script: setattr(script.model[1], "_non_persistent_buffers_set", {"running_var"}),
    "register again": lambda script: script.model[1].register_buffer(
        "running_mean", script.model[1].running_mean, persistent=False
    ),
}
MUTATIONS = NEW_HOOKS | EXCHANGES | UNSAVED


@pytest.mark.parametrize("name", MUTATIONS)
def test_changed_hooks_of_observers_are_caught(name):
    script = Script()
    with pytest.raises(StateMutationError, match="Hook 'spy' at POST_STEP of step 1 may only read, but changed"):
        script.observe(MUTATIONS[name])


@pytest.mark.parametrize("name", sorted({*MUTATIONS} - {"new dict", "new dict of a module"}))
def test_changed_hooks_are_caught_in_later_calls(name):
    with pytest.raises(StateMutationError, match="may only read, but changed"):
        Script(torch.optim.AdamW).observe(MUTATIONS[name], calls=6)


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("keeps_graph", [False, True])
def test_changed_hooks_of_interventions_are_undone(name, keeps_graph):
    """A graph of the script keeps the nodes that accumulate gradients alive."""
    script, hooks = (
        Script(),
        lambda: [(key, *table.items()) for key, table in script.model[2].__dict__.items() if "_hooks" in key],
    )
    expected, module_hooks, names = script.gradient(), hooks(), [*script.model.state_dict()]
    loss = script.model(torch.ones(4, 2)) if keeps_graph else None
    script.intervene(MUTATIONS[name])
    assert script.gradient().equal(expected)
    assert (hooks(), [*script.model.state_dict()]) == (module_hooks, names)
    del loss


def test_discarded_names_of_buffers_are_caught():
    script = Script()
    script.model[2].register_buffer("mask", torch.ones(1), persistent=False)
    with pytest.raises(StateMutationError, match=r"modules/2\._non_persistent_buffers_set"):
        script.observe(lambda script: script.model[2]._non_persistent_buffers_set.discard("mask"))


def test_errors_name_the_node_and_its_tensor():
    with pytest.raises(StateMutationError, match=r"a hook on a graph node of parameters/0\.weight"):
        Script().observe(NEW_HOOKS["before a node"])


def own_graph(script):
    with torch.enable_grad():
        loss = script.model(torch.ones(4, 2)).pow(2).sum()
        loss.grad_fn.register_prehook(double)
        loss.register_hook(torch.neg)
        gradients = torch.autograd.grad(loss, script.weight, create_graph=True)
        gradients[0].grad_fn.register_hook(double)
        script.kept += [loss, gradients]  # a graph that the hook keeps is not the run's
        torch.autograd.grad(gradients[0].sum(), script.weight)


def removed_hook(script):
    node_of(script).register_prehook(double).remove()


@pytest.mark.parametrize("reads", [own_graph, removed_hook])
def test_hooks_on_own_graphs_are_allowed(reads):
    script = Script()
    script.model.eval()
    expected = script.gradient()
    script.observe(reads, calls=4)
    assert script.gradient().equal(expected)


def test_hooks_of_the_script_between_visits_are_accepted():
    script = Script()
    for mutation in (NEW_HOOKS | EXCHANGES).values():
        mutation(script)
        script.observe(lambda script: None)


def test_recorded_hooks_are_found_by_search():
    """Both ways agree: the record of torch's function, and the dicts that registrations would use."""
    weight = torch.ones(2, requires_grad=True)
    node = get_gradient_edge(weight).node
    NODE_HOOKS.start()
    handle = node.register_prehook(double)
    found = NODE_HOOKS.newer(handle.id)
    NODE_HOOKS.stop()
    assert [*found.values()] == node_hooks.tables_of(node) == [handle.hooks_dict_ref()]
    assert node_hooks.is_recorded()
    assert "_register_hook" not in vars(Function)
    assert vars(function)["hooks"] is torch.utils.hooks


def test_hooks_are_found_without_a_record(monkeypatch):
    """A torch that registers hooks by another function is searched in the documented way."""
    monkeypatch.setattr(node_hooks, "_NAME", "_unknown")
    monkeypatch.setattr(node_hooks, "_HOOKS", "_unknown_too")
    node_hooks.is_recorded.cache_clear()
    try:
        for mutation in (NEW_HOOKS["before a node"], NEW_HOOKS["after a node"]):
            with pytest.raises(StateMutationError, match="a hook on a graph node"):
                Script().observe(mutation)
    finally:
        node_hooks.is_recorded.cache_clear()


def swap_twice(script):
    other = nn.Parameter(torch.zeros_like(script.weight))
    torch.utils.swap_tensors(script.weight, other)
    torch.utils.swap_tensors(script.weight, other)


@pytest.mark.parametrize("calls", [1, 4])
def test_reversed_swap_is_no_change(calls):
    """A graph of the script holds the node, on which torch leaves a hook that refuses backward passes."""
    script = Script()
    expected = script.gradient()
    loss = script.model(torch.arange(8.0).view(4, 2)).pow(3).sum()
    script.model.zero_grad()
    script.observe(swap_twice, calls=calls)
    loss.backward()
    assert script.weight.grad.equal(expected)
