"""Detectors of modules in the wrong mode."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from ...errors import counted
from .. import Detector, Evidence, Finding, History, Rule, Threshold
from ..detector import HooklessDetector, alert, fact
from ..history import median_of
from ..measures import CHECKS
from .parameters import named_fact


class EvalModeInTraining(Rule):
    """Finds a model that is trained in eval mode.

    Symptom: Dropout and batch normalisation have no effect

    The model is in eval mode in its training steps: model.train() is missing, before the training or after an
    evaluation. Models of from_pretrained are in eval mode at first. It is also reported if only scope.evaluate
    restores train mode.

    Source: torch.nn.Module.eval
    """

    name = "model-in-eval-mode"
    stage = "evaluation"
    read = staticmethod(alert)
    metric = "evaluation/eval_mode_left"
    why = (
        "The function given to scope.evaluate calls model.eval(), and nothing calls model.train() before the next "
        "step. scope.evaluate restores train mode, so this run trains correctly; the same script without it trains in "
        "eval mode after its first evaluation."
    )
    remedy = "Call model.train() at the end of the function, or leave model.eval() to scope.evaluate."

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the model was in eval mode at a checked step, or would be without ``scope.evaluate``."""
        curve = history.curve(f"{CHECKS}/model_in_eval")
        in_eval = curve.values > 0
        if not in_eval.any():
            yield from super().detect(history)
            return
        layers = []
        if count := history.facts.get("dropouts"):
            layers.append(f"{counted(count, 'dropout layer')} {'is' if count == 1 else 'are'} inactive")
        if count := history.facts.get("batchnorms"):
            verb = "keeps its" if count == 1 else "keep their"
            layers.append(f"{counted(count, 'batch normalisation')} {verb} statistics")
        step, some = curve.first_step_where(in_eval) or 1, "its" if in_eval.all() else "some of its"
        why = f"The model is in eval mode in {some} training steps{': ' + ' and '.join(layers) if layers else ''}."
        remedy = "Call model.train() before the training and after each evaluation."
        evidence = Evidence(f"{CHECKS}/model_in_eval", 1, 0, "0")
        finding = self.finding("warning" if layers else "info", step, why, remedy, evidence)
        # Without the statistics of the batch, the layers behind a batch normalisation get values of any size.
        yield replace(finding, stage="set-up") if history.facts.get("batchnorms") else finding


class BatchNormFrozen(HooklessDetector):
    """Finds trained batch normalisations whose statistics do not change.

    Symptom: Training and validation differ with batch normalisation

    Batch normalisations with trainable parameters or with their initial statistics are in eval mode, or have a
    momentum of 0, so that they normalise with old statistics or not at all. Call train() on them, or freeze them
    completely after they were trained.

    Applies to: models with batch normalisation

    Source: torch.nn.BatchNorm2d: momentum, track_running_stats
    """

    name = "batchnorm-frozen"
    stage = "evaluation"

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding from the start-up facts."""
        problems = {
            "never_trained": "are in eval mode with their initial statistics, mean 0 and variance 1, so that they "
            "normalise nothing",
            "in_eval_mode": "are in eval mode while the model trains, though their parameters are trainable",
            "without_updates": "have momentum 0, so that their running statistics keep their initial values",
        }
        for name, problem in problems.items():
            count, names = named_fact(history, f"batchnorms_{name}")
            are_in_eval_mode = name != "without_updates"
            if count and not (are_in_eval_mode and history.facts.get("in_eval_mode")):
                of_all = f" of {history.facts['batchnorms']}" if are_in_eval_mode else ""
                why = f"{count}{of_all} batch normalisations {problem}: {names}."
                remedy = (
                    "Call train() on these modules, or freeze them with requires_grad_(False) after they were trained; "
                    "the usual momentum is 0.1."
                )
                evidence = Evidence(f"facts/batchnorms_{name}", count, 0, "0")
                yield self.finding("warning", 0, why, remedy, evidence, confidence=0.85)
                return


class RunningStatisticsUnlike(Detector):
    """Finds batch normalisations whose running statistics are those of the last batch only.

    Symptom: The loss in eval mode is far worse than in train mode, also on the training data

    Running statistics of batch normalisation follow the last batches instead of averaging: momentum is the weight
    of the new batch in torch, 0.1 by default, and of the old value in Keras, 0.99. With small batches eval mode
    then normalises by noise.

    Applies to: models with batch normalisation

    Source: torch.nn.BatchNorm1d: momentum, different from the one used in optimizers
    """

    name = "batchnorm-momentum"
    stage = "evaluation"
    momentum = Threshold(0.5, "half of the statistics is the last batch; usual are 0.01 to 0.1")
    ratio = Threshold(2.0, "loss of the training data in eval mode over that in train mode")
    needs = ()

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding for a large momentum, or for a training loss that is far higher in eval mode."""
        momentum = history.facts.get("largest_batchnorm_momentum") or 0.0
        if momentum > self.momentum:
            why = (
                f"A batch normalisation has momentum {momentum:g}: its running statistics are those of the last "
                f"{'batch' if momentum > 0.7 else 'two batches'}, so that the model in eval mode differs from the one "
                "that was trained."
            )
            remedy = "Use momentum=0.1 or less; it is 1 − the momentum of Keras."
            evidence = Evidence("facts/largest_batchnorm_momentum", momentum, self.momentum, "0.01 to 0.1")
            yield self.finding("warning", 0, why, remedy, evidence, confidence=0.85)
            return
        if not history.facts.get("batchnorms"):
            return
        prefix = "training_metrics/evaluation/"
        for name, curve in history.curves.items():
            words = name.removeprefix(prefix)
            if not name.startswith(prefix) or "train" not in words or "loss" not in words or len(curve) < 3:
                continue
            levels = [median_of(history.loss.between(int(step) - 20, int(step))) for step in curve.steps[-3:]]
            ratio = median_of(curve.values[-3:] / np.array(levels))
            if ratio > self.ratio and min(levels) > 0:
                yield self.finding(
                    "warning",
                    int(curve.steps[-3]),
                    f"The loss of the training data is {curve.last:.3g} in eval mode and {levels[-1]:.3g} in train "
                    "mode: the running statistics of batch normalisation do not fit the data.",
                    "Use larger batches, a smaller momentum, or GroupNorm; do not reuse a layer for data of different "
                    "kinds.",
                    Evidence(name, curve.last, self.ratio * levels[-1], f"about {levels[-1]:.3g}"),
                    confidence=0.7,
                )
                return


