"""A GPT with four blocks of width 128 on random text of a small alphabet."""

import torch
from torch import nn

torch.manual_seed(0)
LENGTH, WIDTH, SYMBOLS = 64, 128, 64
text = torch.randint(SYMBOLS, (100_000,)).cummax(0).values % SYMBOLS


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """A decoder."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(4))), nn.Linear(WIDTH, SYMBOLS)

    def forward(self, x):
        return self.head(self.blocks(self.tokens(x) + self.positions.weight))


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for _ in range(200):
    starts = torch.randint(len(text) - LENGTH - 1, (16, 1)) + torch.arange(LENGTH)
    loss = nn.functional.cross_entropy(model(text[starts]).flatten(0, 1), text[starts + 1].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
