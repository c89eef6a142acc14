"""The hooks that come with loopscope; importing this package fills the registry."""

from training_hooks.counterfactual import Counterfactual
from training_hooks.fourier import Fourier
from training_hooks.grad_clip import GradClip
from training_hooks.hessian import Hessian
from training_hooks.norms import Norms
from training_hooks.training_metrics import TrainingMetrics

__all__ = ["Counterfactual", "Fourier", "GradClip", "Hessian", "Norms", "TrainingMetrics"]
