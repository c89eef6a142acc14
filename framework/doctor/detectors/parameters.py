"""Detectors of parameters that the training cannot change as intended, from the start-up facts."""

from collections.abc import Iterable

from ...errors import counted, listed
from .. import Evidence, Finding, History, Threshold
from ..detector import HooklessDetector
from ..measures import CHECKS


def named(names: list[str], count: int) -> str:
    """Return the first of the known names with the number of further ones."""
    return f"{', '.join(names[:3])} and {count - 3} more" if count > 3 and len(names) >= 3 else listed(names, 3)


def named_fact(history: History, name: str) -> tuple[int, str]:
    """Return the number of names in a start-up fact, and the names in words; 0 if the fact is unknown."""
    fact = history.facts.get(name) or {}
    return fact.get("count") or 0, named(fact.get("names", []), fact.get("count") or 0)


class WithoutOptimizer(HooklessDetector):
    """Finds trainable parameters that no optimizer holds.

    Symptom: Some layers never change

    Trainable parameters are in no optimizer: it was created before a layer was added, replaced or resized, or for a
    part of the model only. Create the optimizer last, from all parameters, or set requires_grad to False.

    Source: start-up facts
    """

    name = "parameters-without-optimizer"
    law = "every_parameter_learns"

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the optimizers miss trainable parameters."""
        count, names = named_fact(history, "without_optimizer")
        missing = history.facts.get("without_optimizer", {})
        # Target networks and averages are copies at first, get no gradient, and are changed by the script.
        are_copies = missing.get("copies") == count and not history.last(f"{CHECKS}/outside_gradient_count") > 0
        if not count or are_copies or history.last(f"{CHECKS}/outside_moved_count") >= count:
            return
        reason = ""
        if foreign := history.facts.get("foreign_in_optimizer", 0):
            reason = (
                f", while it holds {foreign} tensors that are not in the model: it was created before the model was "
                "changed, copied or moved"
            )
        yield self.finding(
            "critical" if missing["share"] > 0.5 else "warning",
            0,
            f"{count} of {history.facts['trainable']} trainable parameters are in no optimizer and keep their initial "
            f"values ({names}){reason}.",
            "Create the optimizer after the model is complete, from model.parameters(), or freeze these parameters "
            "with requires_grad_(False). If another optimizer trains them, give attach all optimizers in a list.",
            Evidence("facts/without_optimizer", count, 0, "0"),
            confidence=0.95,
        )


class LayersNotRegistered(HooklessDetector):
    """Finds layers in Python lists, tuples or dicts, and tensors that are not parameters.

    Symptom: Some layers never change

    Layers in a Python list, tuple or dict, and tensors with requires_grad that are not an nn.Parameter, are not in
    model.parameters(): they are not trained, saved or moved. Use nn.ModuleList, nn.ModuleDict or nn.Parameter.

    Source: torch.nn.ModuleList: modules it contains are properly registered
    """

    name = "layers-not-registered"
    law = "every_parameter_learns"

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if attributes of the model hold unregistered parameters that no optimizer trains."""
        count, names = named_fact(history, "unregistered")
        if count:
            unregistered = history.facts["unregistered"]
            yield self.finding(
                "critical" if unregistered["share"] > 0.5 else "warning",
                0,
                f"{unregistered['elements']:,} weights are in attributes of the model that do not register them "
                f"({names}), so that they are not in model.parameters() and keep their initial values.",
                "Use nn.ModuleList or nn.ModuleDict instead of a list or dict of layers, and nn.Parameter for tensors, "
                "before the optimizer is created.",
                Evidence("facts/unregistered", count, 0, "0"),
            )


class FrozenInOptimizer(HooklessDetector):
    """Finds optimizer entries that do not require a gradient.

    Symptom: Some layers never change

    The optimizer holds parameters with requires_grad=False. This is usual when a script freezes a base model and
    passes model.parameters(); it is a mistake if these layers should be trained.

    Source: start-up facts
    """

    name = "frozen-parameters-in-optimizer"
    stage = "evaluation"
    trainable_share = Threshold(0.5, "more than half of the model is trainable, so it is not a frozen base model")
    nearly_all = Threshold(0.8, "of the model is trainable: a frozen base that is so small is probably a mistake")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if an optimizer holds frozen parameters."""
        count, names = named_fact(history, "frozen_in_optimizer")
        if not count:
            return
        share = history.facts["trainable_elements"] / max(history.facts["elements"], 1)
        # Complete children of the model are frozen in fine-tuning.
        has_frozen_child = any(part == 1.0 for part in history.facts.get("frozen_modules", {}).values())
        is_unusual = share > self.trainable_share and not (share < self.nearly_all and has_frozen_child)
        yield self.finding(
            "warning" if is_unusual else "info",
            0,
            f"{count} parameters are in the optimizer but are frozen (requires_grad=False), so they keep their values: "
            f"{names}.",
            "Call requires_grad_(True) on them if they should be trained; otherwise leave them out of the optimizer.",
            Evidence("facts/frozen_in_optimizer", count, 0, "0, or the layers of a frozen base model"),
            confidence=0.6,
        )


class FrozenUntrained(HooklessDetector):
    """Finds frozen layers whose weights are those of a fresh initialisation.

    Symptom: Fine-tuning is much worse than expected

    The frozen layers have the weights of an initialisation and not of a training: the checkpoint was not loaded, as
    with load_state_dict(strict=False) and keys of another prefix, or the model was created again. Print the missing
    and unexpected keys that load_state_dict returns.

    Applies to: frozen layers with weights of at least 64 elements

    Source: torch.nn.Module.load_state_dict: strict; torch draws initial weights from a uniform distribution
    """

    name = "frozen-layers-untrained"
    share = Threshold(0.5, "of the frozen layers; a training leaves no weights uniformly distributed")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if most frozen layers look untrained; a remark if the loss falls by half anyway."""
        count, names = named_fact(history, "frozen_untrained")
        layers = history.facts["frozen_untrained"]["layers"] if count else 0
        if count > self.share * layers:
            yield self.finding(
                "info" if history.loss_fall > 0.5 else "warning",
                0,
                f"{count} of {layers} frozen layers have uniformly distributed weights, as torch initialises them and "
                f"no training leaves them: {names}. They were probably never loaded.",
                "Print what load_state_dict returns: with strict=False, keys with another prefix load nothing.",
                Evidence("facts/frozen_untrained", count, self.share * layers, "0"),
                confidence=0.85,
            )


class DecayedVectors(HooklessDetector):
    """Reports biases and norm gains in a group with weight decay.

    Symptom: A question about weight decay

    Weight decay also acts on biases and on the gains of normalisation layers, as in AdamW(model.parameters()). Many
    recipes for transformers exclude them; the effect is usually small.

    Source: Loshchilov and Hutter, arXiv 1711.05101; minGPT's parameter groups
    """

    name = "weight-decay-on-vectors"
    stage = "evaluation"

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a remark if vectors are decayed."""
        count, names = named_fact(history, "decayed_vectors")
        if count:
            why = (
                f"Weight decay also acts on {counted(count, 'parameter')} with one dimension, such as biases and gains "
                f"of norms ({names})."
            )
            remedy = "Put parameters with one dimension into a group with weight_decay=0 if your recipe excludes them."
            yield self.finding("info", 0, why, remedy, Evidence("facts/decayed_vectors", count), confidence=0.99)
