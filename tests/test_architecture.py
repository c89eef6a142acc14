"""Architecture rules: the order of imports between rooms, imports through interfaces, and one name per module."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "framework": "loopscope",
    "training_hooks": "loopscope.training_hooks",
    "sinks": "loopscope.sinks",
    "experiments": "loopscope.experiments",
}
ORDER = (
    *(
        "names_on_demand",
        "combined_optimizers",
        "preserved_streams",
        "interruption",
        "names",
        "option_words",
        "errors",
        "optional_packages",
        "registry",
        "accelerators",
        "durable_files",
        "file_digests",
        "student_t",
        "sequential_test",
        "tensors",
        "state.values",
        "state.generators",
        "state.settings",
        "state.parameter_groups",
        "state",
        "digests",
    ),
    *("isolation", "data", "training", "hooks", "hooks.selection", "taps", "lowbit.casts", "lowbit"),
    *("engine", "loops", "checkpoints"),
    *("laboratory", "doctor", "doctor.senses", "doctor.detectors"),
    *(
        "runs",
        "seed_groups",
        "sweeps",
        "report",
        "many_runs",
        "console",
        "laboratory.questions",
        "observing",
        "laws",
        "laws.shipped",
    ),
    *("testing", "integrations", "cli"),
)
"""The rooms and top-level files of ``framework/``, lowest first: each imports only lower ones."""
MEASURES = (
    *(
        "names",
        "option_words",
        "errors",
        "durable_files",
        "student_t",
        "tensors",
        "state.parameter_groups",
        "state",
        "isolation",
        "data",
        "lowbit.casts",
        "lowbit",
    ),
    *("training", "hooks", "taps"),
)
ALLOWED = {
    "training_hooks": {"", "doctor.senses", *MEASURES},
    "sinks": {"", "option_words", "errors", "optional_packages", "durable_files", "hooks", "runs"},
    "experiments": {
        "",
        "option_words",
        "errors",
        "optional_packages",
        "state",
        "data",
        "lowbit.casts",
        "lowbit",
        "training",
        "hooks",
        "runs",
    },
}
"""The rooms of ``framework/`` that the other folders may import, which are also those for third-party code."""
EXCEPTIONS = {
    ("sinks/console.py", "console"),
    ("framework/__main__.py", "cli"),
    ("framework/testing.py", "laws.shipped"),
    *(
        (f"training_hooks/laboratory/{name}.py", "laboratory")
        for name in ("changed_steps", "hypothesis_test", "what_if")
    ),
}
"""Single files with one more permitted import than their room."""
MOST_LEVELS = 12


class Import(NamedTuple):
    """An import from loopscope: the importing file, and the dotted name of the module."""

    file: str
    module: str
    names: tuple[str, ...]


def paths() -> list[str]:
    """Return the files of the four source folders, relative to the root."""
    found = chain.from_iterable(sorted((ROOT / folder).rglob("*.py")) for folder in FOLDERS)
    return [str(path.relative_to(ROOT)) for path in found]


@cache
def files() -> dict[str, ast.Module]:
    """Return the syntax trees of the files; parsing them takes seconds, which the import of this module must not."""
    return {path: ast.parse((ROOT / path).read_text("utf-8")) for path in paths()}


def dotted(file: str) -> str:
    """Return the name under which a file is imported."""
    folder, *rest = Path(file).with_suffix("").parts
    return ".".join([FOLDERS[folder], *(part for part in rest if part != "__init__")])


MODULES = {dotted(file): file for file in paths()}


def room(file: str) -> str:
    """Return the room of a file of ``framework/`` (a top-level file is its own room), or its top-level folder."""
    folder, *inner = Path(file).with_suffix("").parts
    if folder != "framework":
        return folder
    return ".".join(inner[:-1]) or inner[0]


@cache
def imports() -> list[Import]:
    return [found_import for file, tree in files().items() for found_import in _imports(file, tree)]


@pytest.fixture(scope="module", autouse=True)
def _imports_are_found() -> None:
    """Find the imports before the first test, whose time they would otherwise count towards."""
    imports()


def _imports(file: str, tree: ast.Module) -> Iterator[Import]:
    package = dotted(file).split(".") if file.endswith("__init__.py") else dotted(file).split(".")[:-1]
    for node in _statements(tree):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            if module.split(".")[0] == "loopscope":
                yield from _named(file, module, tuple(alias.name for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (Import(file, a.name, ()) for a in node.names if a.name.split(".")[0] == "loopscope")


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements of a module except those for types; expressions, most of the nodes, have no imports."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)) and not _is_for_types(child):
            yield child
            yield from _statements(child)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _named(file: str, module: str, names: tuple[str, ...]) -> Iterator[Import]:
    """Yield the import of a name as an import of a module if the name is a module."""
    for name in names:
        inner = f"{module}.{name}"
        yield Import(file, inner, ()) if inner in MODULES else Import(file, module, (name,))


def crossing() -> Iterator[tuple[Import, str]]:
    """Yield the imports from one room or folder into another, with the imported file."""
    for found_import in imports():
        target = MODULES[found_import.module]
        if Path(target).parent != Path(found_import.file).parent:
            yield found_import, target


@pytest.mark.longer
def test_imports_point_down() -> None:
    upward_imports = []
    for found_import, target in crossing():
        source_room, target_room = room(found_import.file), room(target)
        if (
            found_import.file == "framework/__init__.py"
            or (found_import.file, target_room) in EXCEPTIONS
            or source_room == target_room
        ):
            continue
        if source_room in FOLDERS:
            permitted = (
                target_room in FOLDERS or ("" if target_room == "__init__" else target_room) in ALLOWED[source_room]
            )
        else:
            permitted = target_room in ORDER and ORDER.index(target_room) < ORDER.index(source_room)
        if not permitted:
            upward_imports.append(f"{found_import.file} imports {found_import.module}")
    assert not upward_imports


def test_top_level_folders_are_independent() -> None:
    """Only files in the same folder import from training_hooks, sinks or experiments."""
    between = {(room(found_import.file), room(target)) for found_import, target in crossing()}
    outside = {
        (source_room, target_room)
        for source_room, target_room in between
        if source_room != target_room and target_room in FOLDERS
    }
    assert outside == set()


@pytest.mark.longer
def test_imports_use_package_interfaces() -> None:
    """Only a package itself may import its inner files; other code imports from the package."""
    violations = []
    for found_import, target in crossing():
        inside = Path(target).parent in Path(found_import.file).parents
        if not (inside or target.endswith("__init__.py") or Path(target).parent.name in FOLDERS):
            violations.append(f"{found_import.file} imports {found_import.module}")
    assert not violations


@pytest.mark.longer
def test_interfaces_export_only_names_used_outside() -> None:
    """An interface exports only names that other rooms, tests or docs use."""
    text = "\n".join(
        path.read_text("utf-8")
        for name in ("tests", "docs")
        for path in (ROOT / name).rglob("*.*")
        if path.suffix in (".py", ".md")
    )
    used = {(found_import.module, name) for found_import, _ in crossing() for name in found_import.names}
    unused = [
        f"{module}.{name}"
        for module, file in MODULES.items()
        if file.endswith("__init__.py") and file.startswith("framework/") and file != "framework/__init__.py"
        for name in getattr(import_module(module), "__all__", ())
        if (module, name) not in used and name not in text
    ]
    assert not unused


def test_levels_of_imports_are_limited() -> None:
    below: dict[str, set[str]] = {}
    for found_import, target in crossing():
        if found_import.file.startswith("framework/") and found_import.file not in (
            "framework/__init__.py",
            "framework/__main__.py",
        ):
            below.setdefault(room(found_import.file), set()).add(room(target))

    @cache
    def level(name: str) -> int:
        rooms = (other for other in below.get(name, ()) if other != name)
        return 1 + max((level(other) for other in rooms if not (ROOT / f"framework/{other}.py").is_file()), default=0)

    assert max(map(level, below)) <= MOST_LEVELS, {name: level(name) for name in below}


def test_files_have_no_import_cycles() -> None:
    below: dict[str, set[str]] = {}
    for found_import in imports():
        target = MODULES[found_import.module]
        if target != found_import.file and not target.endswith("__init__.py"):  # interfaces import their rooms
            below.setdefault(found_import.file, set()).add(target)
    TopologicalSorter(below).prepare()  # raises CycleError with the cycle


@pytest.mark.longer
def test_one_file_fires_hook_points() -> None:
    firing = {
        file
        for file, tree in files().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fire"
    }
    assert firing == {"framework/engine/driver.py"}


@pytest.mark.longer
def test_tensor_files_are_handled_in_one_place() -> None:
    """Only this file prevents torch's warnings from being mistaken for damage."""
    calls = {
        file
        for file, tree in files().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save")
    }
    assert calls == {"framework/durable_files.py"}


