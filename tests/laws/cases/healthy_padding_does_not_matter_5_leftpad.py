# law: none
# near: padding_does_not_matter
# fault: padding on the left with positions counted from the mask; rows of the attention that belong to padding have only themselves to attend to, and are never read
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(59)
V, T, D, H, B, PAD = 27, 20, 48, 4, 16, 0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x, bias):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, H, D // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, D))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, batch):
        ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        t = ids.size(1)
        position = (mask.long().cumsum(1) - 1).clamp(min=0)
        visible = mask.unsqueeze(1) & torch.ones(t, t, dtype=torch.bool).tril() | torch.eye(t, dtype=torch.bool)
        bias = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min).unsqueeze(1)
        x = self.tok(ids) + self.pos(position)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(self.norm(x))


def get_batch():
    length = torch.randint(8, T + 1, (B, 1))
    offset = torch.arange(T) - (T - length)
    start, stride = torch.randint(0, V - 1, (B, 1)), torch.randint(1, 5, (B, 1))
    mask = offset >= 0
    seq = (start + stride * offset) % (V - 1) + 1
    return {"input_ids": seq * mask, "attention_mask": mask.long(), "labels": seq.masked_fill(~mask, -100)}


STEPS = 40
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(STEPS):
    batch = get_batch()
    logits = model(batch)
    target = batch["labels"][:, 1:].clone()
    target[~batch["attention_mask"][:, :-1].bool()] = -100  # nothing is predicted from padding
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, V), target.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
