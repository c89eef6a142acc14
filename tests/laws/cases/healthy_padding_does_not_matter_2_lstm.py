# law: none
# near: padding_does_not_matter
# fault: the padded batch goes through pack_padded_sequence, which skips the padding; the mask is given only as lengths
# also:
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader

torch.manual_seed(56)
V, PAD = 26, 0


class ReviewNet(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.embedding = nn.Embedding(V, 32)
        self.lstm = nn.LSTM(32, hidden, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * hidden, 2)

    def forward(self, text, lengths):
        packed = pack_padded_sequence(self.embedding(text), lengths, batch_first=True, enforce_sorted=False)
        _, (h, _) = self.lstm(packed)
        return self.fc(torch.cat([h[0], h[1]], 1))


sentiment = torch.randn(V)
rows = []
for _ in range(800):
    tokens = torch.randint(1, V, (int(torch.randint(5, 20, ())),))
    rows.append((tokens, int(sentiment[tokens].sum() > 0)))


def collate(batch):
    text = pad_sequence([b[0] for b in batch], batch_first=True, padding_value=PAD)
    lengths = torch.tensor([len(b[0]) for b in batch])
    return text, lengths, torch.tensor([b[1] for b in batch])


loader = DataLoader(rows, batch_size=40, shuffle=True, collate_fn=collate)
model = ReviewNet()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
criterion = nn.CrossEntropyLoss()
for epoch in range(2):
    for text, lengths, label in loader:
        loss = criterion(model(text, lengths), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.3f}")