def test_every_exported_name_is_documented() -> None:
    undocumented = []
    for module in (name for name, file in MODULES.items() if file.endswith("__init__.py")):
        interface = import_module(module)
        assert interface.__doc__, module
        for name in getattr(interface, "__all__", ()):
            exported = getattr(interface, name)
            is_own = getattr(exported, "__module__", "").startswith("loopscope")
            if callable(exported) and is_own and not exported.__doc__:
                undocumented.append(f"{module}.{name}")
    assert not undocumented


def test_pyproject_lists_every_package() -> None:
    """The packages and package directories in pyproject.toml match the source tree."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    assert sorted(listed["packages"]) == sorted(
        {name for name, file in MODULES.items() if file.endswith("__init__.py")}
    )
    assert {name: folder for folder, name in FOLDERS.items()} == listed["package-dir"]


def test_the_page_lists_uses_of_internals() -> None:
    """docs/architecture.md names exactly the files that use private parts of torch, or ctypes."""
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    section = page.partition("## Internals of torch and CPython")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"`([\w/]+\.py)`", cell)}
    used = {file.removeprefix("framework/") for file, tree in files().items() if any(map(_is_internal, ast.walk(tree)))}
    of_objects = {
        "state/sharding.py",
        "tensors/identity.py",
        "state/generators/global_generators.py",
    }  # private attributes of objects
    assert used - named == set()
    assert named - used - of_objects == set()


def _is_internal(node: ast.AST) -> bool:
    """Return whether code names ctypes or a private part of torch, also in a text such as ``torch._dynamo``."""
    if isinstance(node, ast.Import):
        return any(alias.name == "ctypes" or alias.name.startswith("torch._") for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").startswith("torch._")
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.fullmatch(r"torch\._\w+\.[\w.]+", node.value) is not None
    is_of_torch = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"
    return is_of_torch and node.attr.startswith("_") and isinstance(getattr(torch, node.attr, None), ModuleType)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_folder_is_imported_under_its_own_name(folder: str) -> None:
    """The source folders cannot be imported, because a second copy of a module would have separate registries."""
    with pytest.raises(ImportError, match="loopscope"):
        import_module(folder)


@pytest.mark.process
def test_complete_run_loads_no_module_twice(tmp_path: Path) -> None:
    code = (
        "import sys; from loopscope.__main__ import main; main();"
        f"print([name for name in sys.modules if name.partition('.')[0] in {[*FOLDERS]!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "list"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
