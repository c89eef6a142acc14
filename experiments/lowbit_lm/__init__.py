"""A decoder language model trained with 4- and 8-bit numbers."""
