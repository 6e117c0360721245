"""The rules of the house as a walk over the syntax trees of the package: sizes, forbidden words,
one-way imports.

Each rule is a function from a parsed file to the places that break it, so that the rules themselves
can be tested.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "esper_soa"
FILES = sorted(PACKAGE.rglob("*.py"))
PLUGINS = sorted((PACKAGE.parent / "hydra_plugins").rglob("*.py"))
BENCHMARKS = sorted((PACKAGE.parent / "benchmarks").rglob("*.py"))
SETTINGS = [*FILES, PACKAGE.parent / "benchmarks" / "eps_config.py"]
MAX_STATEMENTS = 30  # of a function; a kernel of the GPU engine is compiled whole and may have 40
MAX_ARGUMENTS = 7

# A module may import from its own layer and from those before it.
LAYERS = (
    ("vocabulary", "errors", "paths", "ranges", "arguments", "user_cache", "registry"),
    ("state", "ranks"),
    ("nets",),
    ("env",),
    ("agent",),
    ("config",),
    ("ops", "telemetry"),
    ("report",),
    ("build", "actions"),
    ("conformance", "check_device"),
    ("controls",),
    ("running",),
    ("trainer",),
    ("launch",),
    ("evaluation", "probe"),
    ("plan",),
    ("compose",),
    ("runs", "simulator", "lockstep"),
    ("adapters",),
    ("sweep",),
    ("job",),
    ("train", "evaluate", "export", "compare", "query", "command"),
)
# Torch takes seconds to import, Hydra half a second: `main` hears signals first, a job imports
# torch once it starts.
LATE_IMPORTS = {
    ("train.py", "main"),
    ("train.py", "__call__"),
    ("evaluate.py", "main"),
    ("command.py", "job"),
    ("command.py", "run_command"),
    ("job.py", "play_training"),
    ("job.py", "look"),
    ("job.py", "play_evaluation"),
    ("export.py", "export"),
    ("compare.py", "play_seed"),
    ("query.py", "ask"),
    ("search.py", "sweep"),
    ("submitit.py", "launch"),
}

# What an engine is made of is the business of that engine and of whoever chooses between them.
CHOOSER = "nets.choose"
ENGINES = "nets.engines"
CHANGING = {
    "add",
    "append",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "setdefault",
    "update",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Breaches = Iterator[tuple[int, str]]


@cache
def walked(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a tree, which every rule looks at."""
    return tuple(ast.walk(tree))


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in walked(tree) if isinstance(node, Function))


def too_long(tree: ast.Module, limit: int = MAX_STATEMENTS) -> Breaches:
    """Functions with more statements than fit on a screen; those of functions inside count too."""
    for function in functions(tree):
        described = ast.get_docstring(function) is not None
        count = sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1 - described
        if count > limit:
            yield (function.lineno, f"{function.name} has {count} statements: at most {limit}")


def parallel_assignments(tree: ast.Module) -> Breaches:
    """`a, b = x, y` where two lines would do; in a swap one value reads the other's target."""
    for node in walked(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            for target in node.targets:
                parts = [*(target.elts if isinstance(target, ast.Tuple) else []), *node.value.elts]
                unpacks = any(isinstance(part, ast.Tuple | ast.Starred) for part in parts)
                names = {ast.unparse(part) for part in parts[: -len(node.value.elts)]}
                read = {ast.unparse(part) for part in ast.walk(node.value)}
                if names and not unpacks and not names & read:
                    yield node.lineno, "parallel assignment: one per line, unless it unpacks"


def too_many_arguments(tree: ast.Module) -> Breaches:
    for function in functions(tree):
        given = function.args
        names = [
            one.arg
            for one in given.posonlyargs + given.args + given.kwonlyargs
            if one.arg not in ("self", "cls")
        ]
        names += [one.arg for one in (given.vararg, given.kwarg) if one is not None]
        if len(names) > MAX_ARGUMENTS:
            yield (
                function.lineno,
                f"{function.name} takes {len(names)} arguments: a record is missing",
            )


def late_imports(tree: ast.Module, allowed: frozenset[str] = frozenset()) -> Breaches:
    for function in functions(tree):
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom) and function.name not in allowed:
                yield node.lineno, f"import inside {function.name}"


