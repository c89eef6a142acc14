"""Measures one framework in the environment that runs this: ``python -m tests.benchmarks.others TITLE SHARE``."""

import sys

import torch

from tests.benchmarks.others.cost import side, written
from tests.benchmarks.others.frameworks import FRAMEWORKS
from tests.benchmarks.rows import Effort

title, share = sys.argv[1:]
torch.set_num_threads(1)
row = side(next(each for each in FRAMEWORKS if each.title == title), Effort(float(share)))
sys.stdout.write(written(row))
