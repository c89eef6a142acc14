"""Recognition of the uses of modules that belong to the forward pass of the training step."""

import torch


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
