"""PPO on a task of balancing, with several epochs over each rollout: small networks and many steps."""

import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
both = nn.ModuleDict({"policy": policy, "critic": critic})
optimizer = torch.optim.Adam(both.parameters(), lr=3e-4)
MATRIX = torch.tensor([[1.0, 0.02, 0.0, 0.0], [0.0, 1.0, -0.01, 0.0], [0.0, 0.0, 1.0, 0.02], [0.0, 0.0, 0.3, 1.0]])
PUSH = torch.tensor([0.0, 0.2, 0.0, -0.3])


def rollout(steps=64, count=32):
    """Return observations, actions, their log-probabilities, and discounted rewards."""
    state, records = 0.05 * torch.randn(count, 4), []
    for _ in range(steps):
        with torch.no_grad():
            actions = Categorical(logits=policy(state))
            action = actions.sample()
        after = state @ MATRIX.T + torch.outer(2.0 * action - 1, PUSH) * 0.1
        reward = (after[:, 2].abs() < 0.2).float()
        records.append((state, action, actions.log_prob(action), reward))
        state = torch.where(reward[:, None] > 0, after, 0.05 * torch.randn(count, 4))
    states, actions, old, rewards = (torch.stack(items) for items in zip(*records, strict=True))
    returns, total = torch.empty_like(rewards), torch.zeros(count)
    for step in reversed(range(steps)):
        total = rewards[step] + 0.98 * total * rewards[step]
        returns[step] = total
    return states.flatten(0, 1), actions.flatten(), old.flatten(), returns.flatten()


for _ in range(30):
    states, actions, old, returns = rollout()
    for _ in range(8):
        for rows in torch.randperm(len(actions)).split(128):
            distribution, value = Categorical(logits=policy(states[rows])), critic(states[rows]).squeeze(1)
            advantage = returns[rows] - value.detach()
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            ratio = (distribution.log_prob(actions[rows]) - old[rows]).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            loss = 0.5 * (returns[rows] - value).square().mean() - gain - 0.01 * distribution.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(both.parameters(), 0.5)
            optimizer.step()
