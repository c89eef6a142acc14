# law: none
# near: ranks_agree
# fault: ranks have very different numbers of tokens; the summed loss is multiplied by the number of ranks and divided by the joint number of tokens, which undoes DDP's average
# also:
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(200)
V, T, B = 24, 20, 12


class LM(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.embed = nn.Embedding(V, 48)
        self.gru = nn.GRU(48, hidden, batch_first=True)
        self.head = nn.Linear(hidden, V)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, idx):
        return self.head(self.gru(self.embed(idx))[0])


def get_batch(generator):
    start = torch.randint(0, V - 1, (B, 1), generator=generator)
    stride = torch.randint(1, 5, (B, 1), generator=generator)
    seq = (start + stride * torch.arange(T + 1)) % (V - 1) + 1
    low, high = (3, 8) if rank == 0 else (10, T + 1)
    keep = torch.arange(T + 1) <= torch.randint(low, high, (B, 1), generator=generator)
    return (seq * keep)[:, :-1], seq.masked_fill(~keep, -100)[:, 1:]


model = DDP(LM())
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
generator = torch.Generator().manual_seed(rank)
for step in range(40):
    x, y = get_batch(generator)
    tokens = (y != -100).sum().float()
    dist.all_reduce(tokens)
    nll = F.cross_entropy(model(x).transpose(1, 2), y, ignore_index=-100, reduction="sum")
    loss = nll * world / tokens
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 10 == 0:
        print(step, loss.item(), flush=True)
dist.destroy_process_group()
