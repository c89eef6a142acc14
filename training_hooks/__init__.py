"""The hooks that come with loopscope; importing this package fills the registry."""

from training_hooks.adam_dynamics import AdamDynamics
from training_hooks.attention import Attention
from training_hooks.batch_dynamics import BatchDynamics
from training_hooks.consecutive import Consecutive
from training_hooks.counterfactual import Counterfactual
from training_hooks.counterfactual_validator import CounterfactualValidator
from training_hooks.embedding_provenance import EmbeddingProvenance
from training_hooks.fourier import Fourier
from training_hooks.grad_clip import GradClip
from training_hooks.gradient_flow import GradientFlow
from training_hooks.gradient_noise_scale import GradientNoiseScale
from training_hooks.gradient_overflow import GradientOverflow
from training_hooks.gradient_projection import GradientProjection
from training_hooks.hessian import Hessian
from training_hooks.loss_spikes import LossSpikes
from training_hooks.lr_probe import LrProbe
from training_hooks.measures.output_projection import ClipOptions, TiedGradientClipping
from training_hooks.measures.smoothing import ModelSmoother, SmoothingConfig
from training_hooks.measures.update_monitor import WeightUpdateMonitor
from training_hooks.metis_split import MetisSplit
from training_hooks.model_smoothing import ModelSmoothing
from training_hooks.norms import Norms
from training_hooks.output_projection_clip import OutputProjectionClip
from training_hooks.parameter_delta import ParameterDelta
from training_hooks.path_length import PathLength
from training_hooks.phases import Phases
from training_hooks.range_penalty import RangePenaltyReport
from training_hooks.sharpness import Sharpness
from training_hooks.subspace_gradient_info import SubspaceGradientInfo
from training_hooks.token_gradient import TokenGradient
from training_hooks.training_diagnostics import TrainingDiagnostics
from training_hooks.training_metrics import TrainingMetrics
from training_hooks.variance import Variance
from training_hooks.weight_average import WeightAverage
from training_hooks.weight_tracking import WeightTracking
from training_hooks.weight_updates import WeightUpdates

__all__ = [
    "AdamDynamics",
    "Attention",
    "BatchDynamics",
    "ClipOptions",
    "Consecutive",
    "Counterfactual",
    "CounterfactualValidator",
    "EmbeddingProvenance",
    "Fourier",
    "GradClip",
    "GradientFlow",
    "GradientNoiseScale",
    "GradientOverflow",
    "GradientProjection",
    "Hessian",
    "LossSpikes",
    "LrProbe",
    "MetisSplit",
    "ModelSmoother",
    "ModelSmoothing",
    "Norms",
    "OutputProjectionClip",
    "ParameterDelta",
    "PathLength",
    "Phases",
    "RangePenaltyReport",
    "Sharpness",
    "SmoothingConfig",
    "SubspaceGradientInfo",
    "TiedGradientClipping",
    "TokenGradient",
    "TrainingDiagnostics",
    "TrainingMetrics",
    "Variance",
    "WeightAverage",
    "WeightTracking",
    "WeightUpdateMonitor",
    "WeightUpdates",
]
