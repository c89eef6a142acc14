# law: order_does_not_matter
# fault: rewards to go are accumulated along dimension 0, the parallel environments, instead of along time, so the return of a row contains the rewards of the rows after it
# also: halves_make_a_whole, rows_do_not_mix
import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(104)
ENVS, T, OBS, ACTIONS, GAMMA = 32, 10, 4, 3, 0.9
policy = nn.Sequential(nn.Linear(OBS, 48), nn.Tanh(), nn.Linear(48, ACTIONS))
optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
push = torch.randn(ACTIONS, OBS)


def rollout():
    state = torch.randn(ENVS, OBS)
    observations, actions, rewards = [], [], []
    with torch.no_grad():
        for _ in range(T):
            action = Categorical(logits=policy(state)).sample()
            observations.append(state)
            actions.append(action)
            state = 0.9 * state + 0.3 * push[action]
            rewards.append(-state.pow(2).mean(1))
    return torch.stack(observations, 1), torch.stack(actions, 1), torch.stack(rewards, 1)


def policy_loss(observation, action, reward):
    returns = torch.zeros_like(reward)
    running = torch.zeros(reward.size(1))
    for t in reversed(range(reward.size(0))):
        running = reward[t] + GAMMA * running
        returns[t] = running
    advantage = (returns - returns.mean()) / (returns.std() + 1e-8)
    log_prob = Categorical(logits=policy(observation)).log_prob(action)
    return -(advantage * log_prob).mean()


for iteration in range(25):
    observation, action, reward = rollout()
    loss = policy_loss(observation, action, reward)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if iteration % 5 == 0:
        print(f"iteration {iteration} reward {reward.mean().item():.3f}")
