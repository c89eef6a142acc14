# law: none
# near: order_does_not_matter
# fault: the hard examples of a batch are chosen by topk over the losses; a permuted batch chooses the same ones, though it returns them in the same sorted order by loss
# also: halves_make_a_whole
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(108)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 4))
        nn.init.normal_(self.net[4].weight, std=0.02)
        nn.init.zeros_(self.net[4].bias)

    def forward(self, x):
        return self.net(x)


def hard_example_loss(logits, target, keep=0.75):
    losses = F.cross_entropy(logits, target, reduction="none")
    hardest = losses.topk(int(keep * len(losses))).values
    return hardest.mean()


def main():
    centers = torch.randn(8, 10)
    which = torch.randint(0, 8, (1600,))
    x, y = centers[which] + 0.4 * torch.randn(1600, 10), which % 4
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    model = Head()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(2):
        for xb, yb in loader:
            loss = hard_example_loss(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("epoch", epoch, "loss", loss.item())


if __name__ == "__main__":
    main()
