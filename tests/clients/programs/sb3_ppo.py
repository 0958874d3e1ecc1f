"""stable-baselines3: PPO, whose rollouts take more time than its updates."""

from __future__ import annotations

from stable_baselines3 import PPO

model = PPO(
    "MlpPolicy", "CartPole-v1", n_steps=512, batch_size=64, n_epochs=4, seed=0, device="cpu",
    verbose=1,
)  # fmt: skip
model.learn(total_timesteps=1536)
