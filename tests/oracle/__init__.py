"""The check that behaviour has not changed: ``make oracle`` compares what the code does with a stored record of it."""
