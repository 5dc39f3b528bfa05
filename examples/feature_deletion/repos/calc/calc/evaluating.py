"""Tokens to values: ^ before * and / before + and -, and a minus in front of a factor."""

from fractions import Fraction

from calc.tokens import tokens_of


class Reader:
    """Tokens that are read one by one."""

    def __init__(self, tokens, names):
        self.tokens = list(tokens)
        self.names = names

    def take(self, *wanted):
        """Return the next token if it is one of `wanted`, and go past it; else None."""
        if self.tokens and self.tokens[0] in wanted:
            return self.tokens.pop(0)
        return None

    def sum(self):
        """Read terms with + and - between them, from left to right."""
        value = self.term()
        while sign := self.take("+", "-"):
            right = self.term()
            value = value + right if sign == "+" else value - right
        return value

    def term(self):
        """Read factors with * and / between them, from left to right."""
        value = self.power()
        while sign := self.take("*", "/"):
            right = self.power()
            value = value * right if sign == "*" else value / right
        return value

    def power(self):
        """Read an atom with a power or without: 2^3^2 is 2^(3^2), and -2^2 is -(2^2). Exponents are whole numbers."""
        if self.take("-"):
            return -self.power()
        value = self.atom()
        if self.take("^"):
            exponent = self.power()
            if exponent.denominator != 1:
                raise ValueError("an exponent is a whole number")
            return value ** int(exponent)
        return value

    def atom(self):
        """Read a number, a name of `names`, or a sum in parentheses. Raise ValueError for anything else."""
        if self.take("("):
            value = self.sum()
            if not self.take(")"):
                raise ValueError("a parenthesis is never closed")
            return value
        if not self.tokens:
            raise ValueError("something is missing at the end")
        token = self.tokens.pop(0)
        return Fraction(self.names[token]) if token in self.names else Fraction(token)


def evaluate(text, **names):
    """Return the value of the text as a text: a whole number, or a fraction like 3/4. Raise ValueError for nonsense."""
    reader = Reader(tokens_of(text), names)
    value = reader.sum()
    if reader.tokens:
        raise ValueError(f"{reader.tokens[0]!r} is too much")
    return str(value)
