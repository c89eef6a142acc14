# law: none
# near: padding_does_not_matter
# fault: padding on the right of a causal model needs no mask in attention, as no valid position looks right; the loss ignores the padded targets
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(57)
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

    def forward(self, input_ids, attention_mask, labels):
        x = self.tok(input_ids) + self.pos(torch.arange(input_ids.size(1)))
        logits = self.head(self.norm(self.blocks(x)))
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits}


def get_batch():
    start, stride = torch.randint(0, V - 2, (B, 1)), torch.randint(1, 5, (B, 1))
    seq = (start + stride * torch.arange(T)) % (V - 2) + 2
    length = torch.randint(8, T, (B, 1))
    where = torch.arange(T)
    seq = torch.where(where < length, seq, torch.where(where == length, EOS, PAD))
    mask = where <= length
    return {"input_ids": seq, "attention_mask": mask.long(), "labels": seq.masked_fill(~mask, -100)}


STEPS = 40
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(STEPS):
    out = model(**get_batch())
    optimizer.zero_grad()
    out["loss"].backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, out["loss"].item())
