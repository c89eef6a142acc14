# law: none
# near: rows_do_not_mix
# fault: several documents are packed into each row with a mask per document and positions that start again; dimension 0 is rows, and there is only one row per pack of documents
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(29)
V, LENGTH, D, H, B = 23, 48, 48, 4, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x, allowed):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, H, D // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed.unsqueeze(1))
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, D))
        return x + self.mlp(self.ln2(x))


class PackedGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(LENGTH, D)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens, document, position):
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        allowed = causal & (document.unsqueeze(2) == document.unsqueeze(1))
        x = self.tok(tokens) + self.pos(position)
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.norm(x))


def pack():
    tokens, document, position, target = [], [], [], []
    d = 0
    while len(tokens) < LENGTH:
        n = min(int(torch.randint(8, 20, ())), LENGTH - len(tokens))
        start, stride = torch.randint(0, V, (2,)).tolist()
        doc = [(start + i * (1 + stride % 4)) % V for i in range(n)]
        tokens += doc
        document += [d] * n
        position += list(range(n))
        target += doc[1:] + [-100]  # nothing to predict at the end of a document
        d += 1
    return tokens, document, position, target


def get_batch():
    return (torch.tensor(z) for z in zip(*[pack() for _ in range(B)]))


model = PackedGPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
STEPS = 40
for step in range(STEPS):
    tokens, document, position, target = get_batch()
    logits = model(tokens, document, position)
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
