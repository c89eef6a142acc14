"""``loopscope.Callback`` in the list of callbacks of a Trainer: the run of ``attach(trainer)``, bit for bit."""

import json
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.errors import UsageError

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*:UserWarning:lightning"),
]
HOOKS = {"hooks": ["norms", "training_metrics"], "display": "none"}


def record(scope: Any) -> list[dict[str, Any]]:
    """Return the lines of the record of a run."""
    return [json.loads(line) for line in (scope.folder / "run.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.guarantee("attached-loops-keep-their-bytes")
def test_hugging_face_callback_equals_attach(tmp_path: Path) -> None:
    """Weights, optimizer, random numbers at every step, and the record are those of attach; weights those without."""
    from tests.framework.integrations import hf_trainers as hf

    short = {"num_train_epochs": 1}
    bare = hf.traced(tmp_path / "bare", **short)
    trainer = hf.trainer(tmp_path, **short)
    scope = loopscope.attach(trainer, **HOOKS, out=tmp_path / "attached" / "run")
    trainer.train()
    trace, callback = hf.Trace(), loopscope.Callback(**HOOKS, out=tmp_path / "callback" / "run")
    hf.trainer(tmp_path, trace, callback, **short).train()
    assert hf.same((trace.steps, torch.rand(3)), bare)
    assert callback.scope is not None
    assert record(callback.scope) == record(scope)


@pytest.mark.guarantee("attached-loops-keep-their-bytes")
def test_lightning_callback_equals_attach(tmp_path: Path) -> None:
    """Weights, optimizer, random numbers at every step, and the record are those of attach; also of a second fit."""
    from tests.framework.integrations import test_lightning as pl

    bare, _, _ = pl.fit(tmp_path / "bare")
    _, scope, _ = pl.fit(tmp_path / "attached", HOOKS["hooks"])
    callback = loopscope.Callback(**HOOKS, out=tmp_path / "callback" / "run")
    rows, _, trainer = pl.fit(tmp_path / "callback", callbacks=[callback])
    assert rows == bare
    assert isinstance(callback, loopscope.Callback)
    assert record(callback.scope) == record(scope)
    trainer.fit(pl.Classifier(), pl.batches())
    assert callback.scope.folder.name == "run_2"


def test_single_callback_and_validation_of_lightning(tmp_path: Path) -> None:
    """Lightning takes one callback without a list; a validation alone has no run."""
    from tests.framework.integrations import test_lightning as pl

    callback = loopscope.Callback(**HOOKS, out=tmp_path / "run")
    trainer = pl.trainer(tmp_path, callbacks=callback)
    trainer.validate(pl.Classifier(), pl.batches(), verbose=False)
    assert callback.scope is None
    assert not (tmp_path / "run").exists()


def test_callback_added_later_is_refused(tmp_path: Path) -> None:
    from tests.framework.integrations import hf_trainers as hf

    trainer = hf.trainer(tmp_path)
    trainer.add_callback(loopscope.Callback(**HOOKS))
    with pytest.raises(UsageError, match=r"give it to Trainer\(callbacks=\[\.\.\.\]\), or call loopscope\.attach"):
        trainer.train()


def test_unknown_option_of_callback_is_refused() -> None:
    with pytest.raises(UsageError, match="with_hooks"):
        loopscope.Callback(with_hook="health")  # type: ignore[call-arg]
