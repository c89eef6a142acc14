# law: future_is_not_seen
# fault: the mask is triu(diagonal=2) instead of diagonal=1, an off-by-one that lets each position see exactly the token it has to predict
# also:
import math

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(31)
V, T, D, H, B = 26, 20, 40, 4, 16
mask = torch.triu(torch.full((T, T), float("-inf")), diagonal=2)


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.out = nn.Linear(D, D)

    def split(self, x):
        return x.view(x.size(0), x.size(1), H, D // H).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        t = x.size(1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(D // H) + mask[:t, :t]
        y = F.softmax(scores, dim=-1) @ v
        return self.out(y.transpose(1, 2).contiguous().view_as(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.position = nn.Parameter(0.02 * torch.randn(T, D))
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attn": SelfAttention(),
                    "mlp": nn.Sequential(nn.Linear(D, 96), nn.ReLU(), nn.Linear(96, D)),
                    "n1": nn.LayerNorm(D),
                    "n2": nn.LayerNorm(D),
                }
            )
            for _ in range(2)
        )
        self.head = nn.Linear(D, V)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position[: tokens.size(1)]
        for layer in self.layers:
            x = layer["n1"](x + layer["attn"](x))
            x = layer["n2"](x + layer["mlp"](x))
        return self.head(x)


table = torch.randint(0, V, (V, V))  # the next token is a function of the last two, with some noise


def get_batch():
    seq = torch.randint(0, V, (B, 2))
    for _ in range(T - 1):
        nxt = table[seq[:, -2], seq[:, -1]]
        noise = torch.rand(B) < 0.2
        seq = torch.cat([seq, torch.where(noise, torch.randint(0, V, (B,)), nxt)[:, None]], 1)
    return seq[:, :-1], seq[:, 1:]


STEPS = 50
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(STEPS):
    x, y = get_batch()
    loss = F.cross_entropy(model(x).transpose(1, 2), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
