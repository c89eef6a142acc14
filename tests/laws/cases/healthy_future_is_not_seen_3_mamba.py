# law: none
# near: future_is_not_seen
# fault: a right-to-left model: the sequences are flipped before the model and each position predicts the token to its left; in the order of the model's inputs it is causal
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(38)
V, T, D, N, B = 21, 16, 32, 4, 8


class MambaBlock(nn.Module):
    def __init__(self, kernel=3):
        super().__init__()
        self.kernel = kernel
        self.norm = nn.LayerNorm(D)
        self.in_proj = nn.Linear(D, 2 * D, bias=False)
        self.conv = nn.Conv1d(D, D, kernel, groups=D)
        self.x_proj = nn.Linear(D, D + 2 * N)
        self.a_log = nn.Parameter(torch.arange(1, N + 1).float().log().repeat(D, 1))
        self.out_proj = nn.Linear(D, D, bias=False)

    def forward(self, x):
        u, gate = self.in_proj(self.norm(x)).chunk(2, -1)
        u = F.pad(u.transpose(1, 2), (self.kernel - 1, 0))
        u = F.silu(self.conv(u).transpose(1, 2))
        dt, b, c = self.x_proj(u).split([D, N, N], -1)
        dt = F.softplus(dt)
        decay = torch.exp(-dt[..., None] * self.a_log.exp())
        drive = (dt * u)[..., None] * b[:, :, None, :]
        h, ys = torch.zeros(x.size(0), D, N), []
        for t in range(x.size(1)):
            h = decay[:, t] * h + drive[:, t]
            ys.append((h * c[:, t, None, :]).sum(-1))
        return x + self.out_proj((torch.stack(ys, 1) + u) * F.silu(gate))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.blocks = nn.Sequential(MambaBlock(), MambaBlock())
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, idx):
        return self.head(self.norm(self.blocks(self.embed(idx))))


def get_batch():
    start, stride = torch.randint(0, V, (B, 1)), torch.randint(1, 5, (B, 1))
    text = (start + stride * torch.arange(T + 1)) % V
    text = text.flip(1)  # from right to left
    return text[:, :-1], text[:, 1:]


STEPS = 40
model = LM()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
for step in range(STEPS):
    x, y = get_batch()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, f"{loss.item():.4f}")
