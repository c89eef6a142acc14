# law: ranks_agree
# fault: each rank takes the mean over its own tokens and DDP averages the ranks, though one rank has many more tokens than the other, as rows are ragged and sorted into shards by length
# also:
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(191)
V, T, B = 24, 20, 12


class LM(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.embed = nn.Embedding(V, 32)
        self.gru = nn.GRU(32, hidden, batch_first=True)
        self.head = nn.Linear(hidden, V)

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
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
generator = torch.Generator().manual_seed(rank)
for step in range(40):
    x, y = get_batch(generator)
    loss = F.cross_entropy(model(x).transpose(1, 2), y, ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 10 == 0:
        print(step, loss.item(), flush=True)
dist.destroy_process_group()
