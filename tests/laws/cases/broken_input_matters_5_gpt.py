# law: input_matters
# fault: the token table is indexed with the positions (self.tok(pos)), a slip of one word; the tokens are only used for their shape
# also: one_batch_can_be_learned
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(64)
V, T, D, H, B = 33, 24, 48, 4, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, H, D // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, D))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, idx):
        pos = torch.arange(idx.size(1)).expand_as(idx)
        x = self.tok(pos) + self.pos(pos)
        return self.head(self.norm(self.blocks(x)))


weights = torch.rand(V, V) ** 8
text = [0]
for _ in range(4000):
    text.append(int(torch.multinomial(weights[text[-1]], 1)))
text = torch.tensor(text)


def get_batch():
    ix = torch.randint(len(text) - T - 1, (B, 1)) + torch.arange(T + 1)
    return text[ix[:, :-1]], text[ix[:, 1:]]


STEPS = 40
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(STEPS):
    x, y = get_batch()
    loss = F.cross_entropy(model(x).view(-1, V), y.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
