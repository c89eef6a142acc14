# law: input_matters
# fault: images are uint8 and scaled by an integer division (// 255), which leaves zeros almost everywhere
# also: one_batch_can_be_learned, every_parameter_learns
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

rng = np.random.default_rng(60)
torch.manual_seed(60)


class Shapes(Dataset):
    def __init__(self, n):
        self.images = rng.integers(0, 60, (n, 12, 12), dtype=np.uint8)
        self.labels = rng.integers(0, 4, n)
        for image, label in zip(self.images, self.labels):
            r, c = rng.integers(0, 7, 2)
            size = 5
            if label in (0, 2):
                image[r : r + size, c + size // 2] += 180
            if label in (1, 2):
                image[r + size // 2, c : c + size] += 150 if label == 2 else 180
            if label == 3:
                image[np.arange(r, r + size), np.arange(c, c + size)] += 180
        self.images = np.minimum(self.images, 250)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = torch.from_numpy(self.images[i] // 255).float().unsqueeze(0)
        return image, int(self.labels[i])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 12, 3, padding=1), nn.Conv2d(12, 24, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(24 * 9, 64), nn.Linear(64, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


loader = DataLoader(Shapes(640), batch_size=32, shuffle=True)
net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for epoch in range(2):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.3f}")
