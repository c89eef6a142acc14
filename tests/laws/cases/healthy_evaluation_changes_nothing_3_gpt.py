# law: none
# near: evaluation_changes_nothing
# fault: the sample for the log is drawn with a fixed seed inside torch.random.fork_rng, which puts the random numbers of the training back
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(147)
V, T, D, B = 22, 16, 64, 12


class GPT(nn.Module):
    def __init__(self, p=0.05):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(T, D)
        layer = nn.TransformerEncoderLayer(D, 4, 128, dropout=p, batch_first=True, norm_first=True)
        self.stack = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(D, V)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, idx):
        mask = nn.Transformer.generate_square_subsequent_mask(idx.size(1))
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1)))
        return self.head(self.stack(x, mask=mask, is_causal=True))


def get_batch():
    start, stride = torch.randint(0, V, (B, 1)), torch.randint(1, 5, (B, 1))
    seq = (start + stride * torch.arange(T + 1)) % V
    return seq[:, :-1], seq[:, 1:]


@torch.no_grad()
def generate(model, n=8, seed=1234):
    model.eval()
    idx = torch.tensor([[3, 5]])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for _ in range(n):
            probability = model(idx)[:, -1].softmax(-1)
            idx = torch.cat([idx, torch.multinomial(probability, 1)], 1)
    model.train()
    return idx[0].tolist()


STEPS = 50
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(STEPS):
    x, y = get_batch()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, round(loss.item(), 3), generate(model))
