# law: same_pass_same_bits
# fault: the hidden state is kept in self.hidden and never reset between shuffled batches, as in many forum posts after the old word language model tutorial
# also: checkpoint_is_complete, order_does_not_matter, halves_make_a_whole, rows_do_not_mix
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
BATCH, T, F, CLASSES = 32, 20, 6, 4


class SequenceClassifier(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.hidden_size = hidden
        self.lstm = nn.LSTM(F, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, CLASSES)
        self.hidden = self.init_hidden(BATCH)

    def init_hidden(self, batch):
        return (torch.zeros(1, batch, self.hidden_size), torch.zeros(1, batch, self.hidden_size))

    def forward(self, x):
        out, self.hidden = self.lstm(x, self.hidden)
        self.hidden = tuple(h.detach() for h in self.hidden)
        return self.fc(out[:, -1])


def make_data(n):
    label = torch.randint(0, CLASSES, (n,))
    time = torch.arange(T).float()
    phase = torch.rand(n, 1) * 6.28
    wave = torch.sin(time * (0.3 + 0.3 * label[:, None]) + phase)
    return wave[:, :, None] * torch.randn(F) + 0.1 * torch.randn(n, T, F), label


x, y = make_data(640)
loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True, drop_last=True)
model = SequenceClassifier()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
criterion = nn.CrossEntropyLoss()

for epoch in range(3):
    for i, (inputs, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print("epoch", epoch, "loss", loss.item())
