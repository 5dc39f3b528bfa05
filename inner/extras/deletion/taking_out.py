"""Take functions out of a Python file, and write a short prompt that asks for them.

    def twice(x):                        def twice(x):
        \"\"\"Return x two times.\"\"\"           \"\"\"Return x two times.\"\"\"      (docstring=False: it goes, too)
        return [x, x]             ──▶        raise NotImplementedError("this feature was taken out")

Signatures stay, so the file can be imported, and its text still names the missing parts.
"""

import ast
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from inner.errors import InnerError

GONE = 'raise NotImplementedError("this feature was taken out")'
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LEAST_LINES = 3  # lines of a body that is long enough for a task
TERSE = (
    "{what} in {path} only raises NotImplementedError. Make it work again.",
    "{path}: {what} was taken out. Bring it back.",
    "Something is missing here: {what} ({path}). Put it back.",
    "The package needs {what} again, in {path}.",
)


@dataclass(frozen=True)
class Deletion:
    """The parts that a task takes out of one file: a function, a method, or all that tests reach (a whole module)."""

    path: str
    functions: Sequence[str]

    @property
    def name(self) -> str:
        place = self.path.removesuffix(".py").replace("/", ".")
        return place if len(self.functions) > 1 else f"{place}.{self.functions[0]}"

    def ask(self, source: str, docstrings: bool) -> str:
        """Return the prompt.   docstrings: whether it quotes the functions' docstrings."""
        what = f"`{self.functions[0]}`" if len(self.functions) == 1 else f"the whole of `{self.path}`"
        asked = TERSE[zlib.crc32(self.name.encode()) % len(TERSE)].format(what=what, path=self.path)
        told = [(name, ast.get_docstring(find_function(source, name))) for name in self.functions if docstrings]
        return "\n\n".join([asked, *(f"`{name}`: {text}" for name, text in told if text)])


def functions_of(source: str) -> Iterator[str]:
    """Yield the qualified names of functions and methods with a body of some length, once each."""
    seen = set[str]()
    todo = [("", ast.parse(source).body)]
    while todo:
        before, body = todo.pop()
        for node in body:
            if isinstance(node, ast.ClassDef):
                todo.append((f"{before}{node.name}.", node.body))
            elif isinstance(node, FUNCTIONS) and (name := f"{before}{node.name}") not in seen:
                seen.add(name)
                first = node.body[1:] if ast.get_docstring(node) is not None else node.body
                if (
                    first
                    and node.body[0].lineno > node.lineno
                    and (node.end_lineno or 0) - first[0].lineno >= LEAST_LINES - 1
                ):
                    yield name


def find_function(source: str, qualified: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """Return a function of a file.   Raises InnerError."""
    node: ast.AST = ast.parse(source)
    for part in qualified.split("."):
        found = [n for n in ast.iter_child_nodes(node) if isinstance(n, (*FUNCTIONS, ast.ClassDef)) and n.name == part]
        if not found:
            raise InnerError(f"there is no function {qualified!r}. Name it as `function` or `Class.method`.")
        node = found[0]
    if not isinstance(node, FUNCTIONS):
        raise InnerError(f"{qualified!r} is a class. Name its methods, as `Class.method`.")
    return node


def take_out(source: str, qualified: str, *, docstring: bool = True) -> str:
    """Return the source without one function's body, but with its signature and, if `docstring`, its docstring."""
    node = find_function(source, qualified)
    if docstring and ast.get_docstring(node) is None:
        raise InnerError(f"{qualified!r} has no docstring that describes it. Choose a function with one.")
    lines, first = source.splitlines(keepends=True), node.body[0]
    start = min([first.lineno, *(made.lineno for made in getattr(first, "decorator_list", []))])  # "@" is above `def`
    until = (first.end_lineno or 0) if docstring else start - 1
    indent = " " * first.col_offset
    return "".join([*lines[:until], f"{indent}{GONE}\n", *lines[node.end_lineno :]])
