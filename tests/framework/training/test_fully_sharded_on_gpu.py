"""Hooks under FSDP2 on a GPU, with CPU offload of shards. No machine of the project has run these so far."""

from functools import partial

import pytest
import torch
import torch.distributed

from tests.framework.training.test_fully_sharded import build, changing_hook_sets

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture
def one_rank(tmp_path):
    rendezvous = f"file://{tmp_path}/meeting"
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", init_method=rendezvous, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("pinned", [True, False])
def test_hooks_leave_offloaded_shards_unchanged(one_rank, pinned):
    from torch.distributed.fsdp import CPUOffloadPolicy

    policy = CPUOffloadPolicy(pin_memory=pinned)
    assert changing_hook_sets(partial(build, "fsdp", device="cuda", offload_policy=policy)) == []


def test_hooks_leave_gpu_shards_unchanged(one_rank):
    assert changing_hook_sets(partial(build, "fsdp", device="cuda")) == []
