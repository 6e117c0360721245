"""Tables of the fields of records in esper_soa.state, for the site: a hook of mkdocs.

A page asks for them by a line `<!-- fields: Slots Ramp -->`. Names, dtypes, shapes and values at
the start are those of the classes, and the meaning of a field is its comment there.
"""

import inspect
import re

from esper_soa import state

DTYPES = {kind: str(dtype).removeprefix("torch.") for kind, dtype in state.DTYPES.items()}
ASKED = re.compile(r"<!-- fields: ([\w ]+) -->")
FIELD = re.compile(r"^    (\w+): (?:Annotated\[Tensor, (.*?)\]|\w+)(?:  # (.*))?$")
SHAPE = re.compile(r"\[(?:N|N, [^\]]*)\]")


def fields(name: str) -> list[tuple[str, str, str, str]]:
    """Rows of a record: field, dtype with shape, value that it begins at, meaning with unit."""
    kind = getattr(state, name)
    begins = state.initial_values(kind)
    shape = next(iter(SHAPE.findall(kind.__doc__)), "")
    rows = []
    above = list[str]()
    for line in inspect.getsource(kind).splitlines():
        comment = line.strip().removeprefix("# ") if line.startswith("    # ") else ""
        found = FIELD.match(line)
        if found:
            field, value, words = found.groups()
            meaning = " ".join([*above, words or ""]).strip(" .")
            if value:
                size = f"{DTYPES[type(begins[field])]} {shape}"
                value = value.removeprefix("vocabulary.")
            else:  # the comment begins with dtype and shape
                size, _, meaning = meaning.partition("]")
                size = f"{size[:1].lower()}{size[1:]}]".replace("HISTORY", str(state.HISTORY))
            rows.append((field, size, value or "", meaning.lstrip(", ")))
        above = [*above, comment] if comment else []
    return rows


def table(name: str) -> str:
    """The section of a record in Markdown: what it is, its fields and its properties."""
    kind = getattr(state, name)
    lines = [f"### {name}", "", inspect.cleandoc(kind.__doc__), ""]
    lines += ["| field | type and shape | at the start | meaning |", "|---|---|---|---|"]
    lines += ["| `{}` | {} | {} | {} |".format(*row).replace("[N", "\\[N") for row in fields(name)]
    for title, member in vars(kind).items():
        if isinstance(member, property) and member.fget.__module__ == state.__name__:
            lines += ["", f"`{title}`: {inspect.cleandoc(member.__doc__)}"]
    return "\n".join(lines) + "\n"


def on_page_markdown(markdown: str, **_: object) -> str:
    """The page with the tables that it asks for; mkdocs calls it."""
    return ASKED.sub(lambda asked: "\n".join(map(table, asked[1].split())), markdown)
