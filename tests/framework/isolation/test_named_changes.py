"""Names of changes in errors: one short line, without contents of tensors."""

import pytest
import torch
from torch import nn

from tests.framework.isolation.test_tripwire import observe, trained

CHANGES = {
    "forward_hook": (lambda scene: scene.module._forward_hooks.clear(), "._forward_hooks"),
    "list_of_tensors": (lambda scene: scene.module.history.append(1), ".history"),
    "tensor_in_a_list": (lambda scene: scene.module.history.__setitem__(0, torch.ones(20)), ".history"),
    "big_dict": (lambda scene: scene.module.big.update(a=1), ".big.a"),
    "long_key": (lambda scene: scene.module.big.update({"k" * 900: 1}), ".big.kkk"),
    "tuple_key": (lambda scene: scene.module.big.update({(1,) * 900: 1}), ".big.(1, 1, 1, 1)"),
    "tensor_key": (lambda scene: scene.module.big.update({torch.ones(50, 50): 1}), ".big."),
    "long_text": (lambda scene: setattr(scene.module, "text", "b" * 9000), ".text"),
    "foreign_parameter": (
        lambda scene: scene.optimizer.state.update({nn.Parameter(torch.ones(30, 30)): {}}),
        "optimizer state.Parameter of shape (30, 30), float32",
    ),
    "moment": (lambda scene: scene.moments[0].mul_(2), "Tensor of shape ("),
    "weight": (lambda scene: scene.parameter.data.mul_(2), "(Parameter of shape ("),
    "optimizer_hook": (lambda scene: scene.optimizer.register_step_pre_hook(print), "optimizer._optimizer_step_pre_"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_named_in_one_line(name):
    scene = trained()
    scene.module.register_forward_hook(lambda module, inputs, output: output)
    scene.module.history, scene.module.big = [torch.ones(20)] * 3, {str(i): i for i in range(5000)}
    scene.module.text = "a" * 9000
    change, named = CHANGES[name]
    text = observe(scene.state, lambda: change(scene))
    assert named in text
    assert "\n" not in text
    assert len(text) < 600
