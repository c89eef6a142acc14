"""The description of the backward pass of one micro-batch."""

from typing import NamedTuple


class BackwardPass(NamedTuple):
    """The loss of one micro-batch as its autograd graph shows it, and the gradients from before its backward pass.

    A named tuple of plain values, so that no graph outlives the step. A graph that cannot be read, such as that of a
    loss within a compiled function, has empty or neutral values.
    """

    loss_operations: tuple[str, ...] = ()
    """Names of the autograd nodes from the loss towards the model, at most 12. Of a sum of terms, the first term that
    contains a known loss function is followed; the path ends at other nodes with several inputs."""
    reduction: str = ""
    """How the loss combines its elements: ``"mean"``, ``"sum"``, or empty if unknown."""
    divisor: float = 1.0
    """The number by which the reduced loss is divided, 1 without a division."""
    divisions: tuple[float, ...] = ()
    """The numbers by which the loss, or the followed term of it, is divided one after the other, outermost first."""
    weights: tuple[float, ...] = ()
    """The numbers by which it is multiplied, likewise."""
    is_divided_by_tensor: bool = False
    """Whether the loss is divided or multiplied by a tensor, such as a number of tokens; ``divisor`` leaves it out."""
    class_count: int = 0
    """Number of classes if the loss is a cross-entropy, else 0."""
    ignore_index: int = -100
    """The target that a cross-entropy leaves out, −100 by default."""
    ignored_fraction: float | None = None
    """Share of the targets of the cross-entropy that it leaves out; ``None`` if it is unknown, as on accelerators."""
    target_classes: int | None = None
    """Number of different targets of the cross-entropy among the others; ``None`` if it is unknown."""
    constant_loss: float | None = None
    """The mean loss of the best prediction that is the same for all rows: the entropy of the targets of a
    cross-entropy without class weights, or of each output of a binary one, the variance of each output's targets for
    ``mse_loss``, and the mean divergence of the targets from their mean for ``kl_div``; ``None`` if it is unknown, as
    with fewer than ten targets for each class."""
    term_loss: float | None = None
    """The mean of the same loss function for the outputs of the model, without the factors and other terms of the
    loss; known if ``constant_loss`` is."""
    output_variation: float | None = None
    """How much the outputs that the loss gets differ between the rows, relative to the targets: the information of
    rows in predicted classes over the entropy of the targets, of a divergence over their information, or the ratio of
    variances of outputs and targets."""
    target_count: int | None = None
    """Number of targets of the cross-entropy that it does not leave out; ``None`` if it is unknown."""
    first_targets: tuple[int, ...] = ()
    """The first targets of the cross-entropy, at most 64; empty if they are unknown."""
    target_quantiles: tuple[float, ...] = ()
    """The least target of a regression, its quantiles at 10 and 90 %, and the largest; of a binary
    cross-entropy only if some are outside of 0 to 1; empty if they are unknown."""
    nonfinite_targets: float | None = None
    """Share of the targets that are NaN or infinite, of a regression or a binary cross-entropy."""
    invalid_targets: float | None = None
    """Share of the targets of a binary cross-entropy outside of 0 to 1."""
    unreachable_fraction: float | None = None
    """Share of the targets of a regression outside of the range of the model's last activation, if that is bounded, by
    more than 5 % of their standard deviation."""
    target_sum: float | None = None
    """Mean over the rows of the sum of the targets of a divergence, or of a cross-entropy if these are numbers instead
    of classes."""
    is_doubly_normalised: bool = False
    """Whether a log-softmax is applied to probabilities of a softmax, or a BCE with logits to those of a sigmoid."""
    lacks_log_softmax: bool = False
    """Whether ``nll_loss``, ``ctc_loss`` or ``kl_div`` gets logits or probabilities instead of log-probabilities."""
    is_modified: bool = False
    """Whether a cross-entropy is one of several terms of the loss, or multiplies its logits by a number above 5, as
    losses with a margin do, so that it does not start near that of equal probabilities."""
    is_rectified: bool = False
    """Whether a ReLU is applied to the logits of the loss."""
    is_normalised_over_rows: bool = False
    """Whether the log-softmax of a cross-entropy runs over the rows of the batch instead of classes, or a softmax of
    the model over the rows of the loss."""
    is_broadcast: bool = False
    """Whether N outputs meet N targets in N × N pairs, as shapes (N, 1) and (N,) do."""
    has_terms: bool = False
    """Whether the loss function on the path is one of several terms of the loss."""
    reads_targets: bool = False
    """Whether an embedding of the model looks up the very targets of the cross-entropy, in their order."""
    compares_outputs: bool = False
    """Whether the logits of a cross-entropy are products of outputs with each other, as in contrastive losses, instead
    of products with the weights of classes."""
    cosine_scale: float | None = None
    """The factor of the logits of a cross-entropy if they are cosines, the products of vectors of length 1, times a
    constant; ``None`` for other logits, for a trained factor, and on accelerators."""
    normalises_inputs: bool = False
    """Whether the model normalises its inputs, or the output of its first layer."""
    attention_count: int = 0
    """Number of attention operations of the model over as many queries as keys that the graph shows."""
    look_ahead_count: int = 0
    """Number of those in which positions see later ones: without a mask, or with one of padding only."""
    is_float16: bool = False
    """Whether a tensor on the path is float16, as under autocast."""
    input_count: int = 0
    """Number of tensors that the first layer gets: several if the loss joins several passes of a model."""
    leftover_gradients: tuple[str, ...] = ()
    """Names of parameters with a non-zero gradient before the first backward pass of the step; of later micro-batches
    none."""
    accumulated_gradients: tuple[str, ...] = ()
    """Names of parameters with a non-zero gradient before the second backward pass of the step, which adds to it; of
    other micro-batches, and if parameters are sharded, none."""
