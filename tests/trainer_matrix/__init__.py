"""The matrix of trainers and loops: each trains a few steps bare and with hooks, and both have the same bytes.

``python -m tests.trainer_matrix`` (``make matrix``) trains every row and prints the table of
docs/data/trainer-matrix.txt.
The modules of the trainings import loopscope only through :mod:`tests.trainer_matrix.attaching`, so that a bare
training is one without it.
"""
