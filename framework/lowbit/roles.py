"""The five matrices that a linear layer casts, by name."""

from collections.abc import Mapping
from typing import Literal, get_args

Role = Literal["forward_input", "forward_weight", "backward_input", "backward_weight", "output_grad"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Input and weight of y = x Wᵀ; input and weight of the backward products gᵀx and g W; g, the output's gradient."""
FORWARD_ROLES: tuple[Role, ...] = ("forward_input", "forward_weight")
SAME_MATRIX: Mapping[Role, Role] = {"backward_input": "forward_input", "backward_weight": "forward_weight"}
"""The forward role of the matrix that a backward role casts again."""
