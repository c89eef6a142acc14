"""The passes through the model that are running, which determine whether taps are called."""

import torch


class RunningPasses:
    """The running passes in which no tap is called: those of a hook, an evaluation or an optimizer's closure.

    As a context manager, which may be nested, it enters such a pass. It is entered at every hook call, where the cost
    of a generator-based context manager is noticeable.
    """

    def __init__(self, *, audit: bool) -> None:
        self.audit = audit
        """Whether taps are audited: every byte of their tensors is compared before and after each call."""
        # A list, whose changes are atomic: autograd has one thread per device, so with several devices functions of
        # taps may overlap and leave their contexts in another order than they entered them.
        self.others: list[None] = []
        self.have_called_taps = False
        """Whether a callback of a tap on a module was called yet in a pass of the training step."""

    def __enter__(self) -> None:
        self.others.append(None)

    def __exit__(self, *error: object) -> None:
        self.others.pop()


def is_training_use() -> bool:
    """Return whether a module that runs now is used by a forward pass whose result is trained.

    Passes without gradients are not, such as a validation that a script runs between two steps. Activation
    checkpointing runs modules twice: the second time is within a backward pass and is not a use. Its reentrant kind
    runs them the first time without gradients, in the ``forward`` of an ``autograd.Function``, and that is a use.
    """
    # Private: torch has no public functions for both (torch 2.9 to 2.15). -1 outside of backward passes.
    if torch._C._current_graph_task_id() != -1:
        return False
    if torch.is_grad_enabled():
        return True
    # An autograd.Function also disables forward-mode differentiation, which torch.no_grad leaves as it is.
    in_function = not torch._C._is_fwd_grad_enabled()
    return in_function and not torch.is_inference_mode_enabled()
