# law: none
# near: input_matters
# fault: a warm-up of the learning rate makes the first 20 steps very small, so constant and true inputs are close together for a while
# also:
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(68)
V, T, CLASSES = 40, 12, 5


class BagOfTokens(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.embed = nn.Embedding(V, width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES))

    def forward(self, tokens):
        return self.mlp(self.embed(tokens).mean(1))


def main():
    group = torch.randint(0, CLASSES, (V,))
    tokens = torch.randint(0, V, (1600, T))
    labels = F.one_hot(group[tokens], CLASSES).sum(1).argmax(1)
    loader = DataLoader(TensorDataset(tokens, labels), batch_size=32, shuffle=True)

    model = BagOfTokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 40))
    for epoch in range(3):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            warmup.step()
        print(f"epoch {epoch} loss {loss.item():.3f} lr {warmup.get_last_lr()[0]:.4f}")


if __name__ == "__main__":
    main()
