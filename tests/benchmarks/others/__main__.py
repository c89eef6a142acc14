"""Measurement of one framework in the current environment: ``python -m tests.benchmarks.others TITLE SHARE WHAT``."""

import sys

import torch

from tests.benchmarks.others.cost import side, written
from tests.benchmarks.others.extras import extras_of, written_rows
from tests.benchmarks.others.frameworks import FRAMEWORKS
from tests.benchmarks.rows import Effort

title, share, what = sys.argv[1:]
torch.set_num_threads(1)
framework, effort = next(candidate for candidate in FRAMEWORKS if candidate.title == title), Effort(float(share))
sys.stdout.write(written(side(framework, effort)) if what == "side" else written_rows(extras_of(framework, effort)))
