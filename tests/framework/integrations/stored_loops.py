"""A loop on several ranks that torch.distributed.checkpoint saves with its hooks, and that resumes on any ranks."""

import shutil
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from loopscope.state.digest import digest
from loopscope.tensors import is_sharded, local_shards
from loopscope.training import Ranks
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.framework.integrations.rank_loops import Loop
from tests.support import SpyHook


class Keeping(SpyHook):
    """Has the state of :func:`remembered`."""

    name = "keeping"
    loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return remembered(distributed.get_rank() if distributed.is_initialized() else 0)

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


def remembered(rank: int) -> dict[str, Any]:
    """Return values that are difficult to store: empty ones, unusual keys and layouts, and one that differs by rank."""
    strange = {1: [torch.ones(2), ()], "a: b": torch.arange(6.0).view(2, 3).t(), "number": torch.tensor(rank)}
    return {"empty": {}, "no rows": torch.zeros(0, 3), "own": torch.full((2,), float(rank)), "strange": strange}


def hooks() -> list[Any]:
    return [Keeping(), "norms", "training_metrics", "consecutive", "variance", "weight_average", "path_length"]


def given(kind: str) -> dict[str, Any]:
    return {"ranks": Ranks([distributed.group.WORLD])} if kind == "by hand" else {}


def stored(kind: str, out: Path) -> dict[str, Any]:
    """Train two epochs, save everything after the first, and return the outcome of the second."""
    loop = Loop(kind, drawing=False)
    with loop.attach(hooks(), out / "whole/run", **given(kind)) as scope:
        loop.run(scope)
        model, optimizer = get_state_dict(loop.trained, loop.optimizer)
        state = scope.state_dict()
        checkpoint.save({"model": model, "optimizer": optimizer, "scope": state}, checkpoint_id=out / "stored")
        if distributed.get_rank() == 0:
            for name in ("three", "two", "one"):  # folders for the ranks that resume from here
                shutil.copytree(out / "whole", out / name)
        loop.trace.clear()
        loop.run(scope)
        found = outcome(loop, scope)
    return found | {"in shards": any(map(is_sharded, state.values()))}


def resume_stored(kind: str, out: Path, name: str = "three") -> dict[str, Any]:
    """Resume from the saved state, and return the outcome of the second epoch."""
    loop, keeping = Loop(kind, drawing=False), hooks()
    model, optimizer = get_state_dict(loop.trained, loop.optimizer)
    with loop.attach(keeping, out / name / "run", **given(kind)) as scope, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns a single process
        of = checkpoint.FileSystemReader(out / "stored").read_metadata()
        state = {"model": model, "optimizer": optimizer, "scope": scope.state_dict(of=of)}
        checkpoint.load(state, checkpoint_id=out / "stored")
        set_state_dict(loop.trained, loop.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        scope.load_state_dict(state["scope"])
        loop.run(scope)
        return outcome(loop, scope) | {"loaded": keeping[0].loaded}


def outcome(loop: Loop, scope: Any) -> dict[str, Any]:
    state = scope.state_dict()
    numbers = {name: value for name, value in scope.last_metrics().items() if isinstance(value, float)}
    several = distributed.is_initialized()
    states = {name: describe_tensor(local_shards([each])[0]) for name, each in state.items()} if several else {}
    return {"trace": loop.trace, "numbers": numbers, "states": states}


def describe_tensor(tensor: Tensor) -> Any:
    """Return the digest of a tensor, or the repr of the plain values that it contains."""
    if tensor.dtype != torch.uint8:
        return digest(tensor)
    return repr(torch.load(BytesIO(tensor.numpy().tobytes()), weights_only=True))
