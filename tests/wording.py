"""The wording of the package's source: arguments that say what they are, words that name things.

Each rule is a function from parsed files to the places that break it; test_house_style.py holds
them to their limits.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.imports import module_of, parsed, walked

MAX_POSITIONAL = 3  # arguments of a call; those beyond are passed by keyword
# Beginnings of a docstring or comment that lacks the noun which it is about, and of its sentences.
FRAGMENT = re.compile(r"(Of|What|As) |.*[.:] Of [a-z]", re.DOTALL)

Function = ast.FunctionDef | ast.AsyncFunctionDef
Breaches = Iterator[tuple[int, str]]


def identifiers(text: str) -> Counter[str]:
    """How often each name stands in a source."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return Counter(token.string for token in tokens if token.type == tokenize.NAME)


def starred_tuples(tree: ast.Module) -> Breaches:
    """Calls into which a local name is starred that was bound to a tuple display."""
    found = set[tuple[int, str]]()
    for function in (node for node in walked(tree) if isinstance(node, Function)):
        nodes = list(ast.walk(function))
        assigned = [
            node.targets
            for node in nodes
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        ]
        tuples = {ast.unparse(target) for targets in assigned for target in targets}
        for call in (node for node in nodes if isinstance(node, ast.Call) and tuples):
            for argument in (part for part in call.args if isinstance(part, ast.Starred)):
                name = ast.unparse(argument.value)
                if name in tuples:
                    found.add((argument.lineno, f"*{name} is a tuple that was made for this call"))
    yield from sorted(found)


def callables_in(tree: ast.Module, module: str) -> Iterator[tuple[str, bool]]:
    """Dotted name of every function, class and method, and whether it takes *args."""
    for node in tree.body:
        if isinstance(node, Function):
            yield f"{module}.{node.name}", node.args.vararg is not None
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, Function)]
            open_ended = {part.name: part.args.vararg is not None for part in methods}
            yield f"{module}.{node.name}", open_ended.get("__init__", False)
            yield from (
                (f"{module}.{node.name}.{name}", takes) for name, takes in open_ended.items()
            )


def callables_of(package: Path) -> set[str]:
    """Dotted names of the functions, classes and methods of a package, but those with *args."""
    trees = [(parsed(path)[1], module_of(path, package)) for path in package.rglob("*.py")]
    named = (pair for tree, module in trees for pair in callables_in(tree, module))
    return {name for name, open_ended in named if not open_ended}


def known_names(tree: ast.Module, module: str) -> dict[str, str]:
    """Dotted names in the package by the names that a module gives them."""
    names = {}
    for node in walked(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("esper_soa"):
            room = (node.module or "").removeprefix("esper_soa").removeprefix(".")
            for name in node.names:
                names[name.asname or name.name] = f"{room}.{name.name}".removeprefix(".")
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef):
            names[node.name] = f"{module}.{node.name}"
    return names


def positional_arguments(tree: ast.Module, module: str, callables: set[str]) -> Breaches:
    """Calls of functions and classes of the package with more than three positional arguments."""
    names = known_names(tree, module)
    scopes: list[tuple[ast.AST, dict[str, str]]] = [(tree, names)]
    for node in (node for node in walked(tree) if isinstance(node, ast.ClassDef)):
        here = f"{module}.{node.name}"
        scopes.append((node, {"self": here, "cls": here}))
    for scope, known in scopes:
        for call in (node for node in ast.walk(scope) if isinstance(node, ast.Call)):
            starred = any(isinstance(part, ast.Starred) for part in call.args)
            if starred or len(call.args) <= MAX_POSITIONAL:
                continue
            first, _, rest = ast.unparse(call.func).partition(".")
            callee = f"{known.get(first, '')}.{rest}".removesuffix(".")
            if callee in callables:
                yield call.lineno, f"{callee} is called with {len(call.args)} positional arguments"


def sentences_without_a_noun(text: str, tree: ast.Module) -> Breaches:
    """Docstrings and comments that begin with "Of", "What" or "As"."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    parts: list[tuple[int, str]] = [
        (node.body[0].lineno, ast.get_docstring(node) or "")
        for node in walked(tree)
        if isinstance(node, documented) and node.body
    ]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            parts.append((token.start[0], token.string.lstrip("# ")))
    for line, words in parts:
        if FRAGMENT.match(words):
            yield line, f"{words.splitlines()[0]!r} lacks its noun"


def counted(package: Path, words: Iterable[str]) -> dict[str, int]:
    """How often each word is an identifier of a package."""
    total = Counter[str]()
    for path in sorted(package.rglob("*.py")):
        total += identifiers(parsed(path)[0])
    return {word: total[word] for word in words}
