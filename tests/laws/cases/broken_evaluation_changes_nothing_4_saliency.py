# law: evaluation_changes_nothing
# fault: the evaluation calls backward to draw saliency maps, which adds to the gradients of the weights; zero_grad stands after the step, so the next update contains them
# also:
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(143)


class GRUNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(4, 32, batch_first=True)
        self.fc = nn.Linear(32, 3)

    def forward(self, x):
        return self.fc(self.gru(x)[0].mean(1))


def saliency(model, x, y):
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return x.grad.abs().mean((0, 2)), loss.item()


def main():
    y = torch.randint(0, 3, (720,))
    x = torch.randn(720, 12, 4)
    x[:, 5:8] += torch.randn(3, 4)[y].unsqueeze(1)
    train = DataLoader(TensorDataset(x[:640], y[:640]), batch_size=32, shuffle=True)
    model = GRUNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    step = 0
    for epoch in range(2):
        for xb, yb in train:
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 5 == 0:
                importance, value = saliency(model, x[640:], y[640:])
                print(step, round(value, 3), "most important time", importance.argmax().item())


if __name__ == "__main__":
    main()
