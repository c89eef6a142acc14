import gc
import weakref
from contextlib import suppress

import pytest
import torch
from loopscope.errors import StateMutationError
from loopscope.isolation import Call, Isolation
from loopscope.isolation.gate import CALLS_CHECKED_ALONE

from tests.support import Case, Mishap, build, differences
from tests.support.misbehaving_hooks import MUTATIONS, Scene, Spoiling, train_one_step

CALL = Call("spy", "POST_STEP", 4)


def isolated_run(**options) -> tuple[Scene, Isolation]:
    """Take a training step, and return the run with its isolation."""
    task, state = build(Case())
    scene = Scene(task, state)
    train_one_step(scene)
    return scene, Isolation(state, **options)


def mutation(scene: Scene, name: str):
    return lambda: MUTATIONS[name](scene)


def test_call_is_formatted_for_messages():
    assert str(CALL) == "Hook 'spy' at POST_STEP of step 4"
    assert str(Call("evaluation", "the loop", 2, "The")) == "The 'evaluation' at the loop of step 2"


def test_observer_has_no_gradients_and_separate_stream():
    """Its draws do not depend on earlier draws of the run, and the run's generator and grad mode are restored."""
    _, isolation = isolated_run()
    drawn = []
    for earlier_draws in (0, 5):
        torch.rand(earlier_draws)
        generator_state = torch.default_generator.get_state()
        with isolation.visit():
            isolation.observe(CALL, lambda: drawn.append((torch.is_grad_enabled(), torch.rand(1).item())))
        assert torch.default_generator.get_state().equal(generator_state)
        assert torch.is_grad_enabled()
    assert drawn[0] == drawn[1]
    assert drawn[0][0] is False


def test_visit_returns_the_result_of_calls():
    _, isolation = isolated_run()
    with isolation.visit():
        assert isolation.observe(CALL, lambda: 3) == 3
        assert isolation.intervene(CALL, lambda: 4, mutates=True) == 4
        assert isolation.intervene(CALL, lambda: 5, mutates=False) == 5


def test_every_intervention_starts_from_true_state():
    """Three mutating interventions in one visit each see the original parameters."""
    scene, isolation = isolated_run()
    original, digests = scene.state.digest()["parameters/4.bias"], []

    def damage():
        digests.append(scene.state.digest()["parameters/4.bias"])
        train_one_step(scene)

    with isolation.visit():
        for name in ("first", "second", "third"):
            isolation.intervene(Call(name, "POST_STEP", 1), damage, mutates=True)
    assert digests == [original] * 3


def test_next_intervention_starts_from_the_commit():
    scene, isolation = isolated_run()
    with isolation.visit():
        isolation.intervene(CALL, mutation(scene, "train_one_step"), mutates=True)
        MUTATIONS["write_in_place"](scene)
        isolation.note_commit()
        committed = scene.parameter.tolist()
        isolation.intervene(CALL, mutation(scene, "train_one_step"), mutates=True)
        isolation.observe(CALL, lambda: None)
    assert scene.parameter.tolist() == committed


def test_nested_visit_does_not_restore_streams():
    """Only the end of the outermost visit restores the random streams."""
    _, isolation = isolated_run()
    before = torch.default_generator.get_state()
    with isolation.visit():
        with isolation.visit():
            torch.rand(1)
        assert not torch.default_generator.get_state().equal(before)
    assert torch.default_generator.get_state().equal(before)


@pytest.mark.parametrize("name", ["write_in_place", "freeze_a_parameter", "edit_the_learning_rate"])
def test_warm_observer_mutation_is_caught_by_name(name):
    """An observer that passed its individual checks is still checked; the error names hook, point and step."""
    scene, isolation = isolated_run()
    for step in range(CALLS_CHECKED_ALONE + 2):
        with isolation.visit():
            isolation.observe(Call("spy", "POST_STEP", step), lambda: None)
    with pytest.raises(StateMutationError, match="Hook 'spy' at POST_STEP of step 9"), isolation.visit():
        isolation.observe(Call("spy", "POST_STEP", 9), mutation(scene, name))


