"""What the source of the package says without being run: its imports and its class names."""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

# A module may import from its own layer and from those before it.
LAYERS = (
    ("vocabulary",),
    ("system",),
    ("config", "state"),
    ("nets",),
    ("env",),
    ("agent",),
    ("runtime",),
    ("grown",),
    ("training.results",),
    ("training.files",),
    ("training.loop",),
    ("training.start", "training"),
    ("simulator",),
    ("adapters",),
    ("lab",),
    ("train", "evaluate", "export"),
)


@cache
def parsed(path: Path) -> tuple[str, ast.Module]:
    """A file, its text and its tree."""
    text = path.read_text(encoding="utf-8")
    return text, ast.parse(text)


@cache
def walked(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a tree, which every rule looks at."""
    return tuple(ast.walk(tree))


def module_of(path: Path, package: Path) -> str:
    """The dotted name of a file of `package`, without the package's own name; "" for itself."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> int | None:
    """Number of the layer that `module` (dotted, without the package's own name) belongs to."""
    parts = module.split(".")
    for name in (".".join(parts[:2]), parts[0]):
        for number, layer in enumerate(LAYERS):
            if name in layer:
                return number
    return None


def imported_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """All that is imported from the package, dotted, without the package's own name."""
    for node in walked(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name.name}" for name in node.names]
        else:
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        own = [name for name in names if name.startswith("esper_soa.")]
        yield from ((node.lineno, name.removeprefix("esper_soa.")) for name in own)


def upward_imports(tree: ast.Module, module: str) -> Iterator[tuple[int, str]]:
    """Line and name of every import of what stands above the module or in no layer."""
    own = layer_of(module)
    for line, name in imported_names(tree):
        other = layer_of(name)
        if own is None or other is None or other > own:
            yield line, name


def imports_against_the_order(package: Path) -> set[tuple[str, str]]:
    """Modules of `package` beside the modules above them that they import from, to two parts."""
    paths = {path: module_of(path, package) for path in package.rglob("*.py")}
    return {
        (module, ".".join(name.split(".")[:2]))
        for path, module in paths.items()
        if module
        for _, name in upward_imports(parsed(path)[1], module)
    }


def imports_between(package: Path) -> dict[str, set[str]]:
    """The modules of `package` that each of its modules imports, those for type checkers too."""
    paths = {module_of(path, package): path for path in package.rglob("*.py")}
    return {
        module: {
            imported
            for _, name in imported_names(parsed(path)[1])
            for imported in [name if name in paths else name.rpartition(".")[0]]
            if imported in paths and imported != module
        }
        for module, path in paths.items()
    }


def by_folder(imports: Mapping[str, set[str]], package: Path) -> dict[str, set[str]]:
    """The folders (dotted) among those of `imports` that the modules of each import from."""
    folders = {
        module: module
        if (package / module.replace(".", "/") / "__init__.py").exists()
        else module.rpartition(".")[0]
        for module in imports
    }
    found: dict[str, set[str]] = {}
    for module, names in imports.items():
        inside = {folders[name] for name in names if name in folders}
        found.setdefault(folders[module], set()).update(inside - {folders[module]})
    return found


def circles(imports: Mapping[str, set[str]]) -> list[set[str]]:
    """Groups of names each of which leads to every other one of its group."""
    reached: dict[str, set[str]] = {}
    for start in imports:
        found = set[str]()
        ahead = set(imports[start])
        while ahead:
            name = ahead.pop()
            found.add(name)
            ahead |= imports.get(name, set()) - found
        reached[start] = found
    groups = {
        frozenset(name for name in reached[start] if start in reached.get(name, ()))
        for start in imports
        if start in reached[start]
    }
    return sorted(map(set, groups), key=sorted)


def class_names_used_twice(package: Path) -> set[str]:
    """Names that more than one class of `package` has."""
    nodes = [node for path in package.rglob("*.py") for node in walked(parsed(path)[1])]
    count = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return {name for name, times in count.items() if times > 1}


WHOLE_SETTINGS = ("cfg", "settings")  # names of records of all settings of a run
OF_THE_SETUP = ("task", "slots", "data", "compute")  # parts that `Setup` is made of


def reads_of_setup_settings(tree: ast.Module) -> set[str]:
    """Functions of a module that read a part of the settings which stands in `Setup`."""
    return {
        function.name
        for function in walked(tree)
        if isinstance(function, ast.FunctionDef)
        for node in walked(function)
        if isinstance(node, ast.Attribute) and node.attr in OF_THE_SETUP
        for record in [node.value]
        if (isinstance(record, ast.Name) and record.id in WHOLE_SETTINGS)
        or (isinstance(record, ast.Attribute) and record.attr in WHOLE_SETTINGS)
    }
