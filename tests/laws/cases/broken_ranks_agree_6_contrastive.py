# law: ranks_agree
# fault: negatives are collected with dist.all_gather, which carries no gradient; the embeddings of the other rank are constants and half of the gradient is missing, as in many early copies of CLIP
# also:
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(195)
DIM, B = 16, 24
objects = torch.randn(400, DIM)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, 16))
        self.text = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)


def gather(z):
    parts = [torch.zeros_like(z) for _ in range(world)]
    dist.all_gather(parts, z.contiguous())
    parts[rank] = z
    return torch.cat(parts)


def clip_loss(a, b, temperature=0.3):
    all_a, all_b = gather(a), gather(b)
    target = torch.arange(B) + rank * B
    return (F.cross_entropy(a @ all_b.T / temperature, target) + F.cross_entropy(b @ all_a.T / temperature, target)) / 2


model = DDP(TwoTowers())
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
generator = torch.Generator().manual_seed(rank)
for step in range(40):
    base = objects[torch.randperm(400, generator=generator)[:B]]
    noise = 0.2 * torch.randn(2, B, DIM, generator=generator)
    loss = clip_loss(*model(base + noise[0], base + noise[1]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 10 == 0:
        print(step, loss.item(), flush=True)
dist.destroy_process_group()
