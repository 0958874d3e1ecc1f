"""stable-baselines3: SAC on Pendulum."""

from __future__ import annotations

from stable_baselines3 import SAC

model = SAC(
    "MlpPolicy",
    "Pendulum-v1",
    policy_kwargs={"net_arch": [64, 64]},
    batch_size=64,
    learning_starts=100,
    seed=0,
    device="cpu",
    verbose=1,
)
model.learn(total_timesteps=220, log_interval=1)
