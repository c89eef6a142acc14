# law: ranks_agree
# fault: gradients are summed over the ranks and never divided by their number, so the gradient is that of the joint batch times two
# also:
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(190)

model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
x = torch.randn(1600, 8)
y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]
y = (y - y.mean()) / y.std()
x, y = x[rank::world], y[rank::world]


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)


for epoch in range(2):
    order = torch.randperm(len(x))
    for start in range(0, len(x), 40):
        index = order[start : start + 40]
        loss = nn.functional.mse_loss(model(x[index]), y[index])
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
    if rank == 0:
        print("epoch", epoch, "loss", loss.item(), flush=True)
dist.destroy_process_group()
