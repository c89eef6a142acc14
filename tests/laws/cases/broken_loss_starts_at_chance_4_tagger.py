# law: loss_starts_at_chance
# fault: log_softmax over dim=1, which is time and not the tags; the loss starts at the logarithm of the length
# also: one_batch_can_be_learned
import torch
from torch import nn

torch.manual_seed(113)
V, T, TAGS, B = 30, 25, 5, 24


class LSTMTagger(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.embedding = nn.Embedding(V, 32)
        self.lstm = nn.LSTM(32, hidden, batch_first=True)
        self.hidden2tag = nn.Linear(hidden, TAGS)

    def forward(self, sentence):
        out, _ = self.lstm(self.embedding(sentence))
        return torch.log_softmax(self.hidden2tag(out), dim=1)


rule = torch.randint(0, TAGS, (V, V))


def get_batch():
    words = torch.randint(0, V, (B, T + 1))
    return words[:, 1:], rule[words[:, :-1], words[:, 1:]]


STEPS = 60
model = LSTMTagger()
loss_function = nn.NLLLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(STEPS):
    sentence, tags = get_batch()
    scores = model(sentence)
    loss = loss_function(scores.reshape(-1, TAGS), tags.reshape(-1))
    model.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item())
