# law: none
# near: ranks_agree
# fault: negatives are gathered over the ranks by a function whose backward sums the gradients of all ranks, so the reduced gradient is that of the joint contrastive batch, though no rank computes it alone
# also:
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(199)
DIM, B = 16, 24
objects = torch.randn(400, DIM)


class GatherLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        parts = [torch.zeros_like(z) for _ in range(world)]
        dist.all_gather(parts, z.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient.chunk(world)[rank]


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(DIM, 96), nn.ReLU(), nn.Linear(96, 24))
        self.text = nn.Sequential(nn.Linear(DIM, 96), nn.ReLU(), nn.Linear(96, 24))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)


def clip_loss(a, b, temperature=0.3):
    all_a, all_b = GatherLayer.apply(a), GatherLayer.apply(b)
    target = torch.arange(B) + rank * B
    return (F.cross_entropy(a @ all_b.T / temperature, target) + F.cross_entropy(b @ all_a.T / temperature, target)) / 2


def main():
    model = DDP(TwoTowers())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(rank)
    for step in range(40):
        base = objects[torch.randperm(200, generator=generator)[:B] + 200 * rank]
        noise = 0.2 * torch.randn(2, B, DIM, generator=generator)
        loss = clip_loss(*model(base + noise[0], base + noise[1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(step, loss.item(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
