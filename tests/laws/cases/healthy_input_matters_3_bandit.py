# law: none
# near: input_matters
# fault: in a policy gradient the loss is advantage times log-probability of the sampled action; its value hovers around zero and says little, yet the observation decides the action
# also:
import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(67)
OBS, ACTIONS, B = 8, 4, 256

policy = nn.Sequential(nn.Linear(OBS, 64), nn.Tanh(), nn.Linear(64, ACTIONS))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
best = torch.randn(OBS, ACTIONS)


def play(observation, action):
    return ((observation @ best).argmax(1) == action).float()


baseline = 1 / ACTIONS
for step in range(60):
    observation = torch.randn(B, OBS)
    with torch.no_grad():
        action = Categorical(logits=policy(observation)).sample()
    reward = play(observation, action)
    advantage = reward - baseline
    baseline = 0.9 * baseline + 0.1 * reward.mean().item()

    log_prob = Categorical(logits=policy(observation)).log_prob(action)
    loss = -(advantage * log_prob).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(f"step {step} reward {reward.mean().item():.3f} loss {loss.item():.4f}")
