"""Rows out of text: fields between commas, quoted where they hold commas or quotes."""


def split_line(line):
    """Return the fields of one line. A field in double quotes may hold commas; "" inside quotes is one quote.

    Raise ValueError for a quote that is never closed. Spaces belong to the field.
    """
    fields, field, quoted, at = [], "", False, 0
    while at < len(line):
        sign = line[at]
        if quoted:
            if sign != '"':
                field += sign
            elif line[at + 1 : at + 2] == '"':
                field, at = field + '"', at + 1
            else:
                quoted = False
        elif sign == '"':
            quoted = True
        elif sign == ",":
            fields, field = [*fields, field], ""
        else:
            field += sign
        at += 1
    if quoted:
        raise ValueError("a quote is never closed")
    return [*fields, field]


def read_rows(text):
    """Return one dictionary per line, named by the first line. Blank lines are passed over.

    Raise ValueError for a line that has another number of fields than the first one.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return []
    names = split_line(lines[0])
    rows = []
    for number, line in enumerate(lines[1:], 2):
        fields = split_line(line)
        if len(fields) != len(names):
            raise ValueError(f"line {number} has {len(fields)} fields and not {len(names)}")
        rows.append(dict(zip(names, fields, strict=True)))
    return rows
