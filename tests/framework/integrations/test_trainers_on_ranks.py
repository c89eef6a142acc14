"""Trainers under DDP and FSDP2, and loops of Accelerate: on three ranks hooks leave the training unchanged."""

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed

from tests.framework.integrations.rank_loops import everything, part_of
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.slow
RANKS = 3
OBSERVERS = ["norms", "training_metrics", "gradient_flow", "weight_updates"]
REMEMBERING = [*OBSERVERS, "consecutive", "weight_average"]
FSDP2 = {
    "fsdp_version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["GPT2Block"],
}
SHARDED: dict[str, Any] = {"fsdp": True, "fsdp_config": FSDP2}
Same = dict[tuple[str, int], bool]


def as_under_torchrun() -> Path:
    rank = str(distributed.get_rank())
    os.environ |= {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": str(distributed.get_world_size()),
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ["MASTER_PORT"] = "29400"  # never opened, since the process group exists
    warnings.simplefilter("ignore")
    return Path(os.environ["OUT"])


def compared(train: Callable[..., Any], equal: Callable[[Any, Any], bool], observers: dict[int, list[str]]) -> Same:
    """Train without hooks, and with observing or damaging hooks and an evaluation every two steps."""
    from tests.framework.integrations.hf_trainers import misbehaving_hook

    found: Same = {}
    for accumulate, names in observers.items():
        bare = train(f"bare{accumulate}", None, accumulate)
        for name, hooks in (("observers", names), ("misbehaving_hook", [misbehaving_hook()])):
            found[name, accumulate] = equal(train(f"{name}{accumulate}", hooks, accumulate), bare)
    return found


# Hugging Face


def hugging_face(observers: dict[int, list[str]], **options: Any) -> Same:
    out = as_under_torchrun()
    from tests.framework.integrations.hf_trainers import same, traced

    def train(folder: str, hooks: Any, accumulate: int) -> Any:
        often = {} if hooks is None else {"eval_strategy": "steps", "eval_steps": 2}
        return traced(out / folder, hooks, gradient_accumulation_steps=accumulate, **often, **options)

    return compared(train, same, observers)


def hugging_face_replicas() -> Any:
    found = hugging_face({1: [*OBSERVERS, "hessian"], 2: [*OBSERVERS, "hessian"]})
    return found | {("resumed", 1): trainer_resumes(Path(os.environ["OUT"]))}


def trainer_resumes(out: Path, **options: Any) -> bool:
    """Return whether a resumed Trainer ends with the bytes and numbers of an uninterrupted one."""
    from loopscope.checkpoints import differing_entries, open_checkpoint, read_content
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 2

    whole = ended(out / "whole", **options)
    ended(out / "parts", Stop(), **options)
    if distributed.get_rank() == 0:
        shutil.copytree(out / "parts", out / "two")
    parts = ended(out / "parts", checkpoint="checkpoint-2", **options)
    texts = [(out / name / "hooks/run/run.jsonl").read_text() for name in ("whole", "parts")]
    stored = [out / name / "checkpoint-6/loopscope/step_000000006" for name in ("whole", "parts")]
    states = [read_content(open_checkpoint(folder)) for folder in stored]
    return whole == parts and texts[0] == texts[1] and not differing_entries(*states)


def ended(folder: Path, *callbacks: Any, checkpoint: str = "", **options: Any) -> list[list[int]]:
    """Train with stateful hooks, from a checkpoint in the folder; return the final bytes of this rank."""
    from loopscope.state.digest import digest

    from tests.framework.integrations.hf_trainers import attached, trainer

    made = trainer(folder, *callbacks, save_strategy="steps", save_steps=2, **options)
    attached(made, REMEMBERING, out=folder / "hooks/run")
    made.train(resume_from_checkpoint=str(folder / checkpoint) if checkpoint else None)
    distributed.barrier()
    held = [value for entry in made.optimizer.state.values() for value in entry.values()]
    return [digest(part_of(each.detach())) for each in (*made.model.parameters(), *held)]


def as_on_devices() -> None:
    """Let accelerate shard models on CPUs, as torch does."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    begin = PartialState.__init__

    def begin_as_on_devices(self: Any, *inputs: Any, **options: Any) -> None:
        begin(self, *inputs, **options)
        if self.distributed_type is DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_XPU

    PartialState.__init__ = begin_as_on_devices  # type: ignore[method-assign]


def hugging_face_shards() -> Any:
    as_on_devices()
    found = hugging_face({1: OBSERVERS, 2: OBSERVERS}, **SHARDED)
    return found | {("resumed", 1): trainer_resumes(Path(os.environ["OUT"]), dropout=0.0, **SHARDED)}


def hugging_face_on_two() -> dict[Any, float]:
    """Resume in two processes with the rows of three, and return all numbers of the record."""
    out = as_under_torchrun()
    as_on_devices()
    ended(out / "two", checkpoint="checkpoint-2", dropout=0.0, per_device_train_batch_size=3, **SHARDED)
    return numbers_in(out / "two/hooks/run/run.jsonl")


# Lightning


def lightning_training(strategy: Callable[[], Any]) -> Callable[..., Any]:
    """Return a function that trains in a folder with hooks and returns this rank's bytes after every batch."""
    out = as_under_torchrun()
    import lightning.pytorch as lightning
    from loopscope import attach

    from tests.framework.integrations.test_lightning import Classifier, batches
    from tests.support.models import mean_loss

    class Trained(Classifier):
        def configure_model(self) -> None:
            from torch.distributed.fsdp import FSDPModule, fully_shard

            if strategy is sharding and not isinstance(self.net, FSDPModule):
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            torch.manual_seed(10 * index + distributed.get_rank())  # Lightning does not store the generators

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", mean_loss(self.net, batch) + torch.rand(()), sync_dist=True)

    class Trace(lightning.Callback):
        def __init__(self) -> None:
            self.rows: list[Any] = []

        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            held = [value for entry in trainer.optimizers[0].state.values() for value in entry.values()]
            tensors = [*module.parameters(), *held, torch.get_rng_state()], [*module.buffers()]
            self.rows.append([[part_of(tensor.detach()).tolist() for tensor in each] for each in tensors])

    def train(folder: str, hooks: Any, accumulate: int, *savers: Any, kept: Path | None = None, often: int = 2) -> Any:
        torch.manual_seed(1)
        trace = Trace()
        quiet = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary"], False)
        checking = {"val_check_interval": often, "check_val_every_n_epoch": None}
        made = lightning.Trainer(
            **quiet | ({"limit_val_batches": 0} if hooks is None or not often else checking),
            max_epochs=2,
            enable_checkpointing=bool(savers),
            accelerator="cpu",
            devices=distributed.get_world_size(),
            strategy=strategy(),
            default_root_dir=out / folder,
            callbacks=[trace, *savers],
            accumulate_grad_batches=accumulate,
        )
        if hooks is not None:
            attach(made, hooks=hooks, display="none", audit=True, out=out / folder / "run")
        made.fit(Trained(), batches(), batches(), ckpt_path=kept)
        return trace.rows

    return train


def replicating() -> str:
    return "ddp"


def sharding() -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    return ModelParallelStrategy(data_parallel_size=distributed.get_world_size(), tensor_parallel_size=1)


def some_and_equal(ours: Any, theirs: Any) -> bool:
    return bool(ours) and ours == theirs


def lightning_replicas() -> Any:
    train = lightning_training(replicating)
    found: Any = compared(train, some_and_equal, {1: [*OBSERVERS, "hessian"], 2: OBSERVERS})
    return found | {("resumed", 1): fit_resumes(train, Path(os.environ["OUT"]), exactly=False)}


def fit_resumes(train: Callable[..., Any], out: Path, *, exactly: bool) -> bool:
    """Return whether a resumed fit records the numbers of the uninterrupted one, up to DDP's rounding.

    The first step after a start sums gradients in buckets of another order, also without hooks.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint

    saver = ModelCheckpoint(out / "kept", "{epoch}", save_on_train_epoch_end=True, save_top_k=-1)
    rows = {"whole": train("whole", REMEMBERING, 1, saver, often=0)}
    if distributed.get_rank() == 0:
        for name in ("parts", "two"):
            shutil.copytree(out / "whole/run", out / name / "run")
    rows["parts"] = train("parts", REMEMBERING, 1, kept=out / "kept/epoch=0.ckpt", often=0)
    distributed.barrier()
    whole, parts = (numbers_in(out / name / "run/run.jsonl") for name in ("whole", "parts"))
    if exactly:  # except for buffers, which Lightning stores for one rank only
        ours, theirs = ([row for row, _ in rows[name][-2:]] for name in rows)
        return len(whole) > 50 and repr(parts) == repr(whole) and ours == theirs
    return len(whole) > 50 and parts == pytest.approx(whole, rel=1e-4, abs=1e-6, nan_ok=True)


def numbers_in(path: Path) -> dict[Any, float]:
    """Return all numbers of a record, by line and place in it."""
    lines = [torch.utils._pytree.tree_leaves_with_path(json.loads(line)) for line in path.read_text().splitlines()]
    leaves = [(number, where, leaf) for number, line in enumerate(lines) for where, leaf in line]
    return {(number, str(where)): leaf for number, where, leaf in leaves if isinstance(leaf, (int, float))}


def lightning_shards() -> Any:
    train = lightning_training(sharding)
    found: Any = compared(train, some_and_equal, {1: OBSERVERS, 2: OBSERVERS})
    return found | {("resumed", 1): fit_resumes(train, Path(os.environ["OUT"]), exactly=True)}


def lightning_on_two() -> int:
    """Resume in two processes from the checkpoint of three; return the number of trained batches."""
    train = lightning_training(sharding)
    return len(train("two", REMEMBERING, 1, kept=Path(os.environ["OUT"]) / "kept/epoch=0.ckpt", often=0))


def accelerate_replicas() -> Any:
    out = as_under_torchrun()
    from tests.framework.integrations.custom_loops import Loop, Parts, attached, train

    loops = {accumulate: Loop(accelerate=True, accumulate=accumulate, clips=0.5) for accumulate in (1, 2)}
    found = {}
    for accumulate, loop in loops.items():
        ours = attached(loop, out / str(accumulate), everything(), evaluates=True, audit=True)
        found["everything", accumulate] = some_and_equal(ours.digests, train(Parts(loop)).digests)
    return found


KINDS = [hugging_face_replicas, hugging_face_shards, lightning_replicas, lightning_shards, accelerate_replicas]


@pytest.mark.guarantee("ranks-agree")
@pytest.mark.parametrize("train", KINDS)
def test_trainers_on_ranks_match_bare_training(train, tmp_path, monkeypatch):
    """The trainers of Transformers, Lightning and Accelerate use three ranks; sharded runs resume on two as well."""
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    (tmp_path / "ranks").mkdir()
    for result in on_ranks(train, tmp_path / "ranks", RANKS):
        assert [way for way, holds in result.items() if not holds] == []
        assert len(result) >= (2 if train is accelerate_replicas else 4)
    (tmp_path / "two").mkdir()
    if train is lightning_shards:
        assert min(on_ranks(lightning_on_two, tmp_path / "two", 2)) > 0
    if train is hugging_face_shards:
        whole = numbers_in(tmp_path / "out/whole/hooks/run/run.jsonl")
        for result in on_ranks(hugging_face_on_two, tmp_path / "two", 2):
            assert result == pytest.approx(whole, rel=1e-4, abs=1e-6, nan_ok=True)
