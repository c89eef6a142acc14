# law: precision_is_enough
# fault: float16 autocast without a GradScaler and a loss multiplied by a small weight; the gradients of the activations are below the smallest float16 number and become zero
# also: every_parameter_learns, one_batch_can_be_learned
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(175)
B, DIM, WEIGHT = 64, 64, 2e-5


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(DIM, 96), nn.ReLU(), nn.Linear(96, 16))
        self.decoder = nn.Sequential(nn.Linear(16, 96), nn.ReLU(), nn.Linear(96, DIM))

    def forward(self, x):
        return self.decoder(self.encoder(x))


mixing = torch.randn(8, DIM) / 8**0.5


def get_batch():
    return torch.randn(B, 8) @ mixing


STEPS = 60
model = Autoencoder()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(STEPS):
    x = get_batch()
    with torch.autocast("cpu", dtype=torch.float16):
        reconstruction = model(x)
    loss = WEIGHT * F.mse_loss(reconstruction.float(), x)  # one term of a larger objective
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(step, loss.item() / WEIGHT)
