"""Whether the source of a test module can define a test that a run did not collect."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Final, TypeGuard
from urllib.parse import unquote

from pytest_fsdp_comm.text.words import show_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Set as AbstractSet
    from pathlib import Path

# Note [Doubt]: a run takes one branch: a GPU is there or not, an import succeeds or not. A reviewed
# file may be removed only if no branch can define its test. So whatever defines names that are not
# written in the module leaves a doubt, which is the text that names it: star imports, ``exec``,
# ``globals()``, ``setattr``, base classes of other modules, decorators that may make several tests,
# calls that are given the module or a class. Parameters are known where constants list them.

_BASES_WITHOUT_TESTS: Final = frozenset(
    {"object", "TestCase", "ABC", "ABCMeta", "Generic", "Protocol"}
)
# As decorators, these make no tests, and no parameters but what is written there.
_PLAIN: Final = frozenset(
    {"pytest", "mark", "fixture", "torch", "functools", "contextlib", "unittest", "mock"}
    | {"dataclass", "dataclasses", "staticmethod", "classmethod", "property"}
)
_CHANGES: Final = frozenset({"append", "extend", "insert", "remove", "pop", "clear", "update"})
_ITEM_HOOKS: Final = ("pytest_pycollect_makeitem", "pytest_pycollect_makemodule")
_SHOWN: Final = 60
_DISPLAYS: Final = (ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp)
_FUNCTION: Final = (ast.FunctionDef, ast.AsyncFunctionDef)


def read_module(path: Path, root: Path) -> Source:
    """Read a test module and the conftests above it, up to the project's root."""
    above = [directory for directory in path.parents if directory.is_relative_to(root)]
    files = (directory / "conftest.py" for directory in above)
    return Source(path, root, [Source(file, root) for file in files if file.is_file()])


