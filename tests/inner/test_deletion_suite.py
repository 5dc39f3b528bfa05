"""Tests of pytest as hidden tests: what they compare with is not in their text any more; functions taken out."""

import ast

import pytest

from inner.errors import InnerError
from inner.extras.deletion.inside_suite import short, spell
from inner.extras.deletion.suite import hide_answers, is_strong
from inner.extras.deletion.taking_out import Deletion, functions_of, take_out

HEAD = "import pytest\nfrom shop import price\n"
# name -> (a test, the same in its hidden form)
FORMS = {
    "a literal": ("def test_a():\n    assert price(2) == 30", "def test_a():\n    __seen__(price(2))"),
    "on the left": ("def test_a():\n    assert 30 == price(2)", "def test_a():\n    __seen__(price(2))"),
    "a name that only the comparison reads": (
        "def test_a():\n    wanted = {'a': 1}\n    got = price(2)\n    assert got == wanted, 'no'",
        "def test_a():\n    got = price(2)\n    __seen__(got)",
    ),
    "a chain of names": (
        "def test_a():\n    one = 3\n    two = one + 4\n    assert price(2) == two",
        "def test_a():\n    __seen__(price(2))",
    ),
    "two computed sides": (
        "def test_a():\n    assert price(2) == price('2')",
        "def test_a():\n    __seen__(price(2))\n    __seen__(price('2'))",
    ),
    "and": (
        "def test_a():\n    assert price(2) == 3 and price(4) > 5",
        "def test_a():\n    __seen__(price(2))\n    assert price(4) > 5",
    ),
    "an approximate one": (
        "def test_a():\n    assert price(2) == pytest.approx(0.1)",
        "def test_a():\n    __seen__(price(2), near=True)",
    ),
    "a name that the code may have changed": (
        "def test_a():\n    got = []\n    price(got)\n    assert got == [7, 8]",
        "def test_a():\n    got = []\n    price(got)\n    __seen__(got)",
    ),
    "unittest": (
        "class TestA(T):\n\n    def test_a(self):\n        self.assertEqual(price(2), 30)",
        "class TestA(T):\n\n    def test_a(self):\n        __seen__(price(2))",
    ),
    "a column of a table": (
        "@pytest.mark.parametrize('n, cents', [(1, 15), pytest.param(2, 30, id='30')], ids=str)\n"
        "def test_a(n, cents):\n    assert price(n) == cents",
        "@pytest.mark.parametrize('n, cents', [(1, None), pytest.param(2, None)])\n"
        "def test_a(n, cents):\n    __seen__(price(n))",
    ),
    "a table of the module": (
        "ROWS = [(1, 15)]\n\n@pytest.mark.parametrize(('n', 'cents'), ROWS)\n"
        "def test_a(n, cents):\n    assert price(n) == cents",
        "@pytest.mark.parametrize(('n', 'cents'), [(1, None)])\ndef test_a(n, cents):\n    __seen__(price(n))",
    ),
    "a loop over rows": (
        "ROWS = [(1, 15)]\n\ndef test_a():\n    for n, cents in ROWS:\n        assert price(n) == cents",
        "def test_a():\n    for n, cents in [(1, None)]:\n        __seen__(price(n))",
    ),
    "other assertions stay": (
        "def test_a():\n    assert price(2) in (3, 4)\n    with pytest.raises(ValueError):\n        price(0)",
        "def test_a():\n    assert price(2) in (3, 4)\n    with pytest.raises(ValueError):\n        price(0)",
    ),
    "a name of an outer function": (
        "def test_a():\n    n = 0\n\n    def f():\n        nonlocal n\n        n = 1\n    f()\n"
        "    assert price(2) == 3",
        "def test_a():\n    n = 0\n\n    def f():\n        nonlocal n\n        n = 1\n    f()\n    __seen__(price(2))",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_what_a_test_compares_with_goes(name: str) -> None:
    given, hidden = FORMS[name]
    told = hide_answers(HEAD + given).replace("\n\n", "\n")
    assert told == (HEAD + hidden).replace("\n\n", "\n")


def test_the_other_tests_of_a_file_are_left_out() -> None:
    source = "A = 5\ndef helper(): return 1\ndef test_a(): assert helper() == 1\ndef test_b(): assert helper() == A\n"
    source += "class TestC:\n    def test_a(self): pass\n    def test_d(self): assert helper() == 3\n"
    told = hide_answers(source, ("t.py", "", "test_a", 0))
    assert "test_b" not in told and "test_d" not in told and "A = 5" not in told and "def helper" in told


@pytest.mark.parametrize(
    ("seen", "source", "strong"),
    [
        (["oxen"], "f('ox')", True),
        (["oxen"], "f('ox') != 'oxen'", False),  # it can be read
        ([[1, 2, 3]], "f([1, 2, 3])", False),
        ([[3, 2, 1]], "f([1, 2, 3])", True),
        ([True, None, 3, ""], "f()", False),  # it can be guessed
        ([], "f()", False),
        ([{"class": "Box", "repr": ""}], "f()", False),
        ([{"class": "Box", "repr": "Box(side=13)"}], "f()", True),
    ],
)
def test_a_test_is_strong_if_a_value_can_neither_be_guessed_nor_read(
    seen: list[object], source: str, strong: bool
) -> None:
    assert is_strong(seen, source) == strong


def test_equal_values_have_equal_spellings() -> None:
    assert spell(1) == spell(1.0) == 1 and spell((1,)) != spell([1]) and spell({2, 1}) == spell(frozenset({1, 2}))
    assert spell({"b": 1, 2: 0}) == spell(dict(reversed({"b": 1, 2: 0}.items())))
    assert spell(0.1 + 0.2) != spell(0.3) and spell(0.1 + 0.2, near=True) == spell(0.3, near=True)
    assert spell(object()) == {"class": "object", "repr": ""} and spell(float("nan")) == {"float": "nan"}
    assert spell(b"\xff") == {"bytes": "ÿ"} and set(short(spell("x" * 3000))) == {"sha256"}
    loop: list[object] = []
    loop.append(loop)
    assert "deep" in str(spell(loop))


SOURCE = '''
class Box:
    """A box."""

    @property
    def side(self):
        """Return the side."""
        a = 1
        b = 2
        return a + b

    def small(self):
        return 1

    def one_line(self): return 2


def free(x):
    if x:
        return 1
    return 2


def wrapped(x):
    @cache
    @cache
    def inner():
        return x
    return inner
'''


def test_functions_of_some_length_are_found_and_lose_their_bodies() -> None:
    assert sorted(functions_of(SOURCE)) == ["Box.side", "free", "wrapped"]
    for name in ("Box.side", "free", "wrapped"):
        told = take_out(SOURCE, name, docstring=False)
        ast.parse(told)
        assert len(list(functions_of(told))) == 2
    assert "Return the side" in take_out(SOURCE, "Box.side")
    assert "Return the side" not in take_out(SOURCE, "Box.side", docstring=False)
    for name, why in (("free", "has no docstring"), ("Box", "is a class"), ("Box.x", "no function")):
        with pytest.raises(InnerError, match=why):
            take_out(SOURCE, name)


def test_prompts_are_short_and_tell_docstrings_if_asked() -> None:
    one, whole = Deletion("box.py", ("Box.side",)), Deletion("box.py", ("Box.side", "free"))
    assert one.name == "box.Box.side" and whole.name == "box"
    assert len(one.ask(SOURCE, docstrings=False)) < 80 and "`Box.side`" in one.ask(SOURCE, docstrings=False)
    assert "the whole of `box.py`" in whole.ask(SOURCE, docstrings=False)
    assert whole.ask(SOURCE, docstrings=True).endswith("\n\n`Box.side`: Return the side.")
