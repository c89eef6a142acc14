"""The detectors that come with loopscope, by subject; importing this package registers them."""

from . import (
    activations,
    data,
    gradients,
    initialisation,
    learning_rates,
    losses,
    modes,
    nonfinite,
    optimizers,
    outputs,
    parameters,
    policies,
    policy_losses,
    precision,
    speed,
)

__all__ = [
    "activations", "data", "gradients", "initialisation", "learning_rates", "losses", "modes", "nonfinite",
    "optimizers", "outputs", "parameters", "policies", "policy_losses",
    "precision", "speed",
]
