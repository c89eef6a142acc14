"""Detectors of weights that are unsuitable before the first step, from the start-up facts."""

from collections.abc import Iterable

from .. import Evidence, Finding, History, Threshold
from ..detector import HooklessDetector
from .parameters import named_fact

EXTREME = 8.0
"""Median scale that is a mistake even if the loss falls: N(0, 1) for layers with more than 64 inputs."""


class InitialScale(HooklessDetector):
    """Finds linear and convolutional layers whose weights are far too large or too small.

    Symptom: The first loss is huge, or nothing is learned

    The weights have another scale than activations need: a standard deviation of about 1/√fan_in keeps their size.
    Use torch.nn.init.kaiming_normal_ or the defaults of torch.nn.

    Applies to: linear and convolutional layers, before the first step

    Source: He et al., arXiv 1502.01852; Glorot and Bengio 2010
    """

    name = "initial-weights-scale"
    large = Threshold(4.0, "in units of 1/√fan_in: the default has 0.58, He's initialisation 1.41")
    small = Threshold(0.03, "20 times below the default; GPT-2's 0.02 has 0.16 at 64 inputs, more for wider layers")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the median layer is out of range, and the training suffers."""
        scales = history.facts.get("weight_scales") or {}
        if scales.get("count", 0) < 2:
            return
        median, largest, smallest = scales["median"], scales["largest"], scales["smallest"]
        if median > self.large:
            suffers = _suffers_from_large(history)
            yield self.finding(
                "warning" if suffers else "info",
                0,
                f"The weights are initialised too large: the median layer has {median:.1f} times 1/√fan_in, "
                f"{largest[0]} {largest[1]:.1f} times, so that activations grow from layer to layer.",
                "Use torch.nn.init.kaiming_normal_(weight), or remove the custom initialisation.",
                Evidence("facts/weight_scales", median, self.large, "0.5 to 1.5 times 1/√fan_in"),
                confidence=0.9 if suffers else 0.5,
            )
        elif median < self.small:
            why = (
                f"The weights are initialised too small: the median layer has {median:.2g} times 1/√fan_in, "
                f"{smallest[0]} {smallest[1]:.2g} times, so that signals and gradients vanish."
            )
            remedy = "Use torch.nn.init.kaiming_normal_(weight), or remove the custom initialisation."
            evidence = Evidence("facts/weight_scales", median, self.small, "0.5 to 1.5 times 1/√fan_in")
            yield self.finding("warning", 0, why, remedy, evidence, confidence=0.9 if history.falls_short(0.3) else 0.7)


def _suffers_from_large(history: History) -> bool:
    """Return whether the first loss is far too high, or the loss does not fall."""
    uniform, first = history.uniform_loss, history.loss.first
    scale = history.facts["weight_scales"]["median"]
    return first > 2 * uniform or history.falls_short(0.1) or history.step < 5 or first > 100 or scale > EXTREME


class ConstantWeights(HooklessDetector):
    """Finds matrices whose elements are all equal, so that units cannot become different.

    Symptom: All units of a layer do the same

    All elements of weight matrices are equal, so all units of a layer get the same gradient and stay equal.
    Initialise them at random; only the last layer of a block may start at 0.

    Applies to: before the first step

    Source: Goodfellow et al., Deep Learning, section 8.4: break symmetry
    """

    name = "constant-initial-weights"
    share = Threshold(0.5, "half of the matrices; a single one may be meant")
    zeros = Threshold(0.8, "of the matrices if all are zeros; in LoRA and zero-initialised blocks it is half")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if many matrices are constant."""
        count, names = named_fact(history, "constant_matrices")
        matrices = history.facts.get("matrices", 0)
        # Zeros at the end of a block are usual, as in LoRA; other constants and a network of zeros are not.
        share = self.zeros if count == history.facts.get("zero_matrices", 0) else self.share
        # A model with one matrix, such as a logistic regression, has no hidden units that must differ.
        if matrices < 2 or not count or count < share * matrices:
            return
        why = (
            f"All elements are equal in {count} of {matrices} weight matrices ({names}), so that the units of these "
            "layers stay equal or get no gradient."
        )
        remedy = "Initialise them at random: torch.nn.init.kaiming_normal_(weight)."
        evidence = Evidence("facts/constant_matrices", count, self.share * matrices, "0")
        yield self.finding("critical", 0, why, remedy, evidence)


class UntiedCopies(HooklessDetector):
    """Finds an embedding and an output projection that start equal but are separate parameters.

    Symptom: Tied embeddings become different

    Embedding and output projection have equal values but are two parameters: a deepcopy, a state dict or a
    re-created layer has untied them. Assign one to the other: head.weight = embedding.weight.

    Applies to: before the first step

    Source: Press and Wolf, arXiv 1608.05859
    """

    name = "embeddings-not-tied"
    stage = "evaluation"

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding for the first pair."""
        pairs = history.facts.get("untied_copies") or []
        if pairs:
            first, second = pairs[0]
            why = (
                f"{first} and {second} have equal initial values but are separate parameters, so they will become "
                "different: they were meant to be tied."
            )
            remedy = f"Assign the parameter itself after any copy: model.{second} = model.{first}."
            evidence = Evidence("facts/untied_copies", len(pairs), 0, "0")
            yield self.finding("warning", 0, why, remedy, evidence, confidence=0.85)
