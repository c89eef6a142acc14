"""A language model with tied embeddings."""

from .runner import TiedLMRunner
from .training import QUICK, LanguageModelConfig, LanguageModelRunner

__all__ = ["QUICK", "LanguageModelConfig", "LanguageModelRunner", "TiedLMRunner"]
