# law: input_matters
# fault: the collate function assigns to the loop variable (row = sequence) instead of writing into the padded array, so every batch is all zeros
# also: one_batch_can_be_learned, every_parameter_learns
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(63)
CLASSES, FEATURES = 4, 5


def collate(batch):
    length = max(len(s) for s, _ in batch)
    padded = torch.zeros(len(batch), length, FEATURES)
    for row, (sequence, _) in zip(padded, batch):
        row = torch.cat([sequence, torch.zeros(length - len(sequence), FEATURES)])
    labels = torch.tensor([label for _, label in batch])
    return padded, labels


def example():
    label = int(torch.randint(0, CLASSES, ()))
    t = torch.arange(int(torch.randint(10, 18, ()))).float()
    wave = torch.sin(t * (0.3 + 0.25 * label))[:, None]
    return wave + 0.2 * torch.randn(len(t), FEATURES), label


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(FEATURES, 48, batch_first=True)
        self.head = nn.Linear(48, CLASSES)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.head(out.mean(1))


data = [example() for _ in range(640)]
loader = DataLoader(data, batch_size=32, shuffle=True, collate_fn=collate)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(2):
    total = 0.0
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: {total / len(loader):.3f}")
