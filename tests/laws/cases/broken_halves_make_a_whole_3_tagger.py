# law: halves_make_a_whole
# fault: the summed token loss is divided by rows times the longest row of the batch, not by the number of valid tokens, so short rows count less in a batch with a long row
# also: loss_starts_at_chance
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

torch.manual_seed(84)
V, TAGS = 30, 4


class Tagger(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.embed = nn.Embedding(V, 32, padding_idx=0)
        self.rnn = nn.LSTM(32, hidden, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, TAGS)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.out(h)


rule = torch.randint(0, TAGS, (V,))


def example():
    tokens = torch.randint(1, V, (int(torch.randint(2, 20, ())),))
    return tokens, rule[tokens]


def collate(batch):
    lengths = torch.tensor([len(t) for t, _ in batch])
    return pad_sequence([t for t, _ in batch], True), lengths, pad_sequence([y for _, y in batch], True)


def main():
    loader = DataLoader([example() for _ in range(640)], batch_size=32, shuffle=True, collate_fn=collate)
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(2):
        for tokens, lengths, tags in loader:
            logits = model(tokens, lengths)
            mask = torch.arange(tokens.size(1)) < lengths[:, None]
            nll = F.cross_entropy(logits.transpose(1, 2), tags, reduction="none") * mask
            loss = nll.sum() / (len(tokens) * lengths.max())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
