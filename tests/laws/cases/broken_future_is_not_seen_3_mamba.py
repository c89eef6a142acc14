# law: future_is_not_seen
# fault: the short convolution before the selective scan uses padding="same", which is symmetric, instead of padding on the left and cutting the end
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(32)
V, T, D, N, B = 19, 16, 32, 4, 8


class MambaBlock(nn.Module):
    def __init__(self, kernel=4):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.in_proj = nn.Linear(D, 2 * D, bias=False)
        self.conv = nn.Conv1d(D, D, kernel, padding="same", groups=D)
        self.x_proj = nn.Linear(D, D + 2 * N, bias=False)
        self.dt_bias = nn.Parameter(torch.full((D,), -1.0))
        self.a_log = nn.Parameter(torch.arange(1, N + 1).float().log().repeat(D, 1))
        self.d_skip = nn.Parameter(torch.ones(D))
        self.out_proj = nn.Linear(D, D, bias=False)

    def forward(self, x):
        u, gate = self.in_proj(self.norm(x)).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2)).transpose(1, 2))
        dt, b, c = self.x_proj(u).split([D, N, N], -1)
        dt = F.softplus(dt + self.dt_bias)
        decay = torch.exp(-dt[..., None] * self.a_log.exp())
        drive = (dt * u)[..., None] * b[:, :, None, :]
        h = torch.zeros(x.size(0), D, N)
        ys = []
        for t in range(x.size(1)):
            h = decay[:, t] * h + drive[:, t]
            ys.append((h * c[:, t, None, :]).sum(-1))
        y = torch.stack(ys, 1) + self.d_skip * u
        return x + self.out_proj(y * F.silu(gate))


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
    motif = torch.randint(0, V, (B, 5))
    seq = motif.repeat(1, T // 5 + 2)[:, : T + 1]
    return seq[:, :-1], seq[:, 1:]


def main():
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


if __name__ == "__main__":
    main()
