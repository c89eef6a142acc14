"""A Trainer's loss that uses a module outside of the model, which hooks leave unchanged, declared or found."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.framework.integrations.hf_trainers import VOCABULARY, InOrder, attached, trainer

pytestmark = pytest.mark.trainer


class Taught(InOrder):
    """Adds the distance to the output of a teacher with running statistics, which training moves."""

    teacher: nn.Module

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        output = model(**inputs)
        logits = output.logits.flatten(0, 1)
        loss = output.loss + (logits - self.teacher(logits)).square().mean()
        return (loss, output) if return_outputs else loss


def train(folder: Any, hooks: Any = None, **options: Any) -> tuple[list[Tensor], list[Any]]:
    """Return the tensors of model and teacher after the training, and the gradients left on the teacher."""
    made = trainer(folder, kind=Taught, eval_strategy="epoch")
    torch.manual_seed(5)
    made.teacher = teacher = nn.Sequential(nn.Linear(VOCABULARY, VOCABULARY), nn.BatchNorm1d(VOCABULARY))
    if hooks is not None:
        chosen = {name: make(teacher) for name, make in options.items()}
        attached(made, hooks, isolate_evaluation=True, **chosen)
    else:
        made.evaluate = partial(isolated, made, teacher)
    made.train()
    tensors = [*made.model.parameters(), *teacher.parameters(), *teacher.buffers()]
    return [item.detach().clone() for item in tensors], [parameter.grad for parameter in teacher.parameters()]


def isolated(made: Any, teacher: nn.Module, *inputs: Any, **options: Any) -> dict[str, float]:
    """Leave the evaluation out, which an isolated one equals."""
    return {}


@pytest.mark.slow
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("options", [{}, {"also": lambda teacher: {"teacher": teacher}}], ids=["found", "declared"])
def test_hooks_leave_teacher_of_trainer_unchanged(tmp_path, options):
    """Weights, running statistics and gradients of the teacher are those of the Trainer without hooks."""
    bare, left = train(tmp_path)
    watched, left_with_hooks = train(tmp_path, ["hessian", "batch_rows"], **options)
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(left, left_with_hooks, strict=True))
