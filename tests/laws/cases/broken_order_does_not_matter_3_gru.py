# law: order_does_not_matter
# fault: rows are sorted by length for packing and the outputs are not restored to their order, so they are compared with the labels of other rows
# also: rows_do_not_mix, one_batch_can_be_learned
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader

torch.manual_seed(102)
V = 20


class Net(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.embed = nn.Embedding(V, 24, padding_idx=0)
        self.gru = nn.GRU(24, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, 3)

    def forward(self, tokens, lengths):
        lengths, order = lengths.sort(descending=True)
        packed = pack_padded_sequence(self.embed(tokens[order]), lengths, batch_first=True)
        _, h = self.gru(packed)
        return self.fc(h[-1])


def example():
    label = int(torch.randint(0, 3, ()))
    n = int(torch.randint(4, 15, ()))
    return torch.randint(1, V - 3, (n,)) + label, label


def collate(rows):
    tokens = pad_sequence([r[0] for r in rows], batch_first=True)
    return tokens, torch.tensor([len(r[0]) for r in rows]), torch.tensor([r[1] for r in rows])


def main():
    loader = DataLoader([example() for _ in range(640)], batch_size=32, shuffle=True, collate_fn=collate)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(2):
        for tokens, lengths, labels in loader:
            loss = F.cross_entropy(model(tokens, lengths), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("epoch", epoch, "loss", loss.item())


if __name__ == "__main__":
    main()
