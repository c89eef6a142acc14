"""Training with 4- to 8-bit floating-point numbers, simulated exactly: formats, scaling rules, casts, layers."""
