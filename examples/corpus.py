"""The text that the examples train on: the source of Python's own standard library, as bytes."""

import sysconfig
from pathlib import Path

import numpy as np

VOCABULARY = 256
HELD_OUT_EVERY = 10


def load() -> tuple[np.ndarray, np.ndarray]:
    """Reads the top-level modules of the standard library in name order; every tenth is held out.

    Returns:
      (training, held-out) text, each u8[bytes].
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if len(files) < 2 * HELD_OUT_EVERY:
        raise FileNotFoundError(
            f"only {len(files)} modules in {sysconfig.get_path('stdlib')}: this Python comes "
            "without the source of its library; use another Python"
        )
    texts = [np.frombuffer(file.read_bytes(), np.uint8) for file in files]
    held_out = texts[::HELD_OUT_EVERY]
    training = [text for i, text in enumerate(texts) if i % HELD_OUT_EVERY]
    return np.concatenate(training), np.concatenate(held_out)


def windows(text: np.ndarray, count: int, batch: int, length: int, seed: int) -> np.ndarray:
    """Draws i32[count, batch, length + 1] windows: the same ones for the same seed."""
    starts = np.random.default_rng(seed).integers(0, text.size - length, (count, batch, 1))
    return text[starts + np.arange(length + 1)].astype(np.int32)
