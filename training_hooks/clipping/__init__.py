"""Hooks that clip gradients, and hooks about tied embeddings."""

from .embedding_provenance import EmbeddingProvenance
from .grad_clip import GradClip
from .output_projection_clip import ClipOptions, OutputProjectionClip, TiedGradientClipping

__all__ = ["ClipOptions", "EmbeddingProvenance", "GradClip", "OutputProjectionClip", "TiedGradientClipping"]
