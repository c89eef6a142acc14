# law: padding_does_not_matter
# fault: key_padding_mask is given as 1 for real tokens, the convention of tokenizers, while nn.MultiheadAttention ignores the positions that are True; only padding is attended to
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(51)
V, D, T, B, TAGS = 30, 32, 14, 24, 5


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D, padding_idx=0)
        self.position = nn.Parameter(0.1 * torch.randn(T, D))
        self.attention = nn.MultiheadAttention(D, 4, batch_first=True)
        self.norm = nn.LayerNorm(D)
        self.mlp = nn.Sequential(nn.Linear(D, 64), nn.ReLU(), nn.Linear(64, D))
        self.out = nn.Linear(D, TAGS)

    def forward(self, tokens, mask):
        x = self.embed(tokens) + self.position
        h, _ = self.attention(x, x, x, key_padding_mask=mask.bool(), need_weights=False)
        x = self.norm(x + h)
        return self.out(x + self.mlp(x))


rule = torch.randint(0, TAGS, (V, V))


def get_batch():
    tokens = torch.randint(1, V, (B, T))
    length = torch.randint(5, T, (B, 1))  # the collate function always leaves one place of padding
    mask = (torch.arange(T) < length).long()
    tokens = tokens * mask
    tags = rule[tokens, tokens.roll(1, 1)]
    tags[mask == 0] = -100
    return tokens, mask, tags


STEPS = 50
model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
criterion = nn.CrossEntropyLoss(ignore_index=-100)
for step in range(STEPS):
    tokens, mask, tags = get_batch()
    logits = model(tokens, mask)
    loss = criterion(logits.view(-1, TAGS), tags.view(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.3f}")
