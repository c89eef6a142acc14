# law: rows_do_not_mix
# fault: view(T, B, C) is used where transpose(0, 1) was meant, before nn.MultiheadAttention in its time-first layout; tokens of different rows end up in one sequence
# also: order_does_not_matter, halves_make_a_whole
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(21)
V, T, D, B, CLASSES = 40, 12, 32, 32, 3


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.position = nn.Parameter(0.02 * torch.randn(1, T, D))
        self.attention = nn.MultiheadAttention(D, 4)
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.mlp = nn.Sequential(nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D))
        self.head = nn.Linear(D, CLASSES)

    def forward(self, batch):
        tokens = batch["input_ids"]
        x = self.embed(tokens) + self.position
        b, t, c = x.shape
        h = self.norm1(x).view(t, b, c)
        h, _ = self.attention(h, h, h, need_weights=False)
        x = x + h.view(b, t, c)
        x = x + self.mlp(self.norm2(x))
        return {"logits": self.head(x.mean(1))}


group = torch.randint(0, CLASSES, (V,))


def get_batch():
    tokens = torch.randint(0, V, (B, T))
    votes = F.one_hot(group[tokens], CLASSES).sum(1)
    return {"input_ids": tokens, "labels": votes.argmax(1)}


STEPS = 60
model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(STEPS):
    batch = get_batch()
    loss = F.cross_entropy(model(batch)["logits"], batch["labels"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item())
