# law: precision_is_enough
# fault: hours of the year are cast to the model's bfloat16 before sine and cosine are taken; above 256 they are rounded to whole multiples of 2 to 32 hours and the daily cycle is lost, like positions in bfloat16
# also: one_batch_can_be_learned
import torch
from torch import nn

torch.manual_seed(171)
B = 96


class LoadModel(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(7, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, hour, temperature):
        hour = hour.to(self.fc1.weight.dtype)
        temperature = temperature.to(self.fc1.weight.dtype)
        periods = torch.tensor([24.0, 12.0, 8760.0], dtype=hour.dtype)
        angle = 6.283185 * (hour.unsqueeze(1) / periods)
        x = torch.cat([angle.sin(), angle.cos(), temperature.unsqueeze(1)], 1)
        h = torch.nn.functional.silu(self.fc1(x))
        return self.fc3(torch.nn.functional.silu(self.fc2(h))).squeeze(1)


def get_batch():
    hour = torch.randint(0, 8760, (B,))
    day = 6.283185 * (hour % 24) / 24
    temperature = torch.randn(B)
    load = 1.2 * torch.sin(day) + 0.6 * torch.cos(2 * day) - 0.3 * temperature
    return hour, temperature, load


STEPS = 80
model = LoadModel().bfloat16()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
for step in range(STEPS):
    hour, temperature, load = get_batch()
    prediction = model(hour, temperature)
    loss = nn.functional.mse_loss(prediction.float(), load)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item())
