import pytest
import torch
from loopscope.errors import StateMutationError
from loopscope.isolation import recorded_bytes
from loopscope.isolation.tripwire import Audit
from loopscope.state import digest_of
from torch import Tensor, nn

from tests.support import Case, build
from tests.support.misbehaving_hooks import MUTATIONS, Scene, train_one_step


def audited(*, enabled: bool = True) -> tuple[Scene, Audit]:
    """Take a training step, and return the run with an audit of its state."""
    task, state = build(Case())
    scene = Scene(task, state)
    train_one_step(scene)
    audit = Audit(state, enabled=enabled)
    audit.take_baseline()
    return scene, audit


def test_unchanged_state_passes_repeated_checks():
    _, audit = audited()
    audit.check("The caller")
    audit.check("The caller")


def test_disabled_audit_checks_nothing():
    scene, audit = audited(enabled=False)
    MUTATIONS["write_in_place"](scene)
    audit.check("The caller")


@pytest.mark.parametrize("name", ["write_through_data", "write_through_numpy", "write_to_the_storage"])
def test_audit_names_caller_and_changed_entry(name):
    """The writes go through .data, through a NumPy view and directly to the storage."""
    scene, audit = audited()
    MUTATIONS[name](scene)
    entry = "parameters/0.weight" if name == "write_to_the_storage" else "parameters/4.bias"
    with pytest.raises(StateMutationError, match=f"^The caller may only read, but changed .*: {entry}"):
        audit.check("The caller")


def test_audit_lists_at_most_five_entries():
    """The error counts the remaining entries."""
    scene, audit = audited()
    for parameter in scene.model.parameters():
        parameter.data.add_(1)
    with pytest.raises(StateMutationError, match="and 1 more"):
        audit.check("The caller")


REPLACED = {
    "a gradient by an equal one": lambda model: setattr(model[0].weight, "grad", model[0].weight.grad.clone()),
    "a parameter table by an equal one": lambda model: setattr(model[0], "_parameters", {**model[0]._parameters}),
    "a table of hooks by an empty one": lambda model: setattr(model[0], "_forward_hooks", {}),
    "a function by one of the same name": lambda model: setattr(model[2], "act", lambda: 2),
}


@pytest.mark.parametrize("replacement", REPLACED)
def test_audit_detects_replaced_lookalike_objects(replacement):
    """A replaced gradient, parameter table, hook table or function is detected even if the digest is unchanged."""
    scene, _ = audited()
    scene.model[2].act = act
    audit = Audit(scene.state, enabled=True)
    audit.take_baseline()
    original = scene.state.digest()
    REPLACED[replacement](scene.model)
    if "function" not in replacement:
        assert scene.state.digest() == original
    with pytest.raises(StateMutationError, match="changed the training state"):
        audit.check("The caller")


def act():
    return 1


def test_tensors_of_a_device_are_summed_there(monkeypatch):
    """The host digests values that are no tensors only, and the audit detects changes of bytes and of their meaning."""
    on_host = []
    monkeypatch.setattr(recorded_bytes, "has_device_sums", lambda leaf: isinstance(leaf, Tensor))
    monkeypatch.setattr(recorded_bytes, "digest_of", lambda leaf: on_host.append(leaf) or digest_of(leaf))
    scene, audit = audited()
    audit.check("The caller")
    assert on_host
    assert not any(isinstance(leaf, Tensor) for leaf in on_host)
    variance = scene.model[1].running_var
    for change in (variance.data.view(torch.int32), variance.data[None], variance.data + 0.5):
        variance.data, original = change, variance.data
        with pytest.raises(StateMutationError, match=r"changed the training state: buffers/1.running_var\."):
            audit.check("The caller")
        variance.data = original
    audit.check("The caller")


def test_unreadable_state_counts_as_changed():
    """The model has lost its table of modules."""
    scene, audit = audited()
    vars(scene.model).pop("_modules")
    with pytest.raises(StateMutationError, match="can no longer be read"):
        audit.check("The caller")


def test_reading_data_changes_no_state():
    scene, audit = audited()
    with scene.state.streams.preserved():
        MUTATIONS["exhaust_the_loader"](scene)
    audit.check("The caller")


def test_tensors_outside_parameters_and_buffers_are_audited():
    """The tensors are an attribute of the model, and a weight of a module in a list."""
    task, state = build(Case())
    task.model.scale = torch.ones(2)
    task.model.teacher = [nn.Linear(1, 1)]
    for tensor in (task.model.scale, task.model.teacher[0].weight):
        audit = Audit(state, enabled=True)
        audit.take_baseline()
        tensor.data.add_(1)
        with pytest.raises(StateMutationError):
            audit.check("The caller")
