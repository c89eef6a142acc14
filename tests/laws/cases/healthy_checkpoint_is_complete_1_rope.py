# law: none
# near: checkpoint_is_complete
# fault: buffers with persistent=False (mask and table of angles) are missing in state_dict and are computed again by the constructor, always the same
# also:
import io

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(156)
V, T, D, H, B = 26, 20, 64, 4, 12


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        half = D // H // 2
        angle = torch.arange(T)[:, None] / 10000 ** (torch.arange(half) / half)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.register_buffer("mask", torch.ones(T, T, dtype=torch.bool).tril(), persistent=False)

    def rotate(self, x):
        a, b = x.chunk(2, -1)
        cos, sin = self.cos[: x.size(2)], self.sin[: x.size(2)]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, H, D // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, attn_mask=self.mask[:t, :t])
        return self.out(y.transpose(1, 2).reshape(b, t, D))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attn = nn.Embedding(V, D), Attention()
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
        self.ln1, self.ln2, self.norm = nn.LayerNorm(D), nn.LayerNorm(D), nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, idx):
        x = self.embed(idx)
        x = x + self.attn(self.ln1(x))
        return self.head(self.norm(x + self.mlp(self.ln2(x))))


def get_batch():
    motif = torch.randint(0, V, (B, 6))
    seq = motif.repeat(1, T // 6 + 2)[:, : T + 1]
    return seq[:, :-1], seq[:, 1:]


def main():
    STEPS = 40
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        x, y = get_batch()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(step, loss.item())
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())


if __name__ == "__main__":
    main()
