"""What FSDP2 does only beside a GPU: shards that stay on the CPU. No machine of the project has run these so far."""

from functools import partial

import pytest
import torch
import torch.distributed

from tests.framework.training.test_fully_sharded import build, differing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture
def one_rank(tmp_path):
    meeting = f"file://{tmp_path}/meeting"
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", init_method=meeting, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("pinned", [True, False])
def test_hooks_leave_shards_on_the_cpu_their_bytes(one_rank, pinned):
    from torch.distributed.fsdp import CPUOffloadPolicy

    assert differing(partial(build, "fsdp", device="cuda", offload_policy=CPUOffloadPolicy(pin_memory=pinned))) == []


def test_hooks_leave_shards_on_the_gpu_their_bytes(one_rank):
    assert differing(partial(build, "fsdp", device="cuda")) == []
