"""Keras on its torch backend: compile and fit, with validation data."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
inputs = rng.standard_normal((1280, 256)).astype("float32")
targets = rng.integers(0, 10, 1280)
model = keras.Sequential(
    [
        keras.layers.Input((256,)),
        keras.layers.Dense(256, activation="relu"),
        keras.layers.Dense(256, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
model.fit(
    inputs,
    targets,
    batch_size=64,
    epochs=3,
    verbose=2,
    validation_data=(inputs[:320], targets[:320]),
)
