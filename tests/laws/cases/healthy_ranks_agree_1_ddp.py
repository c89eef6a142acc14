# law: none
# near: ranks_agree
# fault: plain DistributedDataParallel with a DistributedSampler; gradients before the reduction differ between the ranks, as they should
# also:
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(196)
centers = 1.5 * torch.randn(5, 16)
y = torch.randint(0, 5, (1920,))
x = centers[y] + torch.randn(1920, 16)
dataset = TensorDataset(x, y)
sampler = DistributedSampler(dataset, shuffle=True, seed=0)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
net = nn.Sequential(nn.Linear(16, 96), nn.ReLU(), nn.Linear(96, 5))
nn.init.normal_(net[2].weight, std=0.02)
nn.init.zeros_(net[2].bias)
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print("epoch", epoch, "loss", loss.item(), flush=True)
dist.destroy_process_group()
