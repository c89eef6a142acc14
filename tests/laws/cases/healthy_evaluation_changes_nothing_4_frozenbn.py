# law: none
# near: evaluation_changes_nothing
# fault: part of the model is in eval mode during training on purpose (frozen BatchNorm), and the evaluation puts every module back to the mode it had
# also:
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(148)

backbone = nn.Sequential(nn.Linear(14, 64), nn.BatchNorm1d(64), nn.ReLU())
head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.05), nn.Linear(64, 4))
nn.init.normal_(head[3].weight, std=0.02)
nn.init.zeros_(head[3].bias)
model = nn.Sequential(backbone, head)

x = torch.randn(1100, 14)
y = (x @ torch.randn(14, 4)).argmax(1)
with torch.no_grad():  # statistics from the data, then fixed
    backbone[1].running_mean.copy_(backbone[0](x).mean(0))
    backbone[1].running_var.copy_(backbone[0](x).var(0))


def train_mode():
    model.train()
    for module in backbone.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()


def evaluate(x, y):
    modes = {module: module.training for module in model.modules()}
    model.eval()
    with torch.inference_mode():
        value = F.cross_entropy(model(x), y).item()
    for module, mode in modes.items():
        module.training = mode
    return value


def main():
    train = DataLoader(TensorDataset(x[:960], y[:960]), batch_size=48, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train_mode()
    for epoch in range(3):
        for xb, yb in train:
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("epoch", epoch, "train", round(loss.item(), 3), "validation", round(evaluate(x[960:], y[960:]), 3))


if __name__ == "__main__":
    main()