def uses_of_any(tree: ast.Module) -> Breaches:
    for node in walked(tree):
        by_name = isinstance(node, ast.Name) and node.id == "Any"
        by_module = isinstance(node, ast.Attribute) and node.attr == "Any"
        if by_name or by_module:
            yield node.lineno, "Any"


def blanket_excepts(tree: ast.Module) -> Breaches:
    for node in walked(tree):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = [kind.id if isinstance(kind, ast.Name) else "" for kind in kinds]
            if node.type is None or "Exception" in names or "BaseException" in names:
                yield node.lineno, "bare or blanket except"


def getattr_defaults(tree: ast.Module) -> Breaches:
    for node in walked(tree):
        called = node.func if isinstance(node, ast.Call) else None
        if (
            isinstance(called, ast.Name)
            and called.id == "getattr"
            and len(node.args) + len(node.keywords) > 2
        ):
            yield node.lineno, "getattr with a default"


def closures_in_loops(tree: ast.Module) -> Breaches:
    for loop in walked(tree):
        if isinstance(loop, ast.For | ast.While):
            for node in ast.walk(loop):
                if isinstance(node, Function | ast.Lambda):
                    yield node.lineno, "closure made in a loop"


def enums(tree: ast.Module) -> Breaches:
    """Comparing a tensor with an Enum member gives False inside torch.compile, silently."""
    for node in walked(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "enum":
            yield node.lineno, "enum: codes are plain ints in namespace classes"
        if isinstance(node, ast.Import) and any(name.name == "enum" for name in node.names):
            yield node.lineno, "enum: codes are plain ints in namespace classes"


def names_of(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Names that a module binds outside functions: by assignment; by import, class, function."""
    assigned = set[str]()
    others = set[str]()
    for node in tree.body:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        assigned |= {
            part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)
        }
        if isinstance(node, ast.Import | ast.ImportFrom):
            others |= {(name.asname or name.name).split(".")[0] for name in node.names}
        elif isinstance(node, ast.ClassDef | Function):
            others.add(node.name)
    return assigned, others


def root_of(node: ast.AST) -> str:
    """The name at the beginning of `name.a[b].c`; empty for the name alone and anything else."""
    if not isinstance(node, ast.Attribute | ast.Subscript):
        return ""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def changed_by(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Names whose object a statement or call changes, and whether by a method like `append`."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    parts = [
        part
        for one in targets
        for part in (one.elts if isinstance(one, ast.Tuple | ast.List) else [one])
    ]
    yield from ((root_of(part), False) for part in parts)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CHANGING
    ):
        yield root_of(node.func), True


def module_state(tree: ast.Module) -> Breaches:
    """A module holds constants: what a run chose is held by the run, as there may be two of them in
    a process.
    """
    assigned, others = names_of(tree)
    for function in functions(tree):
        given = function.args
        own = {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
        own |= {
            node.id
            for node in ast.walk(function)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                yield node.lineno, f"global {', '.join(node.names)}"
            for name, by_method in changed_by(node):
                if name in (assigned if by_method else assigned | others) - own:
                    yield node.lineno, f"{function.name} changes {name}, which its module holds"


def missing_docstring(tree: ast.Module) -> Breaches:
    if not ast.get_docstring(tree):
        yield 1, "no module docstring"


def imports_of_tests(tree: ast.Module) -> Breaches:
    """An installation has no tests, and another package may bring a folder of that name."""
    for node in walked(tree):
        names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "tests")


def settings_fields(tree: ast.Module) -> Iterator[ast.AnnAssign]:
    """Every field of every dataclass named ...Config, but for those that hold another such one."""
    classes = (
        node
        for node in walked(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config")
    )
    for part in classes:
        if any(ast.unparse(one).startswith("dataclass") for one in part.decorator_list):
            fields = (node for node in part.body if isinstance(node, ast.AnnAssign))
            yield from (
                node for node in fields if not ast.unparse(node.annotation).endswith("Config")
            )


def undescribed_settings(text: str) -> Breaches:
    """A setting is described in its line, or in a sentence in the line above; without a full stop
    that is a heading.
    """
    if not re.search(r"^class \w+Config\b", text, re.MULTILINE):
        return
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    for node in settings_fields(ast.parse(text)):
        own = any(
            line in comments for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        )
        above = comments.get(node.lineno - 1)
        sentence = (
            above is not None and above.line.lstrip().startswith("#") and above.string.endswith(".")
        )
        if not (own or sentence):
            yield (
                node.lineno,
                f"{ast.unparse(node.target)} does not say what it means, in which unit",
            )


def unranged_settings(tree: ast.Module) -> Breaches:
    for node in settings_fields(tree):
        ranged = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "number"
        if ast.unparse(node.annotation) in ("int", "float") and not ranged:
            yield node.lineno, f"{ast.unparse(node.target)} has no range"


def layer_of(module: str) -> int | None:
    """Number of the layer that `module` (dotted, without the package's own name) belongs to."""
    for number, layer in enumerate(LAYERS):
        if module.split(".")[0] in layer:
            return number
    return None


def imported_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Modules of the package that are imported, without the package's own name."""
    for node in walked(tree):
        if isinstance(node, ast.ImportFrom):
            names = [
                f"{node.module}.{name.name}" if node.module == "esper_soa" else (node.module or "")
                for name in node.names
            ]
            if node.level:
                yield node.lineno, "." * node.level
        elif isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        else:
            continue
        yield from (
            (node.lineno, name.removeprefix("esper_soa."))
            for name in names
            if name.startswith("esper_soa.")
        )


def upward_imports(tree: ast.Module, module: str) -> Breaches:
    own = layer_of(module)
    for line, name in imported_modules(tree):
        if name.startswith("."):
            yield line, "relative import"
            continue
        other = layer_of(name)
        if other is None:
            yield line, f"{name} belongs to no layer"
        elif own is not None and other > own:
            yield line, f"{module} imports {name}, which stands above it"


def foreign_engines(tree: ast.Module, module: str) -> Breaches:
    """Imports of parts of an engine by another one, or by a module that does not choose one."""
    for node in walked(tree):
        if not isinstance(node, ast.ImportFrom | ast.Import):
            continue
        before = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for full in (before + name.name for name in node.names):
            name = full.removeprefix("esper_soa.")
            if (
                (name + ".").startswith(ENGINES + ".")
                and full.startswith("esper_soa.")
                and module != CHOOSER
            ):
                own = ".".join(module.split(".")[:3])
                if not (module.startswith(ENGINES + ".") and (name + ".").startswith(own + ".")):
                    yield node.lineno, f"{module} imports {name}: only {CHOOSER} knows engines"


RULES = (
    parallel_assignments,
    too_many_arguments,
    uses_of_any,
    blanket_excepts,
    getattr_defaults,
    closures_in_loops,
    enums,
    missing_docstring,
    unranged_settings,
)


@cache
def parsed(path: Path) -> tuple[str, ast.Module]:
    """A file, its text and its tree."""
    text = path.read_text(encoding="utf-8")
    return text, ast.parse(text)


def breaches_of(path: Path) -> list[str]:
    text, tree = parsed(path)
    name = path.relative_to(PACKAGE).as_posix()
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    found = [breach for rule in RULES for breach in rule(tree)]
    found += too_long(tree, 40 if name.startswith("nets/engines/gpu/kernels/") else MAX_STATEMENTS)
    found += late_imports(
        tree, frozenset(function for file, function in LATE_IMPORTS if file == name)
    )
    if module.split(".")[0] == "nets":
        found += module_state(tree)
    if module != "__init__":
        found += foreign_engines(tree, module)
        found += upward_imports(tree, module)
        if layer_of(module) is None:
            found.append((1, f"{module} belongs to no layer"))
    lines = text.splitlines()
    found += [
        (number, "fmt: skip: the formatter decides")
        for number, line in enumerate(lines, 1)
        if re.search(r"#\s*fmt:\s*(skip|off)", line)
    ]
    found += [
        (number, "note of unfinished work")
        for number, line in enumerate(lines, 1)
        if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", line)
    ]
    return [f"{name}:{line}: {what}" for line, what in sorted(found)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_file_keeps_the_house_style(path: Path) -> None:
    assert breaches_of(path) == []


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: path.name)
def test_a_plugin_of_hydra_keeps_the_house_style(path: Path) -> None:
    _, tree = parsed(path)
    allowed = frozenset(name for file, name in LATE_IMPORTS if file == path.name)
    found = [
        breach
        for rule in (too_long, too_many_arguments, uses_of_any, blanket_excepts, missing_docstring)
        for breach in rule(tree)
    ]
    assert [*found, *late_imports(tree, allowed)] == []


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.name)
def test_a_benchmark_runs_without_the_tests(path: Path) -> None:
    assert list(imports_of_tests(parsed(path)[1])) == []


# torch refuses to read the old ones once convolutions and LSTM differ in theirs.
OLD_SWITCHES = ("allow_tf32", "set_float32_matmul_precision")


@pytest.mark.parametrize(
    "path", [*FILES, *BENCHMARKS], ids=lambda path: path.relative_to(PACKAGE.parent).as_posix()
)
def test_precisions_are_set_by_the_new_switches_alone(path: Path) -> None:
    assert [name for name in OLD_SWITCHES if name in path.read_text(encoding="utf-8")] == []


def test_an_import_of_a_test_is_found_however_it_is_written() -> None:
    for source in (
        "import tests.witness",
        "from tests import witness",
        "from tests.witness import Witness",
    ):
        assert len(list(imports_of_tests(ast.parse(source)))) == 1
    assert (
        list(
            imports_of_tests(
                ast.parse("import testing\nfrom benchmarks.sync_guard import SyncGuard")
            )
        )
        == []
    )


@pytest.mark.parametrize(
    "path", SETTINGS, ids=lambda path: path.relative_to(PACKAGE.parent).as_posix()
)
def test_every_setting_says_beside_it_what_it_means(path: Path) -> None:
    assert list(undescribed_settings(path.read_text(encoding="utf-8"))) == []


def test_the_settings_were_found() -> None:
    assert sum(len(list(settings_fields(parsed(path)[1]))) for path in SETTINGS) > 150


FIELD = "@dataclass\nclass PartConfig:\n"


@pytest.mark.parametrize(
    ("source", "breaches"),
    [
        (FIELD + "    a: int = number(1, 0, 2)", 1),
        (FIELD + "    # costs\n    a: int = number(1, 0, 2)", 1),
        (FIELD + "    b: int = number(1, 0, 2)  # Counts.\n    a: int = number(1, 0, 2)", 1),
        (FIELD + "    a: int = number(1, 0, 2)  # env-steps", 0),
        (FIELD + "    # Env-steps of a round.\n    a: int = number(1, 0, 2)", 0),
        (FIELD + "    a: dict = table(  # per head\n        make\n    )", 0),
        (FIELD + "    part: OtherConfig = field(default_factory=OtherConfig)", 0),
        ("class PartConfig(NamedTuple):\n    a: int", 0),
    ],
)
def test_a_setting_is_described_in_its_line_or_by_a_sentence_above(
    source: str, breaches: int
) -> None:
    assert len(list(undescribed_settings(source))) == breaches


def test_the_package_was_found() -> None:
    assert len(FILES) > 10


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (parallel_assignments, "a, b = 1, 2"),
        (parallel_assignments, "def f(self):\n    self.a, b = g(), h()"),
        (too_long, "def f():\n" + "    x = 1\n" * 31),
        (too_many_arguments, "def f(a, b, c, d, e, *f, g, **h): pass"),
        (late_imports, "def f():\n    import os"),
        (uses_of_any, "from typing import Any\nx: Any = 1"),
        (uses_of_any, "import typing\nx: list[typing.Any] = []"),
        (blanket_excepts, "try:\n    pass\nexcept:\n    pass"),
        (blanket_excepts, "try:\n    pass\nexcept (OSError, Exception):\n    pass"),
        (getattr_defaults, "getattr(x, 'y', None)"),
        (closures_in_loops, "for x in y:\n    z = lambda: x"),
        (enums, "from enum import IntEnum"),
        (missing_docstring, "x = 1"),
        (module_state, "chosen = None\ndef choose(x):\n    global chosen\n    chosen = x"),
        (module_state, "chosen = {}\ndef choose(x):\n    chosen['way'] = x"),
        (module_state, "found: list[str] = []\ndef choose(x):\n    found.append(x)"),
        (module_state, "class Way:\n    name = ''\ndef choose(x):\n    Way.name = x"),
        (
            module_state,
            "from esper_soa.nets import layers\ndef choose(x):\n    layers.chosen.way = x",
        ),
        (
            unranged_settings,
            "@dataclass\nclass PartConfig:\n    a: float = 1.0  # seconds\n    b: str = ''",
        ),
    ],
)
def test_a_rule_finds_its_breach(rule, source: str) -> None:
    assert len(list(rule(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (parallel_assignments, "a, b = b, a\n(c, d), e = f()\ng, *h = x, *y"),
        (too_long, "def f():\n" + "    x = 1\n" * 30),
        (too_many_arguments, "def f(self, a, b, c, d, e, f, g): pass"),
        (late_imports, "import os\ndef f(): pass"),
        (blanket_excepts, "try:\n    pass\nexcept (OSError, ValueError):\n    pass"),
        (getattr_defaults, "getattr(x, 'y')"),
        (closures_in_loops, "z = lambda: 1"),
        (missing_docstring, '"""Says what it is."""'),
        (
            module_state,
            "WAYS = {}\ndef found(x):\n    ways = dict(WAYS)\n    ways[x] = 1\n    return ways",
        ),
        (module_state, "import torch\ndef f(x):\n    torch.add(x, x)\n    x.grad = None"),
        (module_state, "x = 1\ndef f(x):\n    x.y = 2"),
        (
            unranged_settings,
            "@dataclass\nclass PartConfig:\n    a: float = number(1.0, 0, 2)  # seconds",
        ),
    ],
)
def test_a_rule_lets_good_code_pass(rule, source: str) -> None:
    assert list(rule(ast.parse(source))) == []


def test_imports_point_one_way() -> None:
    upward = "from esper_soa.agent.ppo import update"
    package = "from esper_soa import trainer"
    downward = "from esper_soa.nets.streams import Stream\nimport esper_soa.state"
    assert len(list(upward_imports(ast.parse(upward), "env.step"))) == 1
    assert len(list(upward_imports(ast.parse(package), "ops.report"))) == 1
    assert list(upward_imports(ast.parse(downward), "env.step")) == []


def test_only_the_chooser_knows_engines_and_engines_not_each_other() -> None:
    whole = "from esper_soa.nets.engines.cpu.engine import CpuEngine"
    package = "from esper_soa.nets.engines import gpu"
    for source in (
        whole,
        package,
        "import esper_soa.nets.engines.cpu.engine",
        "from esper_soa.nets import engines",
    ):
        for module in ("build", "nets.layers", "nets.engine", "nets.engines.torch.engine"):
            assert len(list(foreign_engines(ast.parse(source), module))) == 1, (source, module)
        assert list(foreign_engines(ast.parse(source), CHOOSER)) == []
    assert list(foreign_engines(ast.parse(whole), "nets.engines.cpu.images")) == []
    assert (
        list(foreign_engines(ast.parse("from esper_soa.nets.engine import Engine"), "env.step"))
        == []
    )
