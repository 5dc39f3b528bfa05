"""Turn tests of pytest into hidden tests: the expected values are taken out of a test's text, and kept outside.

    def test_plural():                                   def test_plural():
        expected = "boxes"                       ──▶         __seen__(plural("box"))
        assert plural("box") == expected
    @parametrize("one, many", [("ox", "oxen")])  ──▶     @parametrize("one, many", [("ox", None)])

    the other tests of the file are left out     a side of `==` (assertEqual) that no call of the package computes
    is dropped, with the names and the columns of tables that only this side needed
    other assertions (in, is, not, raises) stay as they are: one bit each, which hostile code could forge

A test is strong if some value that it sees can neither be guessed nor read in its own text (`is_strong`). Only strong
tests become fail-to-pass.

Not promised: that a solution which passes the original suite also passes here, if a test compares objects by their own
`__eq__`: we compare their repr.
"""

import ast
import builtins
import copy
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from inner.extras.deletion.inside_suite import short, spell, text

TestKey = tuple[str, str, str, int]  # path; class or ""; function; number of the parametrized case
EQUAL = {
    f"assert{kind}Equal{s}" for kind in ("", "List", "Dict", "Tuple", "Set", "Sequence", "MultiLine") for s in ("", "s")
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def hide_answers(source: str, key: TestKey | None = None) -> str:
    """Return a test file whose assertions output values.   key: the only test to keep; None: keep all."""
    tree = ast.parse(source)
    if key is not None:
        _leave_others_out(tree, key[2])
    known = _safe_names(tree)
    known |= _data_names(tree, known)
    for test in [n for n in ast.walk(tree) if isinstance(n, FUNCTIONS) and n.name.startswith("test")]:
        _inline_tables(tree, test)
        data = known | {name for names, _ in _marks(test) for name in names}
        data |= _data_names(test, data)
        _tell_values(test, data)
        _drop_unused(test, data)
        _empty_columns(test)
    _drop_unused(tree, known)
    return ast.unparse(ast.fix_missing_locations(tree))


def is_strong(seen: Any, source: str) -> bool:
    """Whether one of the values can neither be guessed nor read in the test's text."""
    written = set[str]()
    for node in ast.walk(ast.parse(source)):
        try:
            value = ast.literal_eval(node)  # type: ignore[arg-type]
            written |= {text(short(spell(value, near))) for near in (False, True)}
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return any(_is_rich(value) and text(value) not in written for value in seen)


def _is_rich(value: Any) -> bool:
    """Whether a value is long enough to be hard to guess."""
    if isinstance(value, dict) and "class" in value:
        return len(value["repr"]) > len(value["class"]) + 4
    return not isinstance(value, bool | None) and len(text(value)) > (2 if isinstance(value, int) else 3)


def _leave_others_out(scope: Scope, name: str) -> None:
    """Remove all tests except those of this name."""
    kept = list[ast.stmt]()
    for node in scope.body:
        if isinstance(node, ast.ClassDef):
            _leave_others_out(node, name)
        if not (isinstance(node, FUNCTIONS) and node.name.startswith("test") and node.name != name):
            kept.append(node)
    scope.body = kept or [ast.Pass()]


def _safe_names(tree: ast.Module) -> set[str]:
    """Return names whose calls compute nothing of the package: built-in functions, and the standard library's."""
    safe = set(dir(builtins)) | {"pytest"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            home = node.module or "" if isinstance(node, ast.ImportFrom) and not node.level else ""
            for alias in node.names:
                if (home or alias.name).partition(".")[0] in {*sys.stdlib_module_names, "pytest"}:
                    safe.add((alias.asname or alias.name).partition(".")[0])
    return safe


def _own_nodes(scope: Scope) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, without those of functions and classes in it."""
    todo: list[ast.AST] = list(scope.body)
    while todo:
        yield (node := todo.pop())
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            todo += ast.iter_child_nodes(node)


def _data_names(scope: Scope, known: set[str]) -> set[str]:
    """Return names that this scope binds only to data, never to a result of the package's code."""
    found = set[str]()
    stored = Counter(n.id for n in _own_nodes(scope) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    while True:
        good = Counter[str]()
        for node in _own_nodes(scope):
            for target, value in _bindings(node):
                if _is_data(value, known | found):
                    good.update(n.id for n in ast.walk(target) if isinstance(n, ast.Name))
        more = {name for name, times in stored.items() if good[name] == times}
        if more <= found:
            return found
        found |= more


def _bindings(node: ast.AST) -> list[tuple[ast.AST, ast.AST]]:
    match node:
        case ast.Assign():
            return [(target, node.value) for target in node.targets]
        case ast.AnnAssign() if node.value is not None:
            return [(node.target, node.value)]
        case ast.For() | ast.comprehension():
            return [(node.target, node.iter)]
        case _:
            return []


def _is_data(node: ast.AST, known: set[str]) -> bool:
    """Whether an expression reads only these names."""
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    bound = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    odd = any(isinstance(n, ast.Lambda | ast.Await | ast.Yield | ast.NamedExpr) for n in ast.walk(node))
    return not odd and all(n.id in known or n.id in bound for n in names)


def _tell_values(test: ast.AST, known: set[str]) -> None:
    """Replace each `assert a == b` in the blocks below by calls that output its computed sides."""
    for node in ast.walk(test):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and not isinstance(node, ast.ClassDef):
                setattr(node, field, [told for one in block for told in _told(one, known)])


def _told(node: ast.stmt, known: set[str]) -> list[ast.stmt]:
    if isinstance(node, ast.Assert) and isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And):
        return [told for part in node.test.values for told in _told(ast.Assert(part), known)]
    sides = _sides(node)
    computed = [side for side in sides if not _is_data(side, known)]
    if not computed:  # both sides are names; the tested code may have changed their values
        computed = [side for side in sides if any(isinstance(n, ast.Name) for n in ast.walk(side))]
        computed = computed if len(computed) == 1 else []
    near = [ast.keyword("near", ast.Constant(True))] if any("approx" in ast.dump(side) for side in sides) else []
    call = ast.Name("__seen__", ast.Load())
    return [ast.Expr(ast.Call(call, [side], near)) for side in computed if not _is_approx(side)] or [node]


def _is_approx(side: ast.AST) -> bool:
    return isinstance(side, ast.Call) and ast.unparse(side.func).endswith("approx")


def _sides(node: ast.stmt) -> list[ast.expr]:
    match node:
        case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
            return [left, right]
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name), args=[left, right, *_])):
            return [left, right] if name in EQUAL else []
        case _:
            return []


