# law: none
# near: rows_do_not_mix
# fault: the contrastive loss uses the other rows of the batch as negatives; the embeddings of a row depend on that row alone
# also:
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(26)


class Tower(nn.Module):
    def __init__(self, dim, width=128, out=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, width), nn.GELU(), nn.Linear(width, out))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = Tower(40), Tower(24)
        self.log_scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, image, text):
        return self.image(image), self.text(text), self.log_scale.exp().clamp(max=100)


def clip_loss(a, b, scale):
    logits = scale * a @ b.T
    target = torch.arange(len(a))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


latent = torch.randn(1536, 8)
image = torch.tanh(latent @ torch.randn(8, 40)) + 0.1 * torch.randn(1536, 40)
text = torch.tanh(latent @ torch.randn(8, 24)) + 0.1 * torch.randn(1536, 24)
loader = DataLoader(TensorDataset(image, text), batch_size=64, shuffle=True)

model = TwoTowers()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
for epoch in range(2):
    for img, txt in loader:
        a, b, scale = model(img, txt)
        loss = clip_loss(a, b, scale)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    hit = (a @ b.T).argmax(1).eq(torch.arange(len(a))).float().mean().item()
    print(f"epoch {epoch} loss {loss.item():.3f} retrieval {hit:.2f}")
