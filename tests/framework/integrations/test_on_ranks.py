"""Hooks attached on every rank of a custom loop leave the bytes of each rank unchanged and report jointly."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from loopscope.errors import LoopscopeError, UsageError
from loopscope.hooks import HookPoint
from loopscope.training import Ranks
from torch.distributed import checkpoint

from tests.docs.markdown import ROOT, blocks
from tests.framework.integrations.rank_loops import KINDS, RANKS, STEPS, Loop, everything, neutral
from tests.framework.integrations.stored_loops import remembered, resume_stored, stored
from tests.support import SpyHook, at
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert")  # of the health of so small a run
NUMBERS = ["norms", "training_metrics", "hessian", "weight_updates"]
BY_DIFFERENCES = {"hook_options": {"hessian": {"method": "finite_difference"}}}


class FailingAtEnd(SpyHook):
    """Raises on one rank at the end of the run."""

    def end(self, status: str) -> None:
        fail_on_one(None)


def fail_on_one(ctx: Any) -> None:
    if distributed.get_rank() == 1 and (ctx is None or ctx.step == 2):
        raise ValueError("no luck")


def all_of_it() -> dict[str, Any]:
    """Train in many modes; return the states, the errors and the metrics of this rank."""
    out = Path(os.environ["OUT"])
    found = {
        "DDP": neutral("DDP", 1, everything("hessian"), out / "ddp"),
        "FSDP2": neutral("FSDP2", 1, everything(), out / "fsdp"),
    }
    return {
        "is neutral": found,
        "measured": numbers("DDP", out / "numbers"),
        "said": said(out),
        **state(out),
        "stored": {kind: (stored(kind, out / kind), resume_stored(kind, out / kind)) for kind in ("FSDP2", "by hand")},
        **deserted(out),
    }


def numbers(kind: str, out: Path) -> dict[str, float]:
    loop = Loop(kind, drawing=False)
    with loop.attach(NUMBERS, out) as scope:
        loop.run(scope)
    return {name: value for name, value in scope.last_metrics().items() if isinstance(value, float)}


def said(out: Path) -> dict[str, tuple[str, int]]:
    """Return the error of each mistake, and the number of steps before it."""
    rank = distributed.get_rank()
    failing = at(SpyHook, HookPoint.POST_BACKWARD)(fail_on_one)
    cases: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
        "a plain model": ("by hand", ["norms"], {}),
        "other hooks": ("DDP", ["norms", "variance"] if rank == 1 else ["norms"], {}),
        "other accumulation": ("DDP", ["norms"], {"accumulate": 1 + (rank == 1)}),
        "a folder that holds a run": ("DDP", ["norms"], {"out": out / "ddp"}),
        "a hook that raises": ("DDP", [failing], {}),
        "a hook that raises in the end": ("DDP", [FailingAtEnd()], {}),
    }
    return {
        name: outcome(kind, hooks, {"out": out / name, **given}) for name, (kind, hooks, given) in cases.items()
    } | {"a loss of the replica": outcome("DDP", ["hessian"], {"out": out / "replica"}, of_the_replica=True)}


def outcome(kind: str, hooks: list[Any], given: dict[str, Any], *, of_the_replica: bool = False) -> tuple[str, int]:
    loop, text = Loop(kind), ""
    if of_the_replica:
        given |= {"loss": lambda model, batch: loop.loss(loop.trained, batch)}
    try:
        with loop.attach(hooks, **given) as scope:
            loop.run(scope)
    except LoopscopeError as error:
        text = f"{type(error).__name__}: {error}"
    return text, len(loop.trace)


def state(out: Path) -> dict[str, Any]:
    """Stop after an epoch and resume with the state of this rank, or of another."""
    loop = Loop("DDP")
    with loop.attach(["norms", "consecutive"], out / "parts") as scope:
        loop.run(scope)
        kept = scope.state_dict()
    found = {}
    for name, given in (("its own", kept), ("another's", Ranks.of(loop.model, loop.trained).gather(kept)[0])):
        again, found[name] = Loop("DDP"), ""
        try:
            with again.attach(["norms", "consecutive"], out / "parts") as scope:
                scope.load_state_dict(given)
                again.run(scope)
        except LoopscopeError as error:
            found[name] = str(error)
    return {"resumed": found}


def deserted(out: Path) -> dict[str, str]:
    """Let the script of one rank fail and end; return the errors of all ranks, and of an attach afterwards."""
    loop, last, found = Loop("DDP"), Loop("DDP"), {}
    loop.update = partial(fail_in_the_script, loop.update)  # type: ignore[method-assign]
    try:
        with loop.attach(["norms", "weight_average"], out / "deserted") as scope:
            loop.run(scope)
    except (ValueError, RuntimeError, LoopscopeError) as error:
        found["left"] = type(error).__name__
    if distributed.get_rank() == 0:
        try:
            last.attach(["norms"], out / "alone")
        except LoopscopeError as error:
            found["alone"] = f"{type(error).__name__}: {error}"
    return found


def fail_in_the_script(update: Any) -> None:
    update()
    fail_on_one(None)


def attached_on_each_layout() -> dict[str, bool]:
    out = Path(os.environ["OUT"])
    found = {kind: neutral(kind, 1, ["norms", "weight_updates"], out / kind) for kind in ("DDP", "FSDP2")}
    return found | {"rolled back": neutral("FSDP2", 1, everything("hessian"), out / "rolled-back", **BY_DIFFERENCES)}


@pytest.mark.ranks
def test_attached_hooks_leave_each_layout_unchanged(tmp_path, monkeypatch):
    """A smoke case per layout; the slow tests below train in every way, with hooks that misbehave.

    Under FSDP2 the leaves of the loss are gathered parameters, whose freed storage an intervention cannot copy.
    """
    monkeypatch.setenv("OUT", str(tmp_path))
    for result in on_ranks(attached_on_each_layout, tmp_path, RANKS):
        assert [way for way, holds in result.items() if not holds] == []
        assert result.keys() == {"DDP", "FSDP2", "rolled back"}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def ranks(out, tmp_path_factory):
    """Return the results of each of three processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUT", str(out))
        return on_ranks(all_of_it, tmp_path_factory.mktemp("ranks"), RANKS)


