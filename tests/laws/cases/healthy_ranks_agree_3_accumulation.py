# law: none
# near: ranks_agree
# fault: micro-batches run inside no_sync() except the last of each group, whose backward reduces the sum of all
# also:
import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(198)
ACCUM = 2

y = torch.randint(0, 3, (1536,))
x = 0.5 * torch.randn(1536, 1, 8, 8)
for i, k in enumerate(y.tolist()):
    x[i, 0, 2 * k : 2 * k + 3] += 1.0
dataset = TensorDataset(x, y)
sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)
net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 3))
nn.init.normal_(net[4].weight, std=0.01)
nn.init.zeros_(net[4].bias)
model = DDP(net)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    optimizer.zero_grad()
    for i, (xb, yb) in enumerate(loader):
        last = (i + 1) % ACCUM == 0
        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(xb), yb) / ACCUM
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        print("epoch", epoch, "loss", ACCUM * loss.item(), flush=True)
dist.destroy_process_group()