class Source:
    """The source of a test module or conftest."""

    def __init__(self, path: Path, root: Path, conftests: Sequence[Source] = ()) -> None:
        """Read and index it; doubts name files relative to `root`, and `conftests` apply to it."""
        self._shown = show_path(path, root)
        self._all = (self, *conftests)
        # All nodes that bind a name, in any branch, by scope and name.
        self._names: dict[ast.AST, defaultdict[str, list[ast.AST]]] = {}
        self._values: dict[ast.AST, ast.expr] = {}
        self._makers: list[tuple[str, str]] = []
        # What cannot be read may define anything.
        self._tree = ast.Module([], [])
        try:
            self._tree = ast.parse(path.read_bytes())
            self._index(self._tree)
            loaded = {one.id for one in ast.walk(self._tree) if _is_loaded(one)}
            self._makers += self._find_makers(self._tree, loaded, is_called=False)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            self._index(self._tree)
            self._makers.append((f"{self._shown} cannot be read as Python", ""))
        self._nodes = list(ast.walk(self._tree))

    def _index(self, scope: ast.AST) -> None:
        names = self._names[scope] = defaultdict(list)
        pending = list(ast.iter_child_nodes(scope))
        while pending:
            node = pending.pop()
            match node:
                case ast.ClassDef(name=name):
                    names[name].append(node)
                    self._index(node)
                    continue
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    names[name].append(node)
                case ast.Name(name, ast.Store()):
                    names[name].append(node)
                case ast.Attribute(attr=name, ctx=ast.Store()):
                    # Its object may be any class.
                    names[f".{name}"].append(node)
                case ast.alias(name=name, asname=given):
                    names[given or name.partition(".")[0]].append(node)
                case ast.Assign([target], value) | ast.AnnAssign(target, value=ast.expr() as value):
                    self._values[target] = value
            pending += ast.iter_child_nodes(node)

    # What defines tests.

    def find(self, test: str) -> str | None:
        """Return empty if a branch defines the test, None if none can, otherwise what may."""
        if "~" in test:
            return "its name is too long to be read back"
        *classes, name = parts = unquote(test).split(".")
        scopes, doubt = self._scopes(classes)
        if any(self._names[scope][name] for scope in scopes):
            return ""
        if classes and any(names[f".{name}"] for names in self._names.values()):
            return ""
        made = (what for what, start in self._makers if any(p.startswith(start) for p in parts))
        hooks = (hook for source in self._all for hook in source.hooks(*_ITEM_HOOKS))
        return next(filter(None, (doubt, *made, *hooks)), None)

    def _scopes(self, classes: Sequence[str]) -> tuple[list[ast.AST], str]:
        """All that may be the class, with its bases, and what else may be; the module for none."""
        scopes: list[ast.AST] = [self._tree]
        doubt = ""
        for name in classes:
            found = [node for scope in scopes for node in self._names[scope][name]]
            scopes = []
            for node in found:
                if not isinstance(node, ast.ClassDef):
                    doubt = doubt or self._at(self._values.get(node, node))
                elif node not in scopes:
                    scopes.append(node)
                    for base in (*node.bases, *(keyword.value for keyword in node.keywords)):
                        if isinstance(base, ast.Name) and self._names[self._tree][base.id]:
                            found += self._names[self._tree][base.id]
                        elif _last_name(base) not in _BASES_WITHOUT_TESTS:
                            doubt = doubt or self._at(base, f"base class of {node.name}: ")
        return scopes, doubt

    def hooks(self, *names: str) -> Iterator[str]:
        """Where functions of these names are."""
        for node in self._nodes:
            if isinstance(node, _FUNCTION) and node.name in names:
                yield f"{self._shown}, line {node.lineno} ({node.name})"

    def _find_makers(
        self, parent: ast.AST, loaded: AbstractSet[str], *, is_called: bool
    ) -> Iterator[tuple[str, str]]:
        """What may define names that are not written; with what these start, empty for any."""
        for node in ast.iter_child_nodes(parent):
            start = self._made_by(node, is_called=is_called)
            if start is not None:
                yield self._at(node), start
            for decorator in getattr(node, "decorator_list", ()):
                if not self._is_plain(decorator):
                    yield self._at(decorator, "@"), getattr(node, "name", "")
            # pytest calls tests and fixtures after collection, when they define none.
            if isinstance(node, _FUNCTION) and node.name not in loaded and _is_late(node):
                continue
            called = is_called or isinstance(node, _FUNCTION)
            yield from self._find_makers(node, loaded, is_called=called)

    def _made_by(self, node: ast.AST, *, is_called: bool) -> str | None:
        match node:
            case ast.Call(ast.Name("setattr"), [_, ast.Constant(str(name)), *_]):
                return name
            case (
                ast.ImportFrom(names=[ast.alias("*")])
                | ast.Call(ast.Name("exec" | "eval" | "globals" | "locals" | "vars" | "setattr"))
                | ast.Attribute(attr="f_globals" | "f_locals" | "__globals__" | "__dict__")
                | ast.Attribute(ast.Name("sys"), "modules")
            ):
                return ""
            case ast.Expr(ast.Call(func)) if not is_called:
                # A function of another module may write into the module that calls it.
                first = _first(func)
                name = first.id if isinstance(first, ast.Name) else ""
                is_plain = name in _PLAIN or name in sys.stdlib_module_names
                return "" if self._binds(name, ast.alias) and not is_plain else None
            case ast.Call(func, args) if _last_name(func) not in {"super", "getLogger"}:
                names = [argument.id for argument in args if _is_loaded(argument)]
                classes = (name for name in names if self._binds(name, ast.ClassDef))
                return "" if "__name__" in names else next(classes, None)
        return None

    def _binds(self, name: str, how: type[ast.AST]) -> bool:
        return any(isinstance(node, how) for node in self._names[self._tree][name])

    # What gives parameters.

    def find_parameters(
        self, test: str, *, used: AbstractSet[str], given: AbstractSet[str]
    ) -> str | None:
        """What may give a collected test parameters that this run did not; None if nothing can.

        `used` are the names of its fixtures and parameters, `given` those of its parameters.
        """
        *classes, name = unquote(test).split(".")
        scopes, doubt = self._scopes(classes)
        found = [node for scope in scopes for node in self._names[scope][name]]
        if doubt or len(found) != 1 or not isinstance(found[0], _FUNCTION):
            return doubt or f"{self._shown} does not define it, or not once"
        marks = [mark for node in (*scopes, *found) for mark in getattr(node, "decorator_list", ())]
        for scope in {self._tree, *scopes}:
            given_here = self._names[scope]["pytestmark"]
            # Two bindings belong to two branches.
            marks += (self._values.get(one, one) for one in given_here[:1])
            marks += given_here[1:]
        doubts = [self._at(mark) for mark in marks if not self._is_plain(mark)]
        listed: set[str] = set()
        for source in self._all:
            names, unknown = source.parameters(used)
            listed |= names
            doubts += unknown
        if given - listed:
            doubts.append(f"no list in the source gives {', '.join(sorted(given - listed))}")
        return next(iter(doubts), None)

    def parameters(self, used: AbstractSet[str]) -> tuple[set[str], list[str]]:
        """The parameters that this file gives a test, and what may give it others."""
        doubts = [*self.hooks("pytest_generate_tests")]
        doubts += (what for what, start in self._makers if not start)
        listed: set[str] = set()
        for node, names, values in self._parameter_lists():
            if not names or names & used:
                listed |= names
                if not (names and all(map(self._is_constant, values))):
                    doubts.append(self._at(node))
        return listed, doubts

    def _parameter_lists(self) -> Iterator[tuple[ast.AST, set[str], list[ast.expr | None]]]:
        """Each list of parameters, their names (empty if unknown), what their ids come from."""
        for node in self._nodes:
            match node:
                case ast.Call(ast.Attribute(attr="parametrize"), args, keywords):
                    given = {keyword.arg: keyword.value for keyword in keywords}
                    names, values = (*args, None, None)[:2]
                    values = given.get("argvalues", values)
                    ids = [given[key] for key in (None, "ids") if key in given]
                    # These depend on the values alone.
                    ids = [one for one in ids if _last_name(one) not in {"str", "repr"}]
                    yield node, _names_in(given.get("argnames", names)), [values, *ids]
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    for mark in node.decorator_list:
                        if isinstance(mark, ast.Call) and _last_name(mark) == "fixture":
                            given = {keyword.arg: keyword.value for keyword in mark.keywords}
                            # One of two definitions may have no parameters.
                            is_one = sum(len(one[name]) for one in self._names.values()) == 1
                            if None in given or "params" in given:
                                named = _names_in(given["name"]) if "name" in given else {name}
                                yield mark, named, [given.get("params") if is_one else None]

    def _is_plain(self, mark: ast.AST) -> bool:
        """Whether a decorator or mark makes no tests, nor parameters that others list."""
        if isinstance(mark, (ast.List, ast.Tuple)):
            return all(map(self._is_plain, mark.elts))
        first = _first(mark)
        if not isinstance(first, ast.Name) or first.id in _PLAIN:
            return isinstance(first, ast.Name)
        value = self._value_of(first)
        return value is not None and self._is_plain(value)

    def _value_of(self, name: ast.Name) -> ast.expr | None:
        """What a name of the module is, if it is bound once, above; None if that is not known."""
        found = self._names[self._tree][name.id]
        is_known = len(found) == 1 and getattr(found[0], "lineno", 0) < name.lineno
        return self._values.get(found[0]) if is_known else None

    def _is_constant(self, node: ast.AST | None) -> bool:
        """Whether it is the same in every branch."""
        parts: Sequence[ast.AST | None]
        match node:
            case ast.Attribute(ast.Name("torch")):
                parts = ()  # a dtype, say
            case ast.Name(name):
                found = self._names[self._tree][name]
                if len(found) != 1 or any(_changes(one, name) for one in self._nodes):
                    return False
                is_defined = isinstance(found[0], (*_FUNCTION, ast.ClassDef))
                parts = () if is_defined else (self._value_of(node),)
            case ast.Call(func, args, keywords) if _last_name(func) in {"param", "range"}:
                # Marks do not change ids.
                parts = (*args, *(one.value for one in keywords if one.arg != "marks"))
            case _ if isinstance(node, _DISPLAYS):
                parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
            case _:
                return False
        return all(map(self._is_constant, parts))

    def _at(self, node: ast.AST, before: str = "") -> str:
        text = before + " ".join(ast.unparse(node).split())
        text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        return f"{self._shown}, line {getattr(node, 'lineno', 1)} ({text})"