def _loaded(scope: ast.AST) -> Counter[str]:
    """Return how often each name is read."""
    read = Counter(n.id for n in ast.walk(scope) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    for node in ast.walk(scope):
        if isinstance(node, ast.Nonlocal | ast.Global):
            read.update(node.names)
    return read


def _drop_unused(scope: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef, known: set[str]) -> None:
    """Remove assignments of data to names that are not read any more, in the blocks of this scope."""
    while True:
        loaded, before = _loaded(scope), len(list(ast.walk(scope)))
        for node in [scope, *_own_nodes(scope)]:
            for field in ("body", "orelse", "finalbody"):
                if isinstance(block := getattr(node, field, None), list):
                    kept = [one for one in block if not _is_unused(one, loaded, known)]
                    setattr(node, field, kept or ([ast.Pass()] if block and field == "body" else []))
        if len(list(ast.walk(scope))) >= before:
            return


def _is_unused(node: ast.AST, loaded: Counter[str], known: set[str]) -> bool:
    match node:
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=value) | ast.AnnAssign(target=ast.Name(id=name), value=value)
        ):
            return value is not None and not loaded[name] and _is_data(value, known)
        case _:
            return False


def _marks(test: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[list[str], ast.expr]]:
    """Yield (names, values) of each parametrize."""
    for mark in test.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith("parametrize") and len(mark.args) >= 2:
            try:
                names = ast.literal_eval(mark.args[0])
            except ValueError:
                continue
            yield ([n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)), mark.args[1]


def _loops(test: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[list[str], ast.expr]]:
    """Yield (names, rows) of each loop over rows."""
    for node in ast.walk(test):
        if isinstance(node, ast.For) and isinstance(node.target, ast.Tuple):
            names = [name.id for name in node.target.elts if isinstance(name, ast.Name)]
            if len(names) == len(node.target.elts):
                yield names, node.iter


def _inline_tables(tree: ast.Module, test: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    """Put the tables that the module names into the test, so that their columns can be emptied."""
    named = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.List | ast.Tuple)
    }  # fmt: skip
    for mark in test.decorator_list:
        if isinstance(mark, ast.Call) and len(mark.args) >= 2 and isinstance(mark.args[1], ast.Name):
            mark.args[1] = copy.deepcopy(named.get(mark.args[1].id, mark.args[1]))
    for node in ast.walk(test):
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Name):
            node.iter = copy.deepcopy(named.get(node.iter.id, node.iter))


def _empty_columns(test: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    """Write None into the columns that the test does not read."""
    loaded = Counter[str]()
    for statement in test.body:
        loaded += _loaded(statement)
    for names, values in [*_marks(test), *_loops(test)]:
        for row in values.elts if isinstance(values, ast.List | ast.Tuple) and len(names) > 1 else ():
            cells = _cells(row)
            for i, name in enumerate(names):
                if not loaded[name] and i < len(cells):
                    cells[i] = ast.Constant(None)
    for mark in test.decorator_list:
        if isinstance(mark, ast.Call):
            mark.keywords = [word for word in mark.keywords if word.arg != "ids"]


def _cells(row: ast.expr) -> list[ast.expr]:
    match row:
        case ast.Tuple() | ast.List():
            return row.elts
        case ast.Call() if ast.unparse(row.func).endswith("param"):
            row.keywords = [word for word in row.keywords if word.arg != "id"]
            return row.args
        case _:
            return []


def program_of(key: TestKey, source: str) -> str:
    """Return the hidden test's program (judge.py HiddenTest.run) for a file of `hide_answers`."""
    return f"import inside_suite\nresult = inside_suite.run_test({list(key)!r}, {source!r})"


def trace_program(words: Sequence[str], work: str) -> str:
    return f"import inside_suite\nresult = inside_suite.trace({list(words)!r}, {work!r})"
