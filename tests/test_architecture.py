"""The house: rooms in one order of imports, doors that outsiders use, files and rooms of bounded size, one name."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "framework": "loopscope",
    "training_hooks": "loopscope.training_hooks",
    "sinks": "loopscope.sinks",
    "experiments": "loopscope.experiments",
}
ORDER = (
    *(
        "preserved_streams",
        "errors",
        "registry",
        "durable_files",
        "state",
        "digests",
        "isolation",
        "data",
        "lowbit.casts",
        "lowbit",
    ),
    *("training", "hooks", "firing", "loops", "checkpoints", "runs", "report", "console", "explaining"),
    *("integrations", "cli"),
)
"""The rooms of ``framework/`` and the files on top of it, lowest first: imports only point down."""
MEASURES = ("errors", "durable_files", "state", "isolation", "data", "lowbit.casts", "lowbit", "training", "hooks")
ALLOWED = {
    "training_hooks": {"", *MEASURES},
    "sinks": {"", "errors", "durable_files", "hooks", "runs"},
    "experiments": {"", "errors", "state", "data", "lowbit.casts", "lowbit", "training", "hooks", "runs"},
}
"""What the other folders import of ``framework/``: what a stranger's hook, sink or experiment may."""
ALSO = {("sinks/console.py", "console"), ("framework/__main__.py", "cli")}
"""Single files with one import more than their room."""
MOST_FLOORS = 10


class Import(NamedTuple):
    """One import of something of ours: the file with it, and the dotted module that it names."""

    file: str
    module: str
    names: tuple[str, ...]


@cache
def files() -> dict[str, ast.Module]:
    """Return the syntax trees of the four source folders, by path from the root."""
    paths = chain.from_iterable(sorted((ROOT / folder).rglob("*.py")) for folder in FOLDERS)
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text("utf-8")) for path in paths}


def dotted(file: str) -> str:
    """Return the name under which a file is imported."""
    folder, *rest = Path(file).with_suffix("").parts
    return ".".join([FOLDERS[folder], *(part for part in rest if part != "__init__")])


MODULES = {dotted(file): file for file in files()}


def room(file: str) -> str:
    """Return the room of a file of ``framework/`` (a file on top is one itself), or the folder that holds it."""
    folder, *inner = Path(file).with_suffix("").parts
    if folder != "framework":
        return folder
    return ".".join(inner[:-1]) or inner[0]


@cache
def imports() -> list[Import]:
    return [found for file, tree in files().items() for found in _imports(file, tree)]