@pytest.mark.guarantee("ranks-agree")
@pytest.mark.ranks
@pytest.mark.slow
def test_hooks_leave_every_rank_unchanged(ranks):
    """In a custom training loop, each rank matches the run without hooks at every step."""
    for result in ranks:
        assert [way for way, holds in result["is neutral"].items() if not holds] == []
        assert len(result["is neutral"]) == 2


@pytest.mark.guarantee("ranks-agree")
@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_measure_like_one_process(ranks, tmp_path):
    """Each rank reports the metrics of one process with all rows, under the user's parameter names."""
    expected = numbers("alone", tmp_path / "alone")
    assert "norms/weight_norm/0.weight" in expected
    for result in ranks:
        assert result["measured"] == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True)


@pytest.mark.guarantee("ranks-agree")
@pytest.mark.ranks
@pytest.mark.slow
def test_only_main_rank_writes_a_complete_record(ranks, out):
    """Only the first rank of an attached loop writes, and its record is complete."""
    lines = [json.loads(line) for line in (out / "ddp" / "ddp.jsonl").read_text().splitlines()]
    drawn = [line["drawing/drawn"] for line in lines if line["hook_point"] == "POST_STEP" and "drawing/drawn" in line]
    assert [each["steps"] for each in drawn] == [[1, 2, 3, 4]]
    assert json.loads((out / "ddp" / "summary.json").read_text())["status"] == "completed"


@pytest.mark.guarantee("ranks-agree")
@pytest.mark.ranks
@pytest.mark.slow
def test_mistakes_are_reported_on_all_ranks(ranks):
    """All ranks raise the same message, or one that names the failing rank."""
    messages = {name: [result["said"][name][0] for result in ranks] for name in ranks[0]["said"]}
    parts = {
        "a plain model": "UsageError: This process is one of 3, and the model does not show which of them train it",
        "other hooks": "norms on rank 0, training_metrics, norms, variance on rank 1",
        "other accumulation": "UsageError: accumulate differs between the ranks: 1 on rank 0, 2 on rank 1",
        "a folder that holds a run": "holds a finished run, which is left unchanged; give attach another folder, out=",
        "a hook that raises": "no luck",
        "a hook that raises in the end": "no luck",
        "a loss of the replica": "call the model argument",
    }
    assert parts.keys() == messages.keys()
    for name, part in parts.items():
        assert all(part in text for text in messages[name]), messages[name]
        own, *others = messages[name][1], messages[name][0], messages[name][2]
        assert len({*others}) == 1
        assert own == others[0] or "on rank 1" in others[0]


@pytest.mark.guarantee("ranks-agree")
@pytest.mark.ranks
@pytest.mark.slow
def test_rank_resumes_only_from_its_own_state(ranks):
    """The error names the rank that the state belongs to."""
    assert [result["resumed"]["its own"] for result in ranks] == [""] * RANKS
    assert all("belongs to rank 0, but this is rank" in result["resumed"]["another's"] for result in ranks)


@pytest.mark.ranks
@pytest.mark.slow
def test_distributed_checkpoint_resumes_bit_for_bit(ranks, out):
    """On the same number of ranks, loop and hooks resume exactly from torch.distributed.checkpoint."""
    for kind in ("FSDP2", "by hand"):
        for number, result in enumerate(ranks):
            whole, parts = result["stored"][kind]
            assert whole.pop("in shards") == (kind == "FSDP2")
            torch.testing.assert_close(parts.pop("loaded"), remembered(number), rtol=0, atol=0)
            assert len(whole["trace"]) == STEPS
            assert parts == whole
        whole_run, parts_run = (out / kind / name / "run/run.jsonl" for name in ("whole", "three"))
        assert whole_run.read_bytes() == parts_run.read_bytes()


