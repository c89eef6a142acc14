"""The detectors that come with loopscope, by subject."""

from .activations import ActivationsGrow, DeadUnits, MassiveActivations
from .data import InputsNotNormalised, OneClassBatches, PaddingInLoss, RowsRepeated, TargetsIgnored
from .gradients import ExplodingGradients, GradientJump, LeftoverGradients, VanishingGradients, WithoutGradient
from .initialisation import ConstantWeights, InitialScale, UntiedCopies
from .learning_rates import (
    CosineRises, LearningRateJump, LearningRateTooHigh, LearningRateTooLow, LearningRateZero, ScheduleEndsEarly,
    WarmUpMissing,
)
from .losses import (
    AccumulationNotAveraged, DoublyNormalised, InitialLossHigh, LossNotFalling, LossRising, LossSpike, LossSummed,
    NoBetterThanUniform, TargetsNotNormalised, TrainValidationDiverging, ValidationBetter,
)
from .modes import BatchNormFrozen, EvalModeInTraining, EvaluationInTrainMode
from .nonfinite import NonFinite, SkippedSteps
from .optimizers import ClippingTooStrong, EpsilonTooLarge, MomentumUnusual, WeightsShrink
from .parameters import DecayedVectors, FrozenInOptimizer, WithoutOptimizer
from .precision import Float16WithoutScaler, OptimizerWithoutEffect, RoundedUpdates

__all__ = [
    "AccumulationNotAveraged",
    "ActivationsGrow",
    "BatchNormFrozen",
    "ClippingTooStrong",
    "ConstantWeights",
    "CosineRises",
    "DeadUnits",
    "DecayedVectors",
    "DoublyNormalised",
    "EpsilonTooLarge",
    "EvalModeInTraining",
    "EvaluationInTrainMode",
    "ExplodingGradients",
    "Float16WithoutScaler",
    "FrozenInOptimizer",
    "GradientJump",
    "InitialLossHigh",
    "InitialScale",
    "InputsNotNormalised",
    "LearningRateJump",
    "LearningRateTooHigh",
    "LearningRateTooLow",
    "LearningRateZero",
    "LeftoverGradients",
    "LossNotFalling",
    "LossRising",
    "LossSpike",
    "LossSummed",
    "MassiveActivations",
    "MomentumUnusual",
    "NoBetterThanUniform",
    "NonFinite",
    "OneClassBatches",
    "OptimizerWithoutEffect",
    "PaddingInLoss",
    "RoundedUpdates",
    "RowsRepeated",
    "ScheduleEndsEarly",
    "SkippedSteps",
    "TargetsIgnored",
    "TargetsNotNormalised",
    "TrainValidationDiverging",
    "UntiedCopies",
    "ValidationBetter",
    "VanishingGradients",
    "WarmUpMissing",
    "WeightsShrink",
    "WithoutGradient",
    "WithoutOptimizer",
]
