"""Drawing of the pictures of hooks' pages: ``python -m docs.hook_pictures [HOOK...]``, by default all of them.

A program ``docs/hook_pictures/<hook>.py`` has a function ``draw() -> matplotlib.figure.Figure``, which trains a model
with the hook and plots its numbers. The page of the hook shows the picture, with the docstring of the program as its
caption, after `make docs`.
"""

import sys
from importlib import import_module

import matplotlib as mpl

from docs.hook_pictures import PICTURES, PROGRAMS

WIDTH, HEIGHT = 8, 3.6  # inches
STYLE = {"figure.figsize": (WIDTH, HEIGHT), "figure.dpi": 100, "figure.constrained_layout.use": True, "font.size": 9}


def main(names: list[str]) -> int:
    """Draw the pictures of the hooks of these names."""
    mpl.use("agg")
    PICTURES.mkdir(parents=True, exist_ok=True)
    programs = sorted(path.stem for path in PROGRAMS.glob("*.py") if not path.stem.startswith("_"))
    for name in names or programs:
        with mpl.rc_context(STYLE):
            figure = import_module(f"docs.hook_pictures.{name}").draw()
            # Without the version of matplotlib, so that the file depends on its content only.
            figure.savefig(PICTURES / f"{name}.png", metadata={"Software": None})
        print(f"docs/pictures/hooks/{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
