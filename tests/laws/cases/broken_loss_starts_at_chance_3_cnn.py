# law: loss_starts_at_chance
# fault: pixels enter as 0 to 255 without scaling and there is no normalisation layer, so the first logits are huge
# also:
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

rng = np.random.default_rng(112)
torch.manual_seed(112)

labels = rng.integers(0, 5, 640)
images = rng.integers(0, 80, (640, 12, 12)).astype(np.uint8)
for image, label in zip(images, labels):
    image[2 * label : 2 * label + 3] += 150  # a bright band at a height given by the class
x = torch.from_numpy(images).float().unsqueeze(1)
y = torch.from_numpy(labels)


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(16 * 9, 64), nn.Linear(64, 5)
        for layer in (self.conv1, self.conv2, self.fc1):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def main():
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    net = LeNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(2):
        for xb, yb in loader:
            loss = F.cross_entropy(net(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
