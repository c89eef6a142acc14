"""A decoder language model with tied embeddings."""
