"""Groups of hooks in a process that has registered none."""

import subprocess
import sys

import pytest

SCRIPT = """
from loopscope.errors import UsageError
from loopscope.hooks.selection import hook_groups, select_hooks
for group, names in (("observers", []), (None, ["all"])):
    try:
        select_hooks(group, names, hook_groups(), "any")
    except UsageError as error:
        print(error)
print(select_hooks("none", [], hook_groups(), "any"))
"""


@pytest.mark.process
def test_a_group_without_registered_hooks_is_refused() -> None:
    """Otherwise a script that does not import the hooks would train without measuring anything."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    first, second, selected = done.stdout.splitlines()
    assert first.startswith("No observers and interventions are registered, so 'observers' selects none; ")
    assert "'all' selects none" in second
    assert "import loopscope.training_hooks" in second
    assert selected == "[]"
