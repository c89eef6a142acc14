# law: none
# near: same_pass_same_bits
# fault: tables of rotary angles and the mask are built at the first call and kept in a plain dictionary by length; the cache depends on the length only, never on the data
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(14)
V, D, H, B = 29, 48, 4, 16


class RotaryAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.out = nn.Linear(D, D, bias=False)
        self.tables = {}

    def table(self, t):
        if t not in self.tables:
            half = D // H // 2
            freq = 1.0 / 10000 ** (torch.arange(half) / half)
            angle = torch.arange(t)[:, None] * freq
            self.tables[t] = (angle.cos(), angle.sin())
        return self.tables[t]

    def rotate(self, x):
        cos, sin = self.table(x.size(-2))
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, H, D // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, D))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.attn = nn.ModuleList(RotaryAttention() for _ in range(2))
        self.norm = nn.ModuleList(nn.LayerNorm(D) for _ in range(5))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(D, 128), nn.GELU(), nn.Linear(128, D)) for _ in range(2))
        self.head = nn.Linear(D, V, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, idx):
        x = self.embed(idx)
        for i in range(2):
            x = x + self.attn[i](self.norm[2 * i](x))
            x = x + self.mlp[i](self.norm[2 * i + 1](x))
        return self.head(self.norm[4](x))


def get_batch(step):
    t = 24 if step % 2 else 32  # two lengths, as in a curriculum
    seq = torch.randint(0, V, (B, 2))
    while seq.size(1) < t + 1:
        seq = torch.cat([seq, (seq[:, -1:] + seq[:, -2:-1]) % V], 1)
    return seq[:, :-1], seq[:, 1:]


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(40):
    x, y = get_batch(step)
    loss = F.cross_entropy(model(x).view(-1, V), y.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"{step:3d} {loss.item():.3f}")
