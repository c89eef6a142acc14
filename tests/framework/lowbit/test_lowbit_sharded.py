"""Low-bit layers on two processes: sharded weights are gathered before their casts."""

import warnings
from typing import Any

import pytest
import torch
from loopscope.errors import LoopscopeError
from loopscope.experiments.tied_lm.model import Decoder, DecoderShape
from loopscope.lowbit import quantize_model
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.support.ranks import on_two_ranks

pytestmark = pytest.mark.ranks

VARYING = "e4m3/delayed/stochastic,output_grad=e5m2/delayed/stochastic"
DECODER = DecoderShape(vocabulary=30, context=8, width=16, layers=2, heads=2, hidden=24)


def decoder_loss(model: nn.Module, seed: int) -> Tensor:
    tokens = torch.randint(30, (4, 8), generator=torch.Generator().manual_seed(seed))
    return model(tokens).square().mean()


def sharded_steps(shard: bool) -> dict[str, Tensor]:
    """Train a low-bit decoder for three steps, on both ranks alike, and return its weights."""
    torch.manual_seed(0)
    model = Decoder(DECODER)
    quantize_model(model, VARYING, exclude=("head",), seed=1)
    if shard:
        mesh = init_device_mesh("cpu", (2,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        optimizer.zero_grad()
        decoder_loss(model, seed).backward()
        optimizer.step()
    return {name: value.full_tensor() if shard else value.detach() for name, value in model.named_parameters()}


def tensor_parallel_refusal() -> str:
    model = nn.Sequential(nn.Linear(8, 8))
    quantize_model(model, "fp8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    try:
        model(torch.ones(2, 8))
    except LoopscopeError as error:
        return str(error)
    return "nothing"


def everything() -> Any:
    return sharded_steps(shard=True), sharded_steps(shard=False), tensor_parallel_refusal()


def test_fsdp_matches_one_process(tmp_path):
    """Low-bit layers give the same bits under FSDP, and tensor parallelism is refused."""
    for sharded, alone, refusal in on_two_ranks(everything, tmp_path):
        assert sharded.keys() == alone.keys()
        for name, value in alone.items():
            assert torch.equal(sharded[name], value), name
        assert "needs its whole weight, but the weight is a DTensor" in refusal