class DropoutTooStrong(Rule):
    """Finds dropout that leaves hardly anything of its inputs.

    Symptom: The training loss stays high, and the validation loss is far lower

    A dropout layer sets nearly all of its inputs to zero. The argument p of nn.Dropout is the probability of a
    zero, not of keeping a value; usual values are 0.1 to 0.5.

    Applies to: models with dropout

    Source: Srivastava et al., Dropout, 2014, section 7.3: best between 0.2 and 0.6; torch.nn.Dropout: p
    """

    name = "dropout-too-strong"
    stage = "set-up"
    probability = Threshold(0.85, "above every value that is in use")
    needs = ()
    read = staticmethod(fact)
    metric = "facts/largest_dropout"
    above = "probability"
    why = (
        "A dropout layer sets {value:.0%} of its inputs to zero, so that hardly any signal reaches the next layer in "
        "training."
    )
    remedy = "Use nn.Dropout(0.1) to nn.Dropout(0.5): p is the probability of a zero."
    usual = "0 to 0.5"
    confidence = 0.85


class AlertRule(Rule):
    """Finds an alert that the loop has raised itself, without a hook."""

    needs = ()
    read = staticmethod(alert)
    confidence = 0.95


class EvaluationInTrainMode(AlertRule):
    """Finds evaluations that run the model in train mode.

    Symptom: Validation numbers are noisy or too bad

    The model is evaluated in train mode, so that dropout is active and batch normalisation uses the statistics of
    the batch. Call model.eval() before the evaluation, or use scope.evaluate.

    Applies to: models with dropout or batch normalisation that are evaluated in scope.evaluate, or after the data
    of an epoch by a loop that reports numbers to scope.epoch_end

    Source: torch.nn.Module.eval
    """

    name = "evaluation-in-train-mode"
    law = "evaluation_changes_nothing"
    stage = "evaluation"
    metric = "evaluation/train_mode"
    why = (
        "The model is evaluated in train mode: dropout is active in the evaluation, and batch normalisation uses and "
        "changes the statistics of its batches."
    )
    remedy = "Call model.eval() before the evaluation and model.train() afterwards."


class OptimizerReplaced(AlertRule):
    """Finds steps of an optimizer that is not attached over the parameters of the model.

    Symptom: Hooks report nothing after some step, or count all later steps as skipped

    The script has created another optimizer for the same parameters, and steps that one: hooks observe only the
    attached optimizer. Close the scope and attach the new optimizer, or give attach(model, [first, second]) both.

    Applies to: custom loops

    Source: torch.optim.optimizer.register_optimizer_step_post_hook
    """

    name = "optimizer-replaced"
    stage = "set-up"
    metric = "optimizers/other_optimizer"
    why = (
        "Another optimizer steps the parameters of the model since step {step:,}, and hooks do not see its updates: "
        "later numbers about updates and the optimizer are missing or wrong."
    )
    remedy = "Close the scope and attach the new optimizer, or give attach(model, [first, second]) both."


class DropoutInEvaluation(AlertRule):
    """Finds dropout that is active in eval mode.

    Symptom: Validation numbers are worse than those in training, and differ from call to call

    The model calls functional.dropout, whose argument training is True by default, or scaled_dot_product_attention
    with dropout_p: both drop elements in eval mode, too. Pass training=self.training, and dropout_p=self.dropout if
    self.training else 0.0. Or modules are in a list or dict, where model.eval() does not reach them: use
    nn.ModuleList or nn.ModuleDict.

    Applies to: models that are evaluated in scope.evaluate, or by experiments, and are not compiled

    Source: torch.nn.functional.dropout: training (default True)
    """

    name = "dropout-in-evaluation"
    law = "evaluation_changes_nothing"
    stage = "evaluation"
    metric = "evaluation/active_dropout"
    why = (
        "The model drops elements in eval mode, too: functional.dropout has training=True by default, and "
        "scaled_dot_product_attention drops with probability dropout_p in every mode."
    )
    remedy = "Pass training=self.training to functional.dropout; to attention, dropout_p=p if self.training else 0.0."
    confidence = 0.9

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding from the alert of the first evaluation."""
        is_unregistered, step = alert(history, "evaluation/unregistered_dropout")
        if is_unregistered and not named_fact(history, "unregistered")[0]:  # layers-not-registered has these
            why = (
                "The model drops elements in eval mode, too, in modules that it does not register, so that "
                "model.eval() does not reach them."
            )
            remedy = "Use nn.ModuleList or nn.ModuleDict in place of a list or dict of modules."
            yield self.finding("warning", step, why, remedy, Evidence("evaluation/unregistered_dropout", 1, 0, "0"))
        yield from super().detect(history)
