"""A package that this environment has, as if it were not installed."""


class Without:
    """An importer to which a package is not installed."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, *_: object) -> None:
        if name == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
