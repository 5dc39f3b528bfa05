"""The versions in constraints.txt that a Python takes."""

from pathlib import Path

from packaging.requirements import Requirement

FILE = Path(__file__).parents[2] / "constraints.txt"


def pins(python: str) -> dict[str, str]:
    """Return normalised name -> version.   python: "3.14"."""
    lines = (line for line in FILE.read_text().splitlines() if "==" in line and line[0] != "#")
    found = [r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate({"python_version": python})]
    return {r.name.lower().replace("_", "-"): str(r.specifier)[2:] for r in found}
