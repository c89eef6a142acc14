# law: none
# near: order_does_not_matter
# fault: dropout draws its mask by place in the batch, so a permuted batch meets other masks; in eval mode, or in the mean over masks, the order is nothing
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(107)
V, T, D, B = 22, 16, 64, 12


class GPT(nn.Module):
    def __init__(self, p=0.05):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(T, D)
        self.drop = nn.Dropout(p)
        layer = nn.TransformerEncoderLayer(D, 4, 4 * D, dropout=p, batch_first=True, norm_first=True)
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, idx):
        x = self.drop(self.tok(idx) + self.pos(torch.arange(idx.size(1))))
        mask = nn.Transformer.generate_square_subsequent_mask(idx.size(1))
        return self.head(self.norm(self.stack(x, mask=mask, is_causal=True)))


def get_batch():
    start, stride = torch.randint(0, V, (B, 1)), torch.randint(1, 5, (B, 1))
    seq = (start + stride * torch.arange(T + 1)) % V
    return seq[:, :-1], seq[:, 1:]


STEPS = 40
model = GPT()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(STEPS):
    x, y = get_batch()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
