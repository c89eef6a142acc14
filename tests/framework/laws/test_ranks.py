"""The law on ranks, on two processes with a DistributedDataParallel model."""

import json
import os
import tempfile
from functools import partial
from pathlib import Path

import loopscope
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import on_two_ranks


def verdict(*, shares_rows: bool) -> dict[str, str]:
    """Train a classifier on the rows of a rank, or on the same ones on all; return verdict and evidence of the law."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows, classes = torch.randn(8, 2, 16, 4), torch.randint(3, (8, 2, 16))
    place = dist.get_rank() if shares_rows else 0
    folder = Path(os.environ["OUT"])
    options = {"laws": {"only": ["ranks_agree"], "steps": [1, 3]}}
    with loopscope.attach(model, optimizer, hooks=["laws"], hook_options=options, out=folder, display="none"):
        for x, y in zip(rows[:, place], classes[:, place], strict=True):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    (result,) = json.loads((folder / "laws.json").read_text())["laws"] if dist.get_rank() == 0 else ({},)
    return {name: result.get(name, "") for name in ("verdict", "evidence")}


@pytest.mark.ranks
@pytest.mark.parametrize("shares_rows", [True, False])
def test_equal_batches_on_all_ranks_break_the_law(
    shares_rows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "run"))
    result, _ = on_two_ranks(partial(verdict, shares_rows=shares_rows), Path(tempfile.mkdtemp(dir=tmp_path)))
    assert result["verdict"] == ("holds" if shares_rows else "broken")
    assert ("they get the same rows" in result["evidence"]) is not shares_rows
