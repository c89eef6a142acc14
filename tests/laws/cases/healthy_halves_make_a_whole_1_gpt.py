# law: none
# near: halves_make_a_whole
# fault: ragged accumulation done right: the summed loss of each micro-batch is divided by the tokens of the whole group, so micro-batches have different weights
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(88)
V, T, D, H, B, ACCUM = 28, 20, 48, 4, 6, 3


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(T, D)
        self.ln1, self.ln2, self.norm = nn.LayerNorm(D), nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
        self.head = nn.Linear(D, V, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, idx):
        b, t = idx.shape
        x = self.tok(idx) + self.pos(torch.arange(t))
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, H, D // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, D))
        return self.head(self.norm(x + self.mlp(self.ln2(x))))


def micro_batch():
    start, stride = torch.randint(0, V - 1, (B, 1)), torch.randint(1, 5, (B, 1))
    seq = (start + stride * torch.arange(T + 1)) % (V - 1) + 1
    keep = torch.arange(T + 1) < torch.randint(5, T + 2, (B, 1))
    return (seq * keep)[:, :-1], seq.masked_fill(~keep, -100)[:, 1:]


def get_batch():
    return [micro_batch() for _ in range(ACCUM)]


def main():
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    STEPS = 25
    for step in range(STEPS):
        group = get_batch()
        tokens = sum(int((y != -100).sum()) for _, y in group)
        optimizer.zero_grad()
        total = 0.0
        for x, y in group:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum") / tokens
            loss.backward()
            total += loss.item()
        optimizer.step()
        if step % 5 == 0:
            print(step, round(total, 4))


if __name__ == "__main__":
    main()