def test_ambiguous_observer_mutation_names_all_suspects():
    """Two warm observers share one check, so the error names both."""
    scene, isolation = isolated_run()
    for _ in range(CALLS_CHECKED_ALONE + 1):  # the number of the next call is not a power of two
        with isolation.visit():
            for name in ("first", "second"):
                isolation.observe(Call(name, "POST_STEP", 1), lambda: None)

    def visit():
        with isolation.visit():
            isolation.observe(Call("first", "POST_STEP", 2), mutation(scene, "freeze_a_parameter"))
            isolation.observe(Call("second", "POST_STEP", 2), lambda: None)

    with pytest.raises(StateMutationError, match="Hook 'first' at POST_STEP of step 2 or Hook 'second' at POST_STEP"):
        visit()


def test_observer_mutation_outranks_later_exception():
    """A mutation by a warm observer raises StateMutationError even if another exception follows in the same visit."""
    scene, isolation = isolated_run()
    for _ in range(CALLS_CHECKED_ALONE + 1):
        with isolation.visit():
            isolation.observe(CALL, lambda: None)

    def visit():
        with isolation.visit():
            isolation.observe(CALL, mutation(scene, "freeze_a_parameter"))
            raise Mishap

    with pytest.raises(StateMutationError, match=r"parameters/0\.weight \(its requires_grad\)"):
        visit()


def test_failed_restore_raises_state_mutation_error():
    """The load_state_dict of one entry raises, and the error quotes its exception."""
    scene, isolation = isolated_run()

    class Stubborn:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            raise Mishap("cannot load")

    scene.state.extras["stubborn"] = Stubborn()
    with pytest.raises(StateMutationError, match=r"cannot be restored .*cannot load"), isolation.visit():
        isolation.intervene(CALL, lambda: None, mutates=True)


@pytest.mark.longer
def test_leaked_modes_are_exited_before_checks():
    """A function mode that an observer or intervention left entered does not affect the audit or the state."""
    scene, isolation = isolated_run(audit=True)
    original = scene.state.digest()
    with isolation.visit():
        isolation.observe(CALL, lambda: Spoiling().__enter__())
        isolation.intervene(CALL, lambda: Spoiling().__enter__(), mutates=True)
        isolation.intervene(CALL, lambda: Spoiling().__enter__(), mutates=False)
    assert differences(original, scene.state.digest()) == []


@pytest.mark.longer
def test_gradients_are_not_kept_alive_after_the_visit():
    scene, isolation = isolated_run()
    with isolation.visit():
        isolation.intervene(CALL, lambda: None, mutates=True)
    gradient = weakref.ref(scene.parameter.grad)
    scene.optimizer.zero_grad()
    gc.collect()
    assert gradient() is None


@pytest.mark.parametrize("audit", [False, True])
def test_exception_restores_random_streams(audit):
    """The state is unchanged after an observer or intervention draws and raises, with and without audit."""
    scene, isolation = isolated_run(audit=audit)
    original = scene.state.digest()

    def raise_after_drawing():
        torch.rand(3)
        raise Mishap

    for call in (isolation.observe, lambda c, f: isolation.intervene(c, f, mutates=True)):
        with suppress(Mishap), isolation.visit():
            call(CALL, raise_after_drawing)
    assert differences(original, scene.state.digest()) == []


@pytest.mark.parametrize(("device", "audit"), [("cpu", False), ("meta", False), ("meta", True)])
def test_gradients_may_arrive_from_several_devices(device, audit):
    """Autograd has one thread per device, so other gradients may arrive while the function of a tap runs."""
    scene, isolation = isolated_run(audit=audit)
    scene.model.register_parameter("other", torch.nn.Parameter(torch.ones(2, device=device)))
    weight = scene.model[0].weight

    def receive_gradient() -> None:
        weight.grad = torch.ones_like(weight)

    if device == "meta":
        isolation.observe_in_pass(CALL, receive_gradient)
    else:
        with pytest.raises(StateMutationError, match="a gradient was replaced"):
            isolation.observe_in_pass(CALL, receive_gradient)
