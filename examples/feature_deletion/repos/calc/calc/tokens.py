"""Text to tokens."""

SIGNS = "+-*/()^"


def tokens_of(text):
    """Return numbers (digits, with a point or not), names (letters) and the signs + - * / ( ) ^ in order, as texts.

    Blanks are passed over. Raise ValueError for any other character.
    """
    found, at = [], 0
    while at < len(text):
        end = at + 1
        if text[at].isdigit() or text[at] == ".":
            while end < len(text) and (text[end].isdigit() or text[end] == "."):
                end += 1
        elif text[at].isalpha():
            while end < len(text) and text[end].isalpha():
                end += 1
        elif text[at] not in SIGNS and not text[at].isspace():
            raise ValueError(f"{text[at]!r} is not a sign")
        if not text[at].isspace():
            found.append(text[at:end])
        at = end
    return found
