# law: future_is_not_seen
# fault: the temporal convolution pads both sides and cuts the surplus at the wrong end (out[..., pad:]), so position t reads the positions after it
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(33)
LEVELS, T, C, B = 16, 40, 32, 16


class CausalConv(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.pad = dilation
        self.conv = nn.Conv1d(C, 2 * C, 2, padding=self.pad, dilation=dilation)
        self.res = nn.Conv1d(C, C, 1)

    def forward(self, x):
        h = self.conv(x)[..., self.pad :]
        a, g = h.chunk(2, dim=1)
        return x + self.res(torch.tanh(a) * torch.sigmoid(g))


class WaveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(LEVELS, C)
        self.stack = nn.Sequential(*[CausalConv(2**i) for i in range(4)])
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(C, LEVELS, 1))

    def forward(self, samples):
        return self.head(self.stack(self.embed(samples).transpose(1, 2)))  # (batch, levels, time)


def get_batch():
    t = torch.arange(T + 1)
    wave = torch.sin(t * (0.2 + 0.6 * torch.rand(B, 1)) + 6.28 * torch.rand(B, 1))
    quantised = ((wave + 1) / 2 * (LEVELS - 1) + 0.5 * torch.rand(B, T + 1)).long().clamp(0, LEVELS - 1)
    return quantised[:, :-1], quantised[:, 1:]


def main():
    STEPS = 50
    model = WaveNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        x, y = get_batch()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"{step}: {loss.item():.3f}")


if __name__ == "__main__":
    main()