@pytest.mark.ranks
@pytest.mark.slow
def test_distributed_state_resumes_in_one_process(ranks, out):
    """One process with all rows continues with the same metrics."""
    shown = resume_stored("alone", out / "FSDP2", "one")
    torch.testing.assert_close(shown["loaded"], remembered(0), rtol=0, atol=0)
    assert shown["numbers"] == pytest.approx(ranks[0]["stored"]["FSDP2"][0]["numbers"], rel=1e-9, abs=1e-11)


@pytest.mark.ranks
@pytest.mark.slow
def test_distributed_state_resumes_on_two_ranks(ranks, out, tmp_path):
    """Two ranks with FSDP2 shards continue with the same metrics."""
    for rank in on_ranks(partial(resume_stored, "FSDP2", out / "FSDP2", "two"), tmp_path, 2):
        torch.testing.assert_close(rank["loaded"], remembered(0), rtol=0, atol=0)
        assert rank["numbers"] == pytest.approx(ranks[0]["stored"]["FSDP2"][0]["numbers"], rel=1e-9, abs=1e-11)


@pytest.mark.ranks
@pytest.mark.slow
def test_missing_or_unread_state_is_refused(ranks, out):
    """The error lists the stored keys or names the load call that is missing."""
    metadata = checkpoint.FileSystemReader(out / "FSDP2/stored").read_metadata()
    with Loop("alone").attach(["norms"], out / "refused") as scope:
        with pytest.raises(
            UsageError,
            match="no state of a scope on several ranks under the key 'hooks'; its keys are model, optimizer,",
        ):
            scope.state_dict(of=metadata, key="hooks")
        with pytest.raises(UsageError, match=r"first fill the result .* with torch\.distributed\.checkpoint\.load"):
            scope.load_state_dict(scope.state_dict(of=metadata))


@pytest.mark.guarantee("ranks-agree")
@pytest.mark.ranks
@pytest.mark.slow
def test_failing_rank_closes_and_others_end(ranks, out):
    """The run of the failing rank is marked failed, and the other ranks raise an error as it leaves."""
    assert [result["left"] for result in ranks][1] == "ValueError"
    assert {ranks[0]["left"], ranks[2]["left"]} <= {"RuntimeError", "RankLostError"}
    assert json.loads((out / "deserted" / "summary.json").read_text())["status"] == "failed"


@pytest.mark.guarantee("ranks-agree")
@pytest.mark.ranks
@pytest.mark.slow
def test_attaching_on_one_rank_is_refused(ranks):
    """RankLostError asks the user to call attach on every rank."""
    assert ranks[0]["alone"].startswith("RankLostError: Another rank has ended")
    assert ranks[0]["alone"].endswith("Call attach on every rank of the training.")


def otherwise() -> dict[str, bool]:
    out = Path(os.environ["OUT"])
    ways = [(kind, accumulate) for kind in KINDS if kind != "static graph" for accumulate in (1, 2)]
    found = {f"{kind}, {n}": neutral(kind, n, everything(), out / f"{kind}-{n}") for kind, n in ways}
    found |= {"FSDP2, accumulated": neutral("FSDP2", 2, everything(), out / "fsdp-2")}
    by_hand = {"ranks": Ranks([distributed.group.WORLD])}
    found |= {"by hand": neutral("by hand", 1, everything("hessian"), out / "hand", **by_hand)}
    found |= {"FSDP2, with curvature": neutral("FSDP2", 1, ["hessian"], out / "fsdp", **BY_DIFFERENCES)}
    return found | {"static graph": neutral("static graph", 1, ["norms", "training_metrics"], out / "static")}


@pytest.mark.guarantee("ranks-agree")
@pytest.mark.ranks
@pytest.mark.slow
def test_hooks_are_neutral_for_all_reducer_settings(tmp_path, monkeypatch):
    """Hooks leave every rank unchanged for further DDP and FSDP2 settings, with and without accumulation."""
    monkeypatch.setenv("OUT", str(tmp_path))
    for result in on_ranks(otherwise, tmp_path, RANKS):
        assert [way for way, holds in result.items() if not holds] == []


@pytest.mark.guarantee("ranks-agree")
@pytest.mark.ranks
@pytest.mark.slow
def test_documented_script_runs_under_torchrun(tmp_path):
    """Only one rank prints and writes the record, and no parameter name has a module prefix."""
    page = ROOT / "docs/many-processes.md"
    (script,) = [block.text for block in blocks(page) if block.file == "train.py"]
    (tmp_path / "train.py").write_text(script)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "train.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(torchrun, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("hooks: training_metrics, norms, hessian") == 1
    assert done.stdout.count("Results: ") == 1
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["replicas"]
    assert "module." not in (tmp_path / "runs/replicas/replicas.jsonl").read_text()
