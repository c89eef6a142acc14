# law: rows_do_not_mix
# fault: the selective scan runs over the flattened (batch * time) axis, so the state of one row is carried into the next; a reshape taken over from code for one sequence
# also: order_does_not_matter, halves_make_a_whole
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(24)
V, T, D, N, B = 17, 16, 24, 4, 8


class SelectiveScan(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(D, 2 * D)
        self.param = nn.Linear(D, D + 2 * N)
        self.log_a = nn.Parameter(torch.arange(1, N + 1).float().log().repeat(D, 1))
        self.skip = nn.Parameter(torch.ones(D))
        self.out = nn.Linear(D, D)

    def forward(self, x):
        b, t, d = x.shape
        u, gate = self.inp(x.reshape(b * t, d)).chunk(2, -1)
        u = F.silu(u)
        delta, bmat, cmat = self.param(u).split([D, N, N], -1)
        delta = F.softplus(delta)
        decay = torch.exp(-delta.unsqueeze(-1) * self.log_a.exp())
        drive = (delta * u).unsqueeze(-1) * bmat.unsqueeze(1)
        state = torch.zeros(D, N)
        ys = []
        for i in range(b * t):
            state = decay[i] * state + drive[i]
            ys.append(state @ cmat[i])
        y = torch.stack(ys) + self.skip * u
        return self.out(y * F.silu(gate)).view(b, t, d)


class MambaLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.norm, self.final = nn.LayerNorm(D), nn.LayerNorm(D)
        self.mixer = SelectiveScan()
        self.head = nn.Linear(D, V)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, idx):
        x = self.embed(idx)
        x = x + self.mixer(self.norm(x))
        return self.head(self.final(x))


def get_batch():
    start, stride = torch.randint(0, V, (B, 1)), torch.randint(1, 4, (B, 1))
    seq = (start + stride * torch.arange(T + 1)) % V
    return seq[:, :-1], seq[:, 1:]


STEPS = 40
model = MambaLM()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(STEPS):
    x, y = get_batch()
    loss = F.cross_entropy(model(x).reshape(-1, V), y.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
