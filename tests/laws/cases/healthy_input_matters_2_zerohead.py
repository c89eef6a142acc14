# law: none
# near: input_matters
# fault: the last layer starts at zero, so at the first step the output, and with it the loss, is the same for every input; after one step the input counts
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(66)
DIM, CLASSES, B = 24, 6, 64


class ResBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.stem = nn.Linear(DIM, width)
        self.blocks = nn.Sequential(ResBlock(width), ResBlock(width))
        self.head = nn.Linear(width, CLASSES)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


teacher = nn.Sequential(nn.Linear(DIM, 32), nn.Tanh(), nn.Linear(32, CLASSES))


@torch.no_grad()
def sample():
    x = torch.randn(B, DIM)
    return x, (5 * teacher(x)).argmax(1)


get_batch = sample
STEPS = 60
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(STEPS):
    x, y = get_batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item())
