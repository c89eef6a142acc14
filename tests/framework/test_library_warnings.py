"""Library warnings that filters turn into errors: none affects checks of files or of the training state.

All tests run with pytest's filter ``error``, which acts like ``python -W error``.
"""

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from loopscope.checkpoints import Checkpoint, CheckpointWriter, open_checkpoint
from loopscope.checkpoints.content import load_checkpoint, save_checkpoint, storage_errors
from loopscope.checkpoints.flat_state import flatten_state, state_for_rank
from loopscope.checkpoints.format import load_plainly
from loopscope.cli import diff
from loopscope.durable_files import save_tensors
from loopscope.engine.failures import HookFailures
from loopscope.errors import HookError, StateMutationError, library_warnings_ignored
from loopscope.isolation import Call, Isolation, recorded_bytes, tripwire
from loopscope.runs.reference import load_reference
from loopscope.runs.resume import checkpoint_errors
from loopscope.state import LoopState
from loopscope.training import Ranks
from torch import nn

from tests.support import Case, SpyHook, build, differences
from tests.support.misbehaving_hooks import Scene, train_one_step

CALL = Call("spy", "POST_STEP", 1)
TEXT = "this library has something to say"


def with_warning(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that issues a warning and then calls the original."""

    def warn_and_call(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(TEXT, UserWarning, stacklevel=2)
        return function(*args, **kwargs)

    return warn_and_call


@pytest.fixture
def noisy_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch issue a warning within every ``torch.load`` and ``torch.save``."""
    for name in ("_load", "_save"):
        monkeypatch.setattr(torch.serialization, name, with_warning(getattr(torch.serialization, name)))
    with pytest.raises(UserWarning, match=TEXT):
        torch.save({}, Path("/dev/null"))


@pytest.fixture
def scene() -> Scene:
    task, state = build(Case())
    scene = Scene(task, state)
    train_one_step(scene)
    return scene


def test_warnings_are_ignored_in_one_thread_only() -> None:
    errors: list[Warning] = []

    def warn_elsewhere() -> None:
        try:
            warnings.warn(TEXT, stacklevel=2)
        except UserWarning as error:
            errors.append(error)

    other = threading.Thread(target=warn_elsewhere)
    with library_warnings_ignored(), library_warnings_ignored():
        warnings.warn(TEXT, stacklevel=2)
        other.start()
        other.join()
    assert len(errors) == 1


def test_filters_are_restored_after_an_error() -> None:
    filters = [*warnings.filters]
    with pytest.raises(KeyError), library_warnings_ignored():
        raise KeyError
    assert warnings.filters == filters


@pytest.mark.parametrize("resets", [True, False])
def test_filters_end_with_overlapping_bodies(resets: bool) -> None:
    """After the body, filters that ``catch_warnings`` saved or reset within it ignore nothing."""
    ignored, saved = library_warnings_ignored(), warnings.catch_warnings()
    ignored.__enter__()
    saved.__enter__()
    if resets:
        warnings.resetwarnings()
        warnings.simplefilter("error")
    ignored.__exit__(None, None, None)
    with pytest.raises(UserWarning, match=TEXT):
        warnings.warn(TEXT, stacklevel=2)
    saved.__exit__(None, None, None)
    with pytest.raises(UserWarning, match=TEXT):
        warnings.warn(TEXT, stacklevel=2)


@pytest.mark.guarantee("damage-is-detected")
@pytest.mark.usefixtures("noisy_files")
def test_checkpoint_is_intact_despite_warnings(tmp_path: Path) -> None:
    """A warning of a library during loading does not make a checkpoint damaged, even if warnings are errors."""
    _, trained = build(Case())
    save_checkpoint(tmp_path / "saved", trained, {"hook": 1}, trained.streams.save())
    open_checkpoint(tmp_path / "saved").check()
    _, state = build(Case())
    with torch.no_grad():
        next(state.model.parameters()).zero_()
    assert load_checkpoint(tmp_path / "saved", state) == {"hook": 1}
    assert differences(trained.digest(), state.digest()) == []


@pytest.mark.guarantee("damage-is-detected")
@pytest.mark.usefixtures("noisy_files")
def test_checkpoint_is_written_in_thread_despite_warnings(tmp_path: Path) -> None:
    """A warning of a library during writing does not cost a checkpoint."""
    writer = CheckpointWriter(tmp_path, keep=2)
    writer.write(3, {"weights": torch.ones(5)}, {"step": 3, "score": None}, ())
    writer.wait()
    assert writer.failures() == []
    content = open_checkpoint(tmp_path / "step_000000003").content()
    assert content["weights"].equal(torch.ones(5))


def _load_mapped(path: Path, model: nn.Module) -> Any:
    return load_plainly(path, mapped=True)


def _load_reference(path: Path, model: nn.Module) -> Any:
    return load_reference(path, model).weights


def _load_for_diff(path: Path, model: nn.Module) -> Any:
    return diff._loaded(path)


@pytest.mark.usefixtures("noisy_files")
@pytest.mark.parametrize("read", [_load_mapped, _load_reference, _load_for_diff])
def test_weight_files_are_read_despite_warnings(read: Callable[[Path, nn.Module], Any], tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_tensors(dict(model.state_dict()), tmp_path / "weights.pt")
    weights = read(tmp_path / "weights.pt", model)
    assert weights.keys() == model.state_dict().keys()
    assert all(weights[name].equal(value) for name, value in model.state_dict().items())


@pytest.mark.usefixtures("noisy_files")
def test_flat_state_is_read_despite_warnings() -> None:
    model, ranks = nn.Linear(2, 2), Ranks()
    state = {"weights": torch.ones(3), "names": ["a"]}
    loaded = state_for_rank(flatten_state(state, model, ranks), model, ranks)
    assert loaded["weights"].equal(state["weights"])
    assert loaded["names"] == ["a"]


@pytest.mark.usefixtures("noisy_files")
def test_values_that_torch_reads_safely_are_storable() -> None:
    assert storage_errors({"size": torch.Size([2]), "dtype": torch.float32}) == []
    (sentence,) = storage_errors({"object": object()})
    assert sentence.startswith("object is a builtins.object")


@pytest.mark.guarantee("damage-is-detected")
@pytest.mark.parametrize(
    ("module", "place", "audit"),
    [
        (tripwire, "_column", False),
        (tripwire, "_version", False),
        (recorded_bytes, "digest_of", False),
        (recorded_bytes, "_differing", True),
    ],
    ids=["_column", "_version", "digest_of", "_differing"],
)
def test_warning_while_reading_is_no_mutation(
    module: ModuleType, place: str, audit: bool, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning while the state is read hides no mutation, and is not reported as one."""
    monkeypatch.setattr(module, place, with_warning(getattr(module, place)))
    isolation = Isolation(scene.state, audit=audit)
    with isolation.visit():
        isolation.observe(CALL, lambda: None)
        with pytest.raises(StateMutationError, match=r"changed the training state: parameters/.*bias"):
            isolation.observe(CALL, lambda: scene.parameter.data.add_(1))


def test_warning_does_not_prevent_rollback(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    digest_before = scene.state.digest()
    monkeypatch.setattr(torch, "_foreach_copy_", with_warning(torch._foreach_copy_))
    isolation = Isolation(scene.state)
    with isolation.visit():
        isolation.intervene(CALL, lambda: scene.parameter.data.add_(1), mutates=True)
    assert differences(digest_before, scene.state.digest()) == []


@pytest.mark.guarantee("damage-is-detected")
def test_warning_after_resuming_keeps_its_type(tmp_path: Path) -> None:
    """A warning that ends the first step after a resume keeps its type, and a note names the checkpoint."""
    loop, checkpoint = LoopState(), Checkpoint(tmp_path, {"step": 0})
    with pytest.raises(UserWarning, match=TEXT) as caught, checkpoint_errors(checkpoint, loop):
        exec("import warnings; warnings.warn(text)", {"text": TEXT, "__name__": "torch"})
    assert any(str(tmp_path) in note for note in caught.value.__notes__)


def test_warning_in_reloaded_hook_blames_no_checkpoint() -> None:
    hook = SpyHook(lambda ctx: None)
    failures = HookFailures("raise", {hook.name}, reloaded={hook.name: 9})
    failures.handle(hook, "POST_STEP", 3, UserWarning(TEXT))
    with pytest.raises(HookError, match=TEXT) as caught:
        failures.raise_pending()
    assert type(caught.value) is HookError
