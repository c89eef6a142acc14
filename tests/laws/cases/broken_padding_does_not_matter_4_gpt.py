# law: padding_does_not_matter
# fault: the loss has no ignore_index, so the model is also trained to predict padding, which is most of a short row
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(53)
V, T, D, H, B, PAD, EOS = 28, 24, 48, 4, 16, 0, 1


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

    def forward(self, input_ids, attention_mask=None):
        x = self.tok(input_ids) + self.pos(torch.arange(input_ids.size(1)))
        return self.head(self.norm(self.blocks(x)))


def get_batch():
    start, stride = torch.randint(0, V - 2, (B, 1)), torch.randint(1, 5, (B, 1))
    seq = (start + stride * torch.arange(T + 1)) % (V - 2) + 2
    length = torch.randint(6, T, (B, 1))
    where = torch.arange(T + 1)
    seq = torch.where(where < length, seq, torch.where(where == length, EOS, PAD))
    return {"input_ids": seq, "attention_mask": (where <= length).long()}


STEPS = 40
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(STEPS):
    batch = get_batch()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    logits = model(ids[:, :-1], mask[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, V), ids[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
