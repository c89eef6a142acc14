"""Steps that a loss scaler skips, whose gradients have overflowed in float16."""

from loopscope.hooks import RunDataContext
from loopscope.tensors import joint_norm, live_gradients


def is_overflowed(ctx: RunDataContext) -> bool:
    """Return whether the gradients of a step with a loss scale are not finite, so that the scaler skips the step.

    Without a loss scale no gradient is read: a NaN is then a result.
    """
    if ctx.loss_scale is None:
        return False
    gradients = live_gradients(ctx.model.parameters())
    return bool(gradients) and not bool(joint_norm(gradients).isfinite())
