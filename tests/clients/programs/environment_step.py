"""A policy that learns in an environment in pure Python: the environment takes most of the time."""

from __future__ import annotations

import torch
from stopwatch import Stopwatch
from torch import nn

WIDTH = 32


class Maze:
    """A grid whose walls move; an observation holds the distance to the goal from each cell."""

    def __init__(self):
        self.time, self.cell, self.goal = 0, (0, 0), (WIDTH - 1, WIDTH - 1)

    def is_free(self, x, y):
        return 0 <= x < WIDTH and 0 <= y < WIDTH and (x * 7 + y * 13 + self.time) % 11 != 0

    def distances(self):
        frontier, distance = [self.goal], {self.goal: 0}
        while frontier:
            x, y = frontier.pop(0)
            for near in ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)):
                if near not in distance and self.is_free(*near):
                    distance[near] = distance[(x, y)] + 1
                    frontier.append(near)
        return distance

    def step(self, action):
        self.time += 1
        x, y = self.cell
        dx, dy = ((1, 0), (-1, 0), (0, 1), (0, -1))[action]
        if self.is_free(x + dx, y + dy):
            self.cell = (x + dx, y + dy)
        distance = self.distances()
        cells = [distance.get((i, j), WIDTH * WIDTH) for i in range(WIDTH) for j in range(WIDTH)]
        return torch.tensor(cells) / WIDTH, -distance.get(self.cell, WIDTH * WIDTH) / WIDTH


torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(WIDTH * WIDTH, 64), nn.Tanh(), nn.Linear(64, 4))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
environment, watch = Maze(), Stopwatch()
observation, _ = environment.step(0)
for step in range(60):
    chosen, rewards = [], []
    for _ in range(24):
        actions = torch.distributions.Categorical(logits=policy(observation))
        action = actions.sample()
        chosen.append(actions.log_prob(action))
        with watch:
            observation, reward = environment.step(action.item())
        rewards.append(reward)
    advantage = torch.tensor(rewards) - sum(rewards) / len(rewards)
    loss = -(torch.stack(chosen) * advantage).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.lap()
    print(f"step {step} loss {loss.item():.6f}")
watch.report()
