"""Cents, and how they are written."""


def parse_cents(text):
    """Return the cents in texts like "12", "12.5", "-0.05" or "1,234.50". Raise ValueError for anything else."""
    sign = -1 if text.startswith("-") else 1
    whole, dot, part = text.removeprefix("-").replace(",", "").partition(".")
    if not whole.isdigit() or len(part) > 2 or (dot and not part.isdigit()):
        raise ValueError(f"{text!r} is not an amount")
    return sign * (int(whole) * 100 + int(part.ljust(2, "0") or 0))


def show_cents(cents):
    """Return cents as text with thousands apart and two places: -1234.5 euros are "-1,234.50"."""
    sign = "-" if cents < 0 else ""
    return f"{sign}{abs(cents) // 100:,}.{abs(cents) % 100:02d}"


def share_out(cents, parts):
    """Return `parts` integers that differ by one at most and sum up to `cents`; the larger ones come first."""
    least, rest = divmod(cents, parts)
    return [least + 1] * rest + [least] * (parts - rest)
