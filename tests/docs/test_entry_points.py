"""The command discovers a hook and an experiment that are packaged as on the pages."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, blocks

pytestmark = pytest.mark.process

PAGES = {
    "loopscope.hooks": (ROOT / "docs/writing-a-hook.md", "my_hooks.py"),
    "loopscope.experiments": (ROOT / "docs/writing-an-experiment.md", "my_package/spirals.py"),
}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Create a folder like pip from the blocks of both pages."""
    metadata = tmp_path / "mine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    lines: list[str] = []
    for group, (page, file) in PAGES.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("".join(block.text for block in blocks(page) if block.file), encoding="utf-8")
        (text,) = [block.text for block in blocks(page) if block.language == "toml"]
        points = tomllib.loads(text)["project"]["entry-points"][group]
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.slow
def test_hooks_and_experiments_of_other_packages_are_found(installed: Path) -> None:
    both = "from loopscope.__main__ import main; import sys; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": f"{installed}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    words = ["run", "spirals", "--hooks", "zero_gradients", "--epochs", "1", "--hook-jsonl"]
    done = subprocess.run(
        [sys.executable, "-c", both, *words], env=environment, cwd=installed, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    record = (installed / "output/spirals/random/random.jsonl").read_text()
    assert "zero_gradients/fraction" in record
