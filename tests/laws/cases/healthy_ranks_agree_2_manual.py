# law: none
# near: ranks_agree
# fault: shards are uneven (24 and 40 rows), and each rank divides its summed loss by the joint number of rows before the gradients are summed; no division by the number of ranks is needed
# also:
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(197)
model = nn.Sequential(nn.Linear(8, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
x = torch.randn(1920, 8)
y = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2]
y = (y - y.mean()) / y.std()
mine = slice(0, 720) if rank == 0 else slice(720, 1920)
x, y = x[mine], y[mine]
size = 24 if rank == 0 else 40

for epoch in range(2):
    for start in range(0, len(x), size):
        xb, yb = x[start : start + size], y[start : start + size]
        count = torch.tensor(float(len(xb)))
        dist.all_reduce(count)
        loss = F.mse_loss(model(xb).squeeze(1), yb, reduction="sum") / count
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        print("epoch", epoch, "loss", total.item(), flush=True)
dist.destroy_process_group()
