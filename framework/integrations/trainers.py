"""Types of the Trainers that attach accepts, by a few of their methods: importing the libraries takes seconds."""

from typing import Any, Protocol


class HuggingFaceTrainer(Protocol):
    """A ``transformers.Trainer``."""

    def add_callback(self, callback: Any, /) -> Any:
        """Add a callback to the training."""

    def create_optimizer_and_scheduler(self, num_training_steps: int, /) -> Any:
        """Create the optimizer and the learning-rate scheduler."""


class LightningTrainer(Protocol):
    """A ``lightning.Trainer``."""

    def fit(self, model: Any, /) -> Any:
        """Train a module."""

    def save_checkpoint(self, filepath: Any, /) -> Any:
        """Save the training."""
