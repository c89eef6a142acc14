# law: none
# near: every_parameter_learns
# fault: two optimizers take turns, one for the body and one for the head, so half of the parameters stand still in each step
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(80)
DIM, B = 10, 64


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(DIM, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU())
        self.head = nn.Linear(96, 2)

    def forward(self, x):
        return self.head(self.body(x))


net = Net()
slow = torch.optim.Adam(net.body.parameters(), lr=2e-3)
fast = torch.optim.Adam(net.head.parameters(), lr=4e-3)


def get_batch():
    x = torch.randn(B, DIM)
    y = torch.stack([torch.sin(2 * x[:, 0]) + x[:, 1], x[:, 2] * x[:, 3]], 1)
    return x, (y - torch.tensor([0.0, 0.0])) / torch.tensor([1.2, 1.0])


STEPS = 100
for step in range(STEPS):
    x, y = get_batch()
    loss = F.mse_loss(net(x), y)
    slow.zero_grad()
    fast.zero_grad()
    loss.backward()
    (slow if step % 2 == 0 else fast).step()
    if step % 20 == 0:
        print(step, round(loss.item(), 4))
