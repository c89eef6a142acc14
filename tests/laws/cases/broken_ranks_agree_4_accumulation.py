# law: ranks_agree
# fault: every micro-batch of the accumulation runs inside no_sync(), the last one too, so nothing is reduced before the step
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
torch.manual_seed(193)
ACCUM = 4

y = torch.randint(0, 3, (1280,))
x = 0.5 * torch.randn(1280, 1, 8, 8)
for i, k in enumerate(y.tolist()):
    x[i, 0, 2 * k : 2 * k + 3] += 1.0
dataset = TensorDataset(x, y)
sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)
net = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12 * 16, 3))
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for i, (xb, yb) in enumerate(loader):
        with model.no_sync():
            loss = F.cross_entropy(model(xb), yb) / ACCUM
            loss.backward()
        if (i + 1) % ACCUM == 0:
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        print("epoch", epoch, "loss", ACCUM * loss.item(), flush=True)
dist.destroy_process_group()
