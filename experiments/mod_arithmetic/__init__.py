"""(a + b) mod p: how the order of the data shapes what a transformer learns."""
