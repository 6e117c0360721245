"""The rules of the house that ruff (pyproject.toml) does not know, as a walk over syntax trees:
settings that say what they mean, imports that point one way.

Each rule is a function from a parsed file to the places that break it, so that the rules themselves
can be tested.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.imports import (
    by_folder,
    circles,
    class_names_used_twice,
    imported_names,
    imports_against_the_order,
    imports_between,
    module_of,
    parsed,
    reads_of_setup_settings,
    upward_imports,
    walked,
)
from tests.wording import (
    callables_in,
    callables_of,
    counted,
    positional_arguments,
    sentences_without_a_noun,
    starred_tuples,
)

PACKAGE = Path(__file__).resolve().parents[1] / "esper_soa"
FILES = [
    *sorted(PACKAGE.rglob("*.py")),
    *sorted((PACKAGE.parent / "hydra_plugins").rglob("*.py")),
    PACKAGE.parent / "benchmarks" / "eps_config.py",
]
RANGED = ("number", "signed", "weight")  # what makes the field of a setting that is a number

MOST_MODULES = 97  # that a reader of the simulator meets
MOST_LINES_UNTESTED = 60  # of a module without a test file of its name

# Imports against the order of imports.LAYERS that are still there: (module, what it imports from).
AGAINST_THE_ORDER: set[tuple[str, str]] = set()
# Class names that more than one class still has.
USED_TWICE: set[str] = set()
# Functions that read what `Setup` is made of: the one that makes it, and those that are about a
# command's or a recorded run's settings, of which nothing is built.
READS_SETUP_SETTINGS = {
    "lab.compare.lengths": {"host_flop"},
    "training.loop.build": {"make_setup"},
    "training.loop.evaluation": {"evaluate_in_session"},  # threads, of the command
    "training.start.runs": {"_source", "_validation_order", "export", "policy", "tasks"},
}
# What an engine is made of is the business of that engine and of whoever chooses between them.
CHOOSER = "nets.choose"
ENGINES = "nets.engines"
CHANGING = {
    *("add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"),
    *("setdefault", "update"),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Breaches = Iterator[tuple[int, str]]


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in walked(tree) if isinstance(node, Function))


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


def getattr_defaults(tree: ast.Module) -> Breaches:
    for node in walked(tree):
        called = node.func if isinstance(node, ast.Call) else None
        if (
            isinstance(called, ast.Name)
            and called.id == "getattr"
            and len(node.args) + len(node.keywords) > 2
        ):
            yield node.lineno, "getattr with a default"


def names_of(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Names that a module binds outside functions: by assignment; by import, class, function."""
    assigned = set[str]()
    others = set[str]()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            stored = [one for one in ast.walk(node) if isinstance(one, ast.Name)]
            assigned |= {one.id for one in stored if isinstance(one.ctx, ast.Store)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            others |= {(name.asname or name.name).split(".")[0] for name in node.names}
        elif isinstance(node, ast.ClassDef | Function):
            others.add(node.name)
    return assigned, others


def root_of(node: ast.AST) -> str:
    """The name at the beginning of `name.a[b].c`; empty for the name alone and anything else."""
    inner = node
    while isinstance(inner, ast.Attribute | ast.Subscript):
        inner = inner.value
    return inner.id if isinstance(inner, ast.Name) and inner is not node else ""


def changed_by(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Names whose object a node changes, and whether by a method like `append`."""
    if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
        yield root_of(node), False
    called = node.func if isinstance(node, ast.Call) else None
    if isinstance(called, ast.Attribute) and called.attr in CHANGING:
        yield root_of(called), True


def module_state(tree: ast.Module) -> Breaches:
    """A module holds constants: what a run chose is held by the run, as there may be two of them in
    a process.
    """
    assigned, others = names_of(tree)
    for function in functions(tree):
        nodes = list(ast.walk(function))
        own = {node.arg for node in nodes if isinstance(node, ast.arg)}
        stored = [node for node in nodes if isinstance(node, ast.Name)]
        own |= {node.id for node in stored if isinstance(node.ctx, ast.Store)}
        for node in nodes:
            if isinstance(node, ast.Global):
                yield node.lineno, f"global {', '.join(node.names)}"
            for name, by_method in changed_by(node):
                if name in (assigned if by_method else assigned | others) - own:
                    yield node.lineno, f"{function.name} changes {name}, which its module holds"


def settings_fields(tree: ast.Module) -> Iterator[ast.AnnAssign]:
    """Every field of every dataclass named ...Config, but for those that hold another such one."""
    for part in walked(tree):
        if isinstance(part, ast.ClassDef) and part.name.endswith("Config") and part.decorator_list:
            fields = [node for node in part.body if isinstance(node, ast.AnnAssign)]
            yield from (
                node for node in fields if not ast.unparse(node.annotation).endswith("Config")
            )


def undescribed_settings(text: str) -> Breaches:
    """A setting is described in its line, or in a sentence in the line above; without a full stop
    that is a heading.
    """
    lines = ["", *text.splitlines()]
    for node in settings_fields(ast.parse(text)):
        own = any("#" in line for line in lines[node.lineno : (node.end_lineno or 0) + 1])
        if not own and not re.fullmatch(r"\s*#.*\.", lines[node.lineno - 1]):
            name = ast.unparse(node.target)
            yield node.lineno, f"{name} does not say what it means, in which unit"


def unranged_settings(tree: ast.Module) -> Breaches:
    for node in settings_fields(tree):
        ranged = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in RANGED
        if ast.unparse(node.annotation) in ("int", "float") and not ranged:
            yield node.lineno, f"{ast.unparse(node.target)} has no range"


def foreign_engines(tree: ast.Module, module: str) -> Breaches:
    """Imports of parts of an engine by another one, or by a module that does not choose one."""
    engine = ".".join(module.split(".")[:3]) + "."
    allowed = engine if module.startswith(f"{ENGINES}.") else "none"
    for line, name in imported_names(tree):
        foreign = f"{name}.".startswith(f"{ENGINES}.") and not f"{name}.".startswith(allowed)
        if foreign and module != CHOOSER:
            yield line, f"{module} imports {name}: only {CHOOSER} knows engines"


RULES = (parallel_assignments, getattr_defaults, unranged_settings)

# Ceilings for the whole package, see wording.py. They only fall.
MOST_IDENTIFIERS = {"one": 60, "own": 40}
MOST_STARRED_TUPLES = 10
MOST_POSITIONAL_CALLS = 0  # calls with more than three positional arguments
MOST_FRAGMENTS = 0  # docstrings and comments that begin without their noun


def breaches_of(path: Path) -> list[str]:
    text, tree = parsed(path)
    name = path.relative_to(PACKAGE.parent).as_posix()
    own = path.is_relative_to(PACKAGE)
    module = module_of(path, PACKAGE if own else PACKAGE.parent)
    found = list(undescribed_settings(text))
    if not name.startswith("benchmarks/"):
        found += [breach for rule in RULES for breach in rule(tree)]
    if module.split(".")[0] == "nets":
        found += module_state(tree)
    if own and module:
        found += foreign_engines(tree, module)
    found += [
        (number, "fmt: skip: the formatter decides")
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(r"#\s*fmt:\s*(skip|off)", line)
    ]
    return [f"{name}:{line}: {what}" for line, what in sorted(found)]


def test_all_files_keep_the_house_style() -> None:
    assert len(FILES) > 10
    assert [breach for path in FILES for breach in breaches_of(path)] == []
    assert sum(len(list(settings_fields(parsed(path)[1]))) for path in FILES) > 150


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
def test_a_setting_is_described_in_its_line_or_in_one_above(source: str, breaches: int) -> None:
    assert len(list(undescribed_settings(source))) == breaches


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (parallel_assignments, "a, b = 1, 2"),
        (parallel_assignments, "def f(self):\n    self.a, b = g(), h()"),
        (getattr_defaults, "getattr(x, 'y', None)"),
        (module_state, "chosen = None\ndef choose(x):\n    global chosen\n    chosen = x"),
        (module_state, "chosen = {}\ndef choose(x):\n    chosen['way'] = x"),
        (module_state, "found: list[str] = []\ndef choose(x):\n    found.append(x)"),
        (module_state, "class Way:\n    name = ''\ndef choose(x):\n    Way.name = x"),
        (module_state, "from nets import layers\ndef choose(x):\n    layers.chosen.way = x"),
        (unranged_settings, FIELD + "    a: float = 1.0  # seconds\n    b: str = ''"),
    ],
)
def test_a_rule_finds_its_breach(rule, source: str) -> None:
    assert len(list(rule(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (parallel_assignments, "a, b = b, a\n(c, d), e = f()\ng, *h = x, *y"),
        (getattr_defaults, "getattr(x, 'y')"),
        (module_state, "WAYS = {}\ndef found(x):\n    ways = dict(WAYS)\n    ways[x] = 1"),
        (module_state, "import torch\ndef f(x):\n    torch.add(x, x)\n    x.grad = None"),
        (module_state, "x = 1\ndef f(x):\n    x.y = 2"),
        (unranged_settings, FIELD + "    a: float = number(1.0, 0, 2)  # seconds"),
    ],
)
def test_a_rule_lets_good_code_pass(rule, source: str) -> None:
    assert list(rule(ast.parse(source))) == []


def test_things_are_called_by_their_nouns() -> None:
    """`one` and `own` stand for what a reader would have to look up."""
    counts = counted(PACKAGE, MOST_IDENTIFIERS)
    assert [word for word, most in MOST_IDENTIFIERS.items() if counts[word] > most] == [], counts


def test_arguments_say_what_they_are() -> None:
    callables = callables_of(PACKAGE)
    tuples = list[str]()
    positional = list[str]()
    for path in sorted(PACKAGE.rglob("*.py")):
        module = module_of(path, PACKAGE)
        tree = parsed(path)[1]
        tuples += [f"{module}:{line}: {words}" for line, words in starred_tuples(tree)]
        if not module.startswith("nets.engines.gpu.kernels."):
            found = positional_arguments(tree, module, callables)
            positional += [f"{module}:{line}: {words}" for line, words in found]
    assert len(tuples) <= MOST_STARRED_TUPLES, tuples
    assert len(positional) <= MOST_POSITIONAL_CALLS, positional


def test_docstrings_and_comments_begin_with_their_noun() -> None:
    fragments = list[str]()
    for path in sorted(PACKAGE.rglob("*.py")):
        found = sentences_without_a_noun(*parsed(path))
        fragments += [f"{module_of(path, PACKAGE)}:{line}: {words}" for line, words in found]
    assert len(fragments) <= MOST_FRAGMENTS, fragments


@pytest.mark.parametrize(
    ("source", "breaches"),
    [
        ("def f(a):\n    pair = a, 2\n    g(*pair)", 1),
        ("def f(a):\n    pair = [a, 2]\n    g(*pair)", 0),
        ("def f(*pair):\n    g(*pair)", 0),
    ],
)
def test_a_tuple_made_to_be_starred_is_found(source: str, breaches: int) -> None:
    assert len(list(starred_tuples(ast.parse(source)))) == breaches


@pytest.mark.parametrize(
    ("source", "breaches"),
    [
        ("from esper_soa.env.step import f\nf(1, 2, 3, 4)", 1),
        ("from esper_soa.env import step\nstep.f(1, 2, 3, 4)", 1),
        ("from esper_soa.env.step import K\nK(1, 2, 3, 4)", 1),
        ("class L:\n    def g(self, a, b, c, d): ...\n    def h(self): self.g(1, 2, 3, 4)", 1),
        ("from esper_soa.env.step import f\nf(1, 2, 3, d=4)\nf(*x, 2, 3, 4)", 0),
        ("from esper_soa.env.step import rest\nrest(1, 2, 3, 4)\nprint(1, 2, 3, 4)", 0),
    ],
)
def test_a_fourth_positional_argument_is_found(source: str, breaches: int) -> None:
    made = ast.parse("def f(a, b, c, d): ...\ndef rest(a, *b): ...\nclass K: ...")
    tree = ast.parse(source)
    named = [*callables_in(made, "env.step"), *callables_in(tree, "here")]
    callables = {name for name, open_ended in named if not open_ended}
    assert len(list(positional_arguments(tree, "here", callables))) == breaches


def test_a_sentence_without_its_noun_is_found() -> None:
    source = (
        'def f():\n    """Of a run."""\n# What is there.\nx = 1  # of a run\n# As large as x.\n'
    )
    breaches = list(sentences_without_a_noun(source, ast.parse(source)))
    assert sorted(line for line, _ in breaches) == [2, 3, 5]


def test_imports_point_one_way() -> None:
    for source, module, breaches in (
        ("from esper_soa.agent.ppo import update", "env.step", 1),
        ("from esper_soa import lab", "training.trainer", 1),
        ("from esper_soa.system.streams import Stream\nimport esper_soa.state", "env.step", 0),
    ):
        assert len(list(upward_imports(ast.parse(source), module))) == breaches, source
    assert imports_against_the_order(PACKAGE) == AGAINST_THE_ORDER  # shorten it where one has gone


def test_no_module_imports_itself_by_way_of_others_and_no_room_of_lab_and_training() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"d"}}) == [{"b", "c"}, {"d"}]
    imports = imports_between(PACKAGE)
    assert "lab.sweep.search" in imports["lab.sweep.pruner"]
    assert circles(imports) == []
    for rooms in ("lab", "training"):
        within = {name: names for name, names in imports.items() if name.startswith(f"{rooms}.")}
        folders = by_folder(within, PACKAGE)
        assert len(folders) >= 4
        assert circles(folders) == []


def test_a_simulator_reaches_few_modules_and_no_part_of_the_lab() -> None:
    imports = imports_between(PACKAGE)
    reached = set[str]()
    found = {"simulator"}
    while found:
        reached |= found
        found = set().union(*(imports[name] for name in found)) - reached
    assert len(reached) <= MOST_MODULES, reached
    parts = "lab", "nets.engines.cpu", "nets.engines.gpu", "agent.ppo", "training.loop.collect"
    assert [name for name in reached if name.startswith(parts)] == []


def test_settings_become_a_setup_in_one_place() -> None:
    found = {
        module_of(path, PACKAGE): reads_of_setup_settings(parsed(path)[1])
        for path in PACKAGE.rglob("*.py")
    }
    beyond = {
        module: names
        for module, names in found.items()
        if names and not module.startswith("config.")
    }
    assert beyond == READS_SETUP_SETTINGS


def test_a_class_name_means_one_thing(tmp_path: Path) -> None:
    """Who reads a name in an error or a doc finds one class of that name."""
    for name in ("one", "other"):
        (tmp_path / f"{name}.py").write_text(f"class {name.title()}:\n    class Same: ...\n")
    assert class_names_used_twice(tmp_path) == {"Same"}
    assert class_names_used_twice(PACKAGE) == USED_TWICE  # shorten it where one has gone


def test_only_the_chooser_knows_engines_and_engines_not_each_other() -> None:
    whole = "from esper_soa.nets.engines.cpu.engine import CpuEngine"
    for source in (
        whole,
        "from esper_soa.nets.engines import gpu",
        "import esper_soa.nets.engines.cpu.engine",
        "from esper_soa.nets import engines",
    ):
        for module in ("build", "nets.layers", "nets.engine", "nets.engines.torch.engine"):
            assert len(list(foreign_engines(ast.parse(source), module))) == 1, (source, module)
        assert list(foreign_engines(ast.parse(source), CHOOSER)) == []
    own = ast.parse("from esper_soa.nets.engine import Engine")
    assert list(foreign_engines(ast.parse(whole), "nets.engines.cpu.images")) == []
    assert list(foreign_engines(own, "env.step")) == []


def test_the_page_for_developers_names_every_room_and_files_that_are_there() -> None:
    page = (PACKAGE.parent / "docs" / "development.md").read_text(encoding="utf-8")
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    tree = page.split("```")[1]
    assert rooms <= set(re.findall(r"(\w+)/", tree))
    files = set(re.findall(r"`([\w/.]+(?:\.(?:py|yaml|md)|/))`", page))
    assert len(files) > 20
    above = (PACKAGE, PACKAGE.parent)
    assert [name for name in files if not any((root / name).exists() for root in above)] == []


def test_tests_stand_in_the_rooms_that_they_test() -> None:
    tests = PACKAGE.parent / "tests"
    rooms = {path.parent for path in tests.rglob("test_*.py")}
    for folder in rooms - {tests, tests / "benchmarks", tests / "gpu"}:
        room = PACKAGE / folder.relative_to(tests)
        assert (room / "__init__.py").exists(), f"{folder}: the package has no {room}"


def test_a_module_has_its_tests_in_the_room_of_its_name_or_in_the_list() -> None:
    tests = PACKAGE.parent / "tests"
    listed = yaml.safe_load((tests / "tested_elsewhere.yaml").read_text(encoding="utf-8"))
    names = {
        path.relative_to(PACKAGE).as_posix(): tests / path.relative_to(PACKAGE).parent
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py" and path.read_bytes().count(b"\n") > MOST_LINES_UNTESTED
    }
    without = {
        name for name, room in names.items() if not (room / f"test_{Path(name).name}").exists()
    }
    assert without == set(listed)
    assert [test for test in listed.values() if not (tests / test).exists()] == []
