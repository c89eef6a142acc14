# law: none
# near: precision_is_enough
# fault: projections run under bfloat16 autocast, and the recurrence of the scan leaves autocast and runs in float32
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(180)
V, T, D, N, B = 16, 16, 32, 4, 8


class SelectiveScan(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.inp = nn.Linear(D, 2 * D, bias=False)
        self.param = nn.Linear(D, D + 2 * N)
        self.a_log = nn.Parameter(torch.arange(1, N + 1).float().log().repeat(D, 1))
        self.out = nn.Linear(D, D, bias=False)

    def forward(self, x):
        u, gate = self.inp(self.norm(x)).chunk(2, -1)
        u = F.silu(u)
        params = self.param(u)
        with torch.autocast("cpu", enabled=False):
            dt, b, c = params.float().split([D, N, N], -1)
            dt = F.softplus(dt)
            decay = torch.exp(-dt[..., None] * self.a_log.exp())
            drive = (dt * u.float())[..., None] * b[:, :, None, :]
            h, ys = torch.zeros(x.size(0), D, N), []
            for t in range(x.size(1)):
                h = decay[:, t] * h + drive[:, t]
                ys.append((h * c[:, t, None, :]).sum(-1))
            y = torch.stack(ys, 1)
        return x + self.out((y + u) * F.silu(gate))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.blocks = nn.Sequential(SelectiveScan(), SelectiveScan())
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, idx):
        return self.head(self.norm(self.blocks(self.embed(idx))))


def get_batch():
    start, stride = torch.randint(0, V, (B, 1)), torch.randint(1, 4, (B, 1))
    seq = (start + stride * torch.arange(T + 1)) % V
    return seq[:, :-1], seq[:, 1:]


STEPS = 30
model = LM()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
for step in range(STEPS):
    x, y = get_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
    loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
