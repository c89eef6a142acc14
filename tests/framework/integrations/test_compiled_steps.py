"""Steps of optimizers that torch compiles: it compiles around the hooks that observe them."""

from pathlib import Path

import loopscope
import pytest
import torch
from torch import nn


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace", "ignore::DeprecationWarning")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_steps_are_observed_or_refused_by_torch(tmp_path: Path, fullgraph: bool) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-2))
    step = torch.compile(lambda: optimizer.step(), fullgraph=fullgraph, backend="eager")
    scope = loopscope.attach(model, optimizer, hooks=["norms"], out=tmp_path / "run", display="none")
    steps = 0
    with scope:
        for batch in scope.batches([torch.ones(2, 4)] * 3):
            scope.backward(model(batch).square().mean())
            if fullgraph:
                with pytest.raises(torch._dynamo.exc.Unsupported):
                    step()
                optimizer.step()
            else:
                step()
            optimizer.zero_grad()
            steps += 1
        assert scope._attached.manager.state.loop.step == steps == 3
