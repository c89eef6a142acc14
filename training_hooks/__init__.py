"""The hooks that come with loopscope; importing this package fills the registry."""

from .activations import Activations, FirstNonfinite
from .averaging import ModelSmoother, ModelSmoothing, SmoothingConfig, WeightAverage
from .checks import TrainingChecks
from .circuits import Attention, AttentionLogits, Fourier, QKClip, TokenGradient
from .clipping import ClipOptions, EmbeddingProvenance, GradClip, OutputProjectionClip, TiedGradientClipping
from .counterfactual import Counterfactual, CounterfactualValidator
from .curvature import Hessian, LrProbe, Sharpness
from .experts import MoeRouter
from .laboratory import HypothesisTest, StepHistory, WhatIf
from .gradients import (
    BatchDynamics,
    Consecutive,
    GradientFlow,
    GradientNoiseScale,
    GradientProjection,
    Norms,
    SubspaceGradientInfo,
    Variance,
)
from .lowbit import GradientOverflow, MetisSplit, RangePenaltyReport
from .outputs import OutputLogits, TokenLoss
from .policies import PolicyHealth
from .progress import LossSpikes, Phases, TrainingDiagnostics, TrainingMetrics
from .updates import (
    AdamDynamics,
    MatrixUpdates,
    OptimizerHealth,
    ParameterDelta,
    ParameterNorms,
    PathLength,
    WeightTracking,
    WeightUpdateMonitor,
    WeightUpdates,
)

__all__ = [
    "Activations",
    "AdamDynamics",
    "Attention",
    "AttentionLogits",
    "BatchDynamics",
    "ClipOptions",
    "Consecutive",
    "Counterfactual",
    "CounterfactualValidator",
    "EmbeddingProvenance",
    "FirstNonfinite",
    "Fourier",
    "GradClip",
    "GradientFlow",
    "GradientNoiseScale",
    "GradientOverflow",
    "GradientProjection",
    "Hessian",
    "HypothesisTest",
    "LossSpikes",
    "LrProbe",
    "MatrixUpdates",
    "MetisSplit",
    "ModelSmoother",
    "ModelSmoothing",
    "MoeRouter",
    "Norms",
    "OptimizerHealth",
    "OutputLogits",
    "OutputProjectionClip",
    "ParameterDelta",
    "ParameterNorms",
    "PathLength",
    "Phases",
    "PolicyHealth",
    "QKClip",
    "RangePenaltyReport",
    "Sharpness",
    "SmoothingConfig",
    "StepHistory",
    "SubspaceGradientInfo",
    "TiedGradientClipping",
    "TokenGradient",
    "TokenLoss",
    "TrainingChecks",
    "TrainingDiagnostics",
    "TrainingMetrics",
    "Variance",
    "WeightAverage",
    "WeightTracking",
    "WeightUpdateMonitor",
    "WeightUpdates",
    "WhatIf",
]
