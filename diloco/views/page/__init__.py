"""The web view of a run: one page, served, frozen into a file, or published in the bucket."""

__all__: list[str] = []
