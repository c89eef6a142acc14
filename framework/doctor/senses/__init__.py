"""The doctor's readings of a training in progress: the graph of its loss, and the modes of its evaluations."""

from .autograd_nodes import all_nodes, inputs_of, leaves_of, operation_of, output_of, saved_value
from .backward_passes import BackwardPass
from .backward_recorder import BackwardRecorder
from .caller_variables import variables_of_callers, variables_with
from .episodes import EPISODES, Episodes, note_environment
from .evaluation_modes import ActiveDropout, DropoutCalls, EvaluationDropout, EvaluationModes
from .loss_graph import last_divisor, reaches
from .policy_graph import MOST_PARTS, LogProbs, PolicyTerms, Regressed, Weighted, policy_terms, sampled_rows
from .reference_sides import trained_sides
from .target_losses import token_likelihoods

__all__ = [
    "EPISODES", "MOST_PARTS", "ActiveDropout", "BackwardPass", "BackwardRecorder", "DropoutCalls", "Episodes",
    "EvaluationDropout", "EvaluationModes", "LogProbs", "PolicyTerms", "Regressed", "Weighted", "all_nodes",
    "inputs_of", "last_divisor", "leaves_of", "note_environment", "operation_of", "output_of", "policy_terms",
    "reaches", "sampled_rows", "saved_value", "token_likelihoods", "trained_sides", "variables_of_callers",
    "variables_with",
]
