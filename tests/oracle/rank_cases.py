"""Two ranks under DistributedDataParallel, by the command line and attached to a loop, with a handful of hooks."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.oracle import experiments, hook_cases, product
from tests.oracle.recording import Case, attached_case, isolated_case, run_case, state_of

COUNT, TIMEOUT = 2, 3600
ROOT = Path(__file__).parents[2]
HOOKS = ("gradient_noise_scale", "grad_clip", "hessian.finite", "norms", "weight_average", "weight_updates")


def record_all() -> dict[str, Case]:
    """Start the ranks, which run all cases, and return the first rank's records and the second's final states."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(COUNT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)])
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"rank_{rank}.json" for rank in range(COUNT)]
        ranks = []
        for rank, file in enumerate(files):
            rank_environment = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            words = [sys.executable, "-m", "tests.oracle.rank_cases", str(file)]
            ranks.append(
                subprocess.Popen(
                    words, env=os.environ | shared | rank_environment, stdout=subprocess.DEVNULL, cwd=folder
                )
            )
        if any([rank.wait(TIMEOUT) for rank in ranks]):
            raise RuntimeError("A rank failed; its error is above.")
        first, *others = (json.loads(file.read_text()) for file in files)
    for rank, other in enumerate(others, start=1):
        for name, case in other.items():
            first[name]["digests"] |= {f"{part} of rank {rank}": value for part, value in case["digests"].items()}
    return first


def attached(variant: hook_cases.Variant) -> Case:
    """Train a replica with a hook attached; the record is on the first rank."""
    if is_first():
        return attached_case(lambda: hook_cases.train_attached(variant, replica), Path("attached"))
    model, optimizer = hook_cases.train_attached(variant, replica)
    return {"facts": {}, "digests": state_of(model.state_dict(), optimizer)}


def replica(model: nn.Module) -> nn.Module:
    """Return the model wrapped for distributed training."""
    return DistributedDataParallel(model)


def run(variant: hook_cases.Variant) -> Case:
    """Train with ``--parallel ddp``; the record is on the first rank."""
    words = hook_cases.options_of_command(variant, *hook_cases.OF_EPOCHS, "--parallel", "ddp")
    if is_first():
        return run_case("oracle_epochs", "only", *words)
    status, _, errors = product.run_command("run", "oracle_epochs", *words)
    if status:
        raise RuntimeError(errors)
    return {"facts": {}, "digests": state_of({}, product.OPTIMIZERS[-1])}


def is_first() -> bool:
    """Return whether this process is the first rank."""
    return torch.distributed.get_rank() == 0


def be_a_rank(file: str) -> None:
    """Run all cases as one rank, write their records, and exit at once, since gloo threads may outlive their group."""
    product.discover()
    experiments.register()
    product.keep_optimizers()
    torch.distributed.init_process_group("gloo")
    found: dict[str, Any] = {}
    for hook in HOOKS:
        for way, train in (("attach", attached), ("run", run)):
            with isolated_case():
                found[f"{hook}/{way}"] = train(hook_cases.variants()[hook])
            torch.distributed.barrier()
    Path(file).write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    be_a_rank(sys.argv[1])
