"""A language model with tied embeddings."""

from .runner import TiedLMRunner
from .training import LanguageModelConfig, LanguageModelRunner

__all__ = ["LanguageModelConfig", "LanguageModelRunner", "TiedLMRunner"]
