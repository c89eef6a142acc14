# law: same_pass_same_bits
# fault: the cache of keys and values for generation is on by default and also fills during training, so every batch attends to the batch before it
# also: checkpoint_is_complete, order_does_not_matter, halves_make_a_whole, rows_do_not_mix
import math

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(2)
V, T, D, H, B = 31, 24, 48, 4, 16


class Attention(nn.Module):
    def __init__(self, use_cache=True):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.use_cache = use_cache
        self.past = None

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, H, D // H).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        if self.use_cache:
            if self.past is not None:
                k = torch.cat([self.past[0], k], 2)
                v = torch.cat([self.past[1], v], 2)
            self.past = (k[:, :, -t:].detach(), v[:, :, -t:].detach())
        n = k.size(2)
        mask = torch.ones(t, n, dtype=torch.bool).tril(n - t)
        att = (q @ k.transpose(-1, -2)) / math.sqrt(D // H)
        att = att.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.out((att @ v).transpose(1, 2).reshape(b, t, D))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def get_batch():
    start, stride = torch.randint(0, V, (B, 1)), torch.randint(1, 6, (B, 1))
    seq = (start + stride * torch.arange(T + 1)) % V
    return seq[:, :-1], seq[:, 1:]


def main():
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    STEPS = 40
    for step in range(STEPS):
        x, y = get_batch()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(step, round(loss.item(), 4))


if __name__ == "__main__":
    main()
