"""The hooks that come with loopscope; importing this package fills the registry."""

from training_hooks.counterfactual import CounterfactualHook
from training_hooks.fourier import FourierHook
from training_hooks.grad_clip import GradClipHook
from training_hooks.hessian import HessianHook
from training_hooks.norms import NormsHook
from training_hooks.training_metrics import TrainingMetricsHook

__all__ = [
    "CounterfactualHook",
    "FourierHook",
    "GradClipHook",
    "HessianHook",
    "NormsHook",
    "TrainingMetricsHook",
]