def _imports(file: str, tree: ast.Module) -> Iterator[Import]:
    package = dotted(file).split(".") if file.endswith("__init__.py") else dotted(file).split(".")[:-1]
    typing = {inner for node in ast.walk(tree) if _is_for_types(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if node in typing:
            continue
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            if module.split(".")[0] == "loopscope":
                yield from _named(file, module, tuple(alias.name for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (Import(file, a.name, ()) for a in node.names if a.name.split(".")[0] == "loopscope")


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _named(file: str, module: str, names: tuple[str, ...]) -> Iterator[Import]:
    """Take names that are modules themselves for imports of these."""
    for name in names:
        inner = f"{module}.{name}"
        yield Import(file, inner, ()) if inner in MODULES else Import(file, module, (name,))


def crossing() -> Iterator[tuple[Import, str]]:
    """Yield the imports from one room or folder into another, with the file that is imported."""
    for found in imports():
        target = MODULES[found.module]
        if Path(target).parent != Path(found.file).parent:
            yield found, target


def test_imports_point_down() -> None:
    wrong = []
    for found, target in crossing():
        here, there = room(found.file), room(target)
        if found.file == "framework/__init__.py" or (found.file, there) in ALSO or here == there:
            continue
        if here in FOLDERS:
            known = there in FOLDERS or ("" if there == "__init__" else there) in ALLOWED[here]
        else:
            known = there in ORDER and ORDER.index(there) < ORDER.index(here)
        if not known:
            wrong.append(f"{found.file} imports {found.module}")
    assert not wrong


def test_top_level_folders_are_independent() -> None:
    """Only files in the same folder import from training_hooks, sinks or experiments."""
    between = {(room(found.file), room(target)) for found, target in crossing()}
    outside = {(here, there) for here, there in between if here != there and there in FOLDERS}
    assert outside == set()


def test_imports_use_package_interfaces() -> None:
    """Only a package itself may import its inner files; other code imports from the package."""
    past_it = []
    for found, target in crossing():
        inside = Path(target).parent in Path(found.file).parents
        if not (inside or target.endswith("__init__.py") or Path(target).parent.name in FOLDERS):
            past_it.append(f"{found.file} imports {found.module}")
    assert not past_it


def test_a_door_names_what_outsiders_use() -> None:
    """Names that nobody outside of the room imports, in the source, the tests or the docs, need no door."""
    text = "\n".join(
        path.read_text("utf-8")
        for name in ("tests", "docs")
        for path in (ROOT / name).rglob("*.*")
        if path.suffix in (".py", ".md")
    )
    used = {(found.module, name) for found, _ in crossing() for name in found.names}
    idle = [
        f"{module}.{name}"
        for module, file in MODULES.items()
        if file.endswith("__init__.py") and file.startswith("framework/") and file != "framework/__init__.py"
        for name in getattr(import_module(module), "__all__", ())
        if (module, name) not in used and name not in text
    ]
    assert not idle


def test_there_are_few_floors() -> None:
    below: dict[str, set[str]] = {}
    for found, target in crossing():
        if found.file.startswith("framework/") and found.file not in ("framework/__init__.py", "framework/__main__.py"):
            below.setdefault(room(found.file), set()).add(room(target))

    @cache
    def floor(name: str) -> int:
        rooms = (other for other in below.get(name, ()) if other != name)
        return 1 + max((floor(other) for other in rooms if not (ROOT / f"framework/{other}.py").is_file()), default=0)

    assert max(map(floor, below)) <= MOST_FLOORS, {name: floor(name) for name in below}


def test_files_have_no_import_cycles() -> None:
    below: dict[str, set[str]] = {}
    for found in imports():
        target = MODULES[found.module]
        if target != found.file and not target.endswith("__init__.py"):  # doors import their rooms
            below.setdefault(found.file, set()).add(target)
    TopologicalSorter(below).prepare()  # raises CycleError with the circle


def test_hook_points_are_fired_in_one_place() -> None:
    firing = {
        file
        for file, tree in files().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fire"
    }
    assert firing == {"framework/firing/driver.py"}


def test_tensor_files_are_handled_in_one_place() -> None:
    """Only there are warnings of torch kept from looking like damage."""
    calls = {
        file
        for file, tree in files().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save")
    }
    assert calls == {"framework/durable_files.py"}


def test_every_name_of_a_door_is_documented() -> None:
    bare = []
    for module in (name for name, file in MODULES.items() if file.endswith("__init__.py")):
        door = import_module(module)
        assert door.__doc__, module
        for name in getattr(door, "__all__", ()):
            thing = getattr(door, name)
            ours = getattr(thing, "__module__", "").startswith("loopscope")
            if callable(thing) and ours and not thing.__doc__:
                bare.append(f"{module}.{name}")
    assert not bare


def test_pyproject_lists_every_package() -> None:
    """The packages and package directories in pyproject.toml match the source tree."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    assert sorted(listed["packages"]) == sorted(
        {name for name, file in MODULES.items() if file.endswith("__init__.py")}
    )
    assert {name: folder for folder, name in FOLDERS.items()} == listed["package-dir"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_folder_is_imported_under_its_own_name(folder: str) -> None:
    """A second copy of a module would have registries and classes of its own."""
    with pytest.raises(ImportError, match="loopscope"):
        import_module(folder)


@pytest.mark.process
def test_a_whole_run_loads_no_module_twice(tmp_path: Path) -> None:
    code = (
        "import sys; from loopscope.__main__ import main; main();"
        f"print([name for name in sys.modules if name.partition('.')[0] in {[*FOLDERS]!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "list"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
