"""Run ``loopscope`` with the arguments given up to the end of its first step; write the seconds it took, and leave.

Without arguments the same for a bare program, which makes a model and takes a step with AdamW.
"""

import os
import sys
import time
from typing import Any


def leave(*step: Any) -> None:
    """Write the process's CPU time since its start, including the interpreter's start."""
    os.write(sys.__stdout__.fileno(), b"\n%f\n" % time.process_time())
    os._exit(0)


def bare() -> None:
    """Take a step."""
    import torch

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2)).sum().backward()
    optimizer.step()


def loopscope() -> None:
    """Run the command."""
    from loopscope.__main__ import main

    main()


if __name__ == "__main__":
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(leave)
    loopscope() if sys.argv[1:] else bare()
