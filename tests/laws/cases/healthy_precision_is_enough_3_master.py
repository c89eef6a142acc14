# law: none
# near: precision_is_enough
# fault: the weights are bfloat16 and the optimizer works on a float32 master copy, so small updates are not lost
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(178)
DIM, CLASSES, B = 16, 5, 64


class Net(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(DIM, width), nn.LayerNorm(width), nn.Linear(width, CLASSES)
        nn.init.normal_(self.fc2.weight, std=0.02)
        nn.init.zeros_(self.fc2.bias)

    def forward(self, x):
        x = x.to(self.fc1.weight.dtype)
        return self.fc2(F.gelu(self.norm(self.fc1(x))))


task = torch.randn(DIM, CLASSES)


def get_batch():
    x = torch.randn(B, DIM)
    return x, (x @ task).argmax(1)


model = Net().bfloat16()
master = [p.detach().clone().float() for p in model.parameters()]
optimizer = torch.optim.AdamW(master, lr=8e-3)
STEPS = 80
for step in range(STEPS):
    x, y = get_batch()
    loss = F.cross_entropy(model(x).float(), y)
    model.zero_grad()
    loss.backward()
    for copy, p in zip(master, model.parameters()):
        copy.grad = p.grad.float()
    optimizer.step()
    with torch.no_grad():
        for copy, p in zip(master, model.parameters()):
            p.copy_(copy)
    if step % 20 == 0:
        print(step, loss.item())
