# law: padding_does_not_matter
# fault: the last output out[:, -1] of a padded batch is taken, which for short rows is the state after reading padding, not the state at lengths - 1
# also:
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

torch.manual_seed(52)
V, PAD = 26, 0


class ReviewNet(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.embedding = nn.Embedding(V, 32)
        self.lstm = nn.LSTM(32, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, text, lengths):
        out, _ = self.lstm(self.embedding(text))
        return self.fc(out[:, -1, :])


sentiment = torch.randn(V)
rows = []
for _ in range(800):
    tokens = torch.randint(1, V, (int(torch.randint(5, 20, ())),))
    rows.append((tokens, int(sentiment[tokens].sum() > 0)))


def collate(batch):
    text = pad_sequence([b[0] for b in batch], batch_first=True, padding_value=PAD)
    lengths = torch.tensor([len(b[0]) for b in batch])
    return text, lengths, torch.tensor([b[1] for b in batch])


def main():
    loader = DataLoader(rows, batch_size=40, shuffle=True, collate_fn=collate)
    model = ReviewNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(3):
        right = 0
        for text, lengths, label in loader:
            prediction = model(text, lengths)
            loss = criterion(prediction, label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += (prediction.argmax(1) == label).sum().item()
        print(f"epoch {epoch} loss {loss.item():.3f} accuracy {right / len(rows):.3f}")


if __name__ == "__main__":
    main()
