"""Every public name of the package has a docstring, except where its signature or its base says it already.

A name is public if neither it nor its class begins with an underscore; what is within a function is not public. Two kinds of
methods and functions need no docstring of their own:

- one that implements what a base class or a Protocol of ours documents: there is one place to read what it must do. A class
  implements a Protocol if it has all of its methods, as mypy has it;
- one of a single simple statement: its name, its types (mypy asks for all of them) and that statement are as short as a
  sentence about them, which would repeat them.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import synvirt

ROOT = Path(synvirt.__file__).parent
# Migrations of the store: each is named by what it does, and is called by Alembic alone.
LEFT_OUT = ROOT / "store" / "alembic"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Compound = ast.If | ast.For | ast.AsyncFor | ast.While | ast.Try | ast.With | ast.AsyncWith | ast.Match | Function


@dataclass
class Class:
    """A class of ours. `has`: its methods and attributes. `documented`: the methods that it says what they must do."""

    bases: tuple[str, ...]
    methods: set[str] = field(default_factory=set)
    has: set[str] = field(default_factory=set)
    documented: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, node: ast.ClassDef) -> Self:
        found = cls(tuple(map(_name, node.bases)))
        functions = [one for one in node.body if isinstance(one, Function)]
        found.methods = {one.name for one in functions}
        # The laws of a Protocol are mostly those of its docstring, for all of its methods.
        laws = found.is_protocol and ast.get_docstring(node)
        found.documented = {one.name for one in functions if laws or ast.get_docstring(one)}
        found.has = found.methods | {
            one.id if isinstance(one, ast.Name) else one.attr
            for one in ast.walk(node)
            if isinstance(one, ast.Name | ast.Attribute) and isinstance(one.ctx, ast.Store)
        }
        return found

    @property
    def is_protocol(self) -> bool:
        return "Protocol" in self.bases


Classes = Mapping[str, list[Class]]
# The methods of each Protocol with those above it, and which of them are documented there.
Protocols = list[tuple[set[str], set[str]]]


def _name(base: ast.expr) -> str:
    """The name of a base, without its module and its parameters."""
    inner = base.value if isinstance(base, ast.Subscript) else base
    return inner.attr if isinstance(inner, ast.Attribute) else inner.id if isinstance(inner, ast.Name) else ""


def _above(one: Class, classes: Classes) -> Iterator[Class]:
    """The class, and those of ours that it inherits from. Those of one name are all taken: it is enough that one says it."""
    yield one
    for base in one.bases:
        for above in classes.get(base, ()):
            if above is not one:
                yield from _above(above, classes)


def documented_elsewhere(one: Class, classes: Classes, protocols: Protocols) -> set[str]:
    """The methods that a base of the class documents, or a Protocol that it implements."""
    family = list(_above(one, classes))
    has = {name for member in family for name in member.has}
    return set().union(*(member.documented for member in family[1:]), *(laid for wanted, laid in protocols if wanted <= has))


def protocols_of(classes: Classes) -> Protocols:
    """Of all classes that are Protocols."""
    families = [list(_above(one, classes)) for others in classes.values() for one in others if one.is_protocol]
    return [
        (set().union(*(member.methods for member in family)), set().union(*(member.documented for member in family)))
        for family in families
    ]


@dataclass(frozen=True)
class Undocumented:
    """A public class or function without a docstring. `of`: the class that it is a method of."""

    line: int
    name: str
    of: Class | None = None


def undocumented(node: ast.ClassDef | Function, name: str, of: Class | None = None) -> Iterator[Undocumented]:
    """Those of them that the node is or has; a method may be documented elsewhere."""
    if node.name.startswith("_"):
        return
    if isinstance(node, Function):
        if not ast.get_docstring(node) and not _is_simple(node):
            yield Undocumented(node.lineno, name, of)
        return
    own = Class.of(node)
    if not ast.get_docstring(node) and "__doc__" not in own.has:
        yield Undocumented(node.lineno, name)
    for one in node.body:
        if isinstance(one, ast.ClassDef | Function):
            yield from undocumented(one, f"{name}.{one.name}", own)


def _is_simple(node: Function) -> bool:
    return len(node.body) == 1 and not isinstance(node.body[0], Compound)


def test_every_public_name_says_what_it_is() -> None:
    classes: dict[str, list[Class]] = defaultdict(list)
    missing, found = [], []
    for path in sorted(ROOT.rglob("*.py")):
        if LEFT_OUT in path.parents:
            continue
        tree, where = ast.parse(path.read_text()), path.relative_to(ROOT)
        missing += [] if ast.get_docstring(tree) else [f"{where}:1 the module"]
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(Class.of(node))
        for node in tree.body:
            if isinstance(node, ast.ClassDef | Function):
                found += [(where, one) for one in undocumented(node, node.name)]
    protocols = protocols_of(classes)
    for where, one in found:
        if one.of is None or one.name.rpartition(".")[2] not in documented_elsewhere(one.of, classes, protocols):
            missing.append(f"{where}:{one.line} {one.name}")
    assert not missing, f"{len(missing)} without a docstring:\n" + "\n".join(missing)
