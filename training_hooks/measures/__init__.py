"""Mathematics that several rooms of hooks share."""

from .adaptive_clipping import AdaGC, Gammas, ZClip
from .attention_layers import AttentionLayer, HeadWeights, find_attention
from .attention_scores import AttentionCall, reading
from .blocks import Chain, find_chains
from .circuits import CircuitSpectrum, copying_score, output_value_spectrum, query_key_spectrum
from .concentration import entropy_of_shares, gini
from .conditions import Conditions
from .count_sketch import check_dimensions
from .critical_sharpness import critical_infos, gradient_metrics, update_metrics
from .embeddings import feed_forward_inputs, first_embedding, first_name, matrix_named, output_projection
from .entanglement import (
    Departure,
    Trail,
    approximation,
    curvature_along,
    entanglement_metrics,
    own_step_metrics,
    placed_like,
    preconditioned_curvature,
    solution_metrics,
)
from .flat_shards import FlatLayout, FlatMemory, FlatVector, laid_out_like, meshes_of, over_ranks
from .fourier_metrics import FOURIER_METRICS
from .gradient_history import GradientHistory, refuse_above, spectrum, width_of
from .lanczos import Density, Product, Tridiagonal, lanczos, mean_and_error, rademacher, residuals
from .measured_loss import MeasuredLoss, refuse_exact_under_fsdp, spread_batches
from .modular_addition import ablated_losses, rows_of_pairs, sampled_rows, token_pairs
from .output_projection import ClipOptions, OutputProjectionClipper, Scope, TiedGradientClipping
from .overflow_ledger import Ledger
from .overflow_readings import infos
from .overflow_report import Alarm, Values, summary, values_by_role, values_together
from .periodograms import data_stride, one_sided_power, power_of_columns, stride_harmonics
from .shadow_copies import ShadowCopies
from .smoothing import ModelSmoother, SmoothingConfig, blend_buffers, distance
from .spectra import effective_rank, leading_share, participation_ratio, stable_rank
from .stability import adam_preconditioner, stability_threshold
from .student_t import critical_value
from .tied_embeddings import EmbeddingPair, TiedGradients, all_sums
from .weight_averages import WeightAverage, averaged_state_dict
from .what_if import SUBJECTS, WhatIf, label

__all__ = [
    "FOURIER_METRICS",
    "SUBJECTS",
    "AdaGC",
    "Alarm",
    "AttentionCall",
    "AttentionLayer",
    "Chain",
    "CircuitSpectrum",
    "ClipOptions",
    "Conditions",
    "Density",
    "Departure",
    "EmbeddingPair",
    "FlatLayout",
    "FlatMemory",
    "FlatVector",
    "Gammas",
    "GradientHistory",
    "HeadWeights",
    "Ledger",
    "MeasuredLoss",
    "ModelSmoother",
    "OutputProjectionClipper",
    "Product",
    "Scope",
    "ShadowCopies",
    "SmoothingConfig",
    "TiedGradientClipping",
    "TiedGradients",
    "Trail",
    "Tridiagonal",
    "Values",
    "WeightAverage",
    "WhatIf",
    "ZClip",
    "ablated_losses",
    "adam_preconditioner",
    "all_sums",
    "approximation",
    "averaged_state_dict",
    "blend_buffers",
    "check_dimensions",
    "copying_score",
    "critical_infos",
    "critical_value",
    "curvature_along",
    "data_stride",
    "distance",
    "effective_rank",
    "entanglement_metrics",
    "entropy_of_shares",
    "feed_forward_inputs",
    "find_attention",
    "find_chains",
    "first_embedding",
    "first_name",
    "gini",
    "gradient_metrics",
    "infos",
    "label",
    "laid_out_like",
    "lanczos",
    "leading_share",
    "matrix_named",
    "mean_and_error",
    "meshes_of",
    "one_sided_power",
    "output_projection",
    "output_value_spectrum",
    "over_ranks",
    "own_step_metrics",
    "participation_ratio",
    "placed_like",
    "power_of_columns",
    "preconditioned_curvature",
    "query_key_spectrum",
    "rademacher",
    "reading",
    "refuse_above",
    "refuse_exact_under_fsdp",
    "residuals",
    "rows_of_pairs",
    "sampled_rows",
    "solution_metrics",
    "spectrum",
    "spread_batches",
    "stability_threshold",
    "stable_rank",
    "stride_harmonics",
    "summary",
    "token_pairs",
    "update_metrics",
    "values_by_role",
    "values_together",
    "width_of",
]
