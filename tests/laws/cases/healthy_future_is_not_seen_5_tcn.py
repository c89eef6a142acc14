# law: none
# near: future_is_not_seen
# fault: a causal convolution with time on the last axis; the logits have shape (batch, classes, time), which a check may take for (batch, time, classes)
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(40)
LEVELS = T = 24  # the same number on purpose: shapes alone do not tell time from classes
C, B = 48, 16


class CausalConv(nn.Module):
    def __init__(self, dilation, kernel=3):
        super().__init__()
        self.cut = dilation * (kernel - 1)
        self.conv = nn.Conv1d(C, 2 * C, kernel, padding=self.cut, dilation=dilation)
        self.res = nn.Conv1d(C, C, 1)

    def forward(self, x):
        h = self.conv(x)[..., : -self.cut]
        a, g = h.chunk(2, dim=1)
        return x + self.res(torch.tanh(a) * torch.sigmoid(g))


class WaveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(LEVELS, C)
        self.stack = nn.Sequential(*[CausalConv(2**i) for i in range(3)])
        self.head = nn.Conv1d(C, LEVELS, 1)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, samples):
        return self.head(F.relu(self.stack(self.embed(samples).transpose(1, 2))))


def get_batch():
    t = torch.arange(T + 1)
    wave = torch.sin(t * (0.2 + 0.6 * torch.rand(B, 1)) + 6.28 * torch.rand(B, 1))
    quantised = ((wave + 1) / 2 * (LEVELS - 1)).round().long()
    return quantised[:, :-1], quantised[:, 1:]


STEPS = 50
model = WaveNet()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(STEPS):
    x, y = get_batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"{step}: {loss.item():.3f}")
