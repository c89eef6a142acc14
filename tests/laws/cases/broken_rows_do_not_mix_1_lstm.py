# law: rows_do_not_mix
# fault: nn.LSTM is left at batch_first=False but gets a batch of shape (batch, time, features), so it runs along the batch; the shapes fit and nothing complains
# also: order_does_not_matter, halves_make_a_whole
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(20)
T, F, CLASSES = 16, 8, 5


class ActivityNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(input_size=F, hidden_size=64, num_layers=2)
        self.classifier = nn.Linear(64, CLASSES)

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.classifier(out[:, -1, :])


label = torch.randint(0, CLASSES, (960,))
direction = torch.randn(CLASSES, F)
drift = torch.linspace(0, 1, T)[None, :, None]
signal = drift * direction[label][:, None, :] + 0.3 * torch.randn(960, T, F)
loader = DataLoader(TensorDataset(signal, label), batch_size=48, shuffle=True)

model = ActivityNet()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
criterion = nn.CrossEntropyLoss()

for epoch in range(3):
    correct = 0
    for x, y in loader:
        logits = model(x)
        loss = criterion(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        correct += (logits.argmax(1) == y).sum().item()
    print(f"epoch {epoch}  loss {loss.item():.3f}  accuracy {correct / 960:.3f}")
