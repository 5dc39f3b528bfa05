"""What rows have in common."""


def group_by(rows, column):
    """Return {value of the column: its rows}, values in the order of their first row."""
    groups = {}
    for row in rows:
        groups.setdefault(row[column], []).append(row)
    return groups


def totals(rows, column, of):
    """Return {value of `column`: sum of the integers in `of`}, the largest sum first, equal sums by name."""
    sums = {name: sum(int(row[of]) for row in found) for name, found in group_by(rows, column).items()}
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def column_widths(rows):
    """Return {column: length of its longest value or of its name}, in the order of the first row."""
    names = list(rows[0]) if rows else []
    return {name: max(len(name), *(len(str(row[name])) for row in rows)) for name in names}


def to_table(rows):
    """Return the rows as lines of text, columns padded to their width and two spaces between them."""
    widths = column_widths(rows)
    lines = [[name.ljust(width) for name, width in widths.items()]]
    lines += [[str(row[name]).ljust(width) for name, width in widths.items()] for row in rows]
    return "\n".join("  ".join(line).rstrip() for line in lines)
