# law: none
# near: checkpoint_is_complete
# fault: the averaged model is a second module that is saved in addition to the first; the outputs of the trained model do not depend on it
# also:
import io

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(159)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(1, 24, 5, padding=2), nn.GroupNorm(4, 24), nn.ReLU(), nn.MaxPool1d(2))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(24 * 12, 64), nn.ReLU(), nn.Linear(64, 3))
        nn.init.normal_(self.head[3].weight, std=0.02)
        nn.init.zeros_(self.head[3].bias)

    def forward(self, x):
        return self.head(self.features(x))


def main():
    y = torch.randint(0, 3, (960,))
    x = 0.5 * torch.randn(960, 1, 24)
    for i, k in enumerate(y.tolist()):
        x[i, 0, 8 * k : 8 * k + 8] += torch.sin(torch.arange(8.0))
    loader = DataLoader(TensorDataset(x, y), batch_size=48, shuffle=True)
    model = Net()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(2):
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            averaged.update_parameters(model)
        with torch.no_grad():
            accuracy = (averaged(x[:200]).argmax(1) == y[:200]).float().mean().item()
        torch.save({"model": model.state_dict(), "ema": averaged.state_dict()}, io.BytesIO())
        print(f"epoch {epoch} loss {loss.item():.3f} accuracy of the average {accuracy:.3f}")


if __name__ == "__main__":
    main()