def _is_loaded(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def _first(node: ast.AST) -> ast.AST:
    """``a`` of ``a.b(c).d``."""
    while isinstance(node, (ast.Attribute, ast.Call)):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node


def _last_name(node: ast.AST) -> str:
    match node:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return _last_name(inner)
    return ""


def _is_late(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return function.name.startswith("test") or "fixture" in map(_last_name, function.decorator_list)


def _changes(node: ast.AST, name: str) -> bool:
    """Whether an expression may change the value of a name in place."""
    match node:
        case ast.Call(ast.Attribute(ast.Name(found), attr)):
            return found == name and attr in _CHANGES
        case ast.Subscript(ast.Name(found), ctx=ast.Store() | ast.Del()):
            return found == name
        case ast.Expr(ast.Call(args=args)):
            return any(_is_loaded(one) and one.id == name for one in args)
    return False


def _names_in(node: ast.AST | None) -> set[str]:
    """The names that a constant lists: ``"a, b"`` or ``["a", "b"]``; empty if it is none."""
    match node:
        case ast.Constant(str(text)):
            return {name.strip() for name in text.split(",")}
        case ast.List(parts) | ast.Tuple(parts):
            each = [_names_in(part) for part in parts]
            return set().union(*each) if all(each) else set()
    return set()
