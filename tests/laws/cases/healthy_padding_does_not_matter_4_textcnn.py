# law: none
# near: padding_does_not_matter
# fault: a convolution over time reads its neighbours, so the mask is applied again before every convolution and in the pooling; the pad positions always enter as zeros
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(58)
V, D, T, B, CLASSES = 36, 32, 18, 32, 3


class MaskedTextCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.conv1 = nn.Conv1d(D, 64, 3, padding=1)
        self.conv2 = nn.Conv1d(64, 64, 3, padding=1)
        self.fc = nn.Linear(64, CLASSES)

    def forward(self, tokens, mask):
        keep = mask.unsqueeze(1).float()
        x = self.embed(tokens).transpose(1, 2)
        x = F.relu(self.conv1(x * keep))
        x = F.relu(self.conv2(x * keep))
        x = x.masked_fill(keep == 0, float("-inf")).amax(dim=2)
        return self.fc(x)


kind = torch.randint(0, CLASSES, (V,))


def get_batch():
    length = torch.randint(5, T + 1, (B, 1))
    mask = torch.arange(T) < length
    tokens = torch.randint(1, V, (B, T))
    votes = (F.one_hot(kind[tokens], CLASSES) * mask.unsqueeze(-1)).sum(1)
    return tokens * mask, mask, votes.argmax(1)


def main():
    STEPS = 60
    model = MaskedTextCNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(STEPS):
        tokens, mask, label = get_batch()
        loss = F.cross_entropy(model(tokens, mask), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
