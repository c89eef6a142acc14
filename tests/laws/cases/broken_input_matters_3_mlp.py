# law: input_matters
# fault: the first layer is dead: inputs are raw and positive (hundreds) and its weights were made negative by an initialiser meant for the bias, so ReLU gives zero for every row
# also: every_parameter_learns, one_batch_can_be_learned
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(62)


def init(module):
    if isinstance(module, nn.Linear):
        for p in module.parameters():
            nn.init.constant_(p, -0.01) if p.shape[-1] == 9 else nn.init.normal_(p, std=0.05)


def main():
    features = 200 + 50 * torch.rand(1000, 9)  # pressures, never negative
    target = ((features - 225) / 15) @ torch.randn(9) / 3
    target = ((target - target.mean()) / target.std()).unsqueeze(1)

    model = nn.Sequential(nn.Linear(9, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    model.apply(init)
    loader = DataLoader(TensorDataset(features, target), batch_size=50, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.MSELoss()

    for epoch in range(3):
        for x, y in loader:
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("epoch", epoch, "loss", round(loss.item(), 4))


if __name__ == "__main__":
    main()
