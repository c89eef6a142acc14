"""Behaviour check: ``make oracle`` compares the behaviour of the code with a stored record."""
