"""The web view of a run: one page, served, frozen into a file, or published beside the run."""

__all__: list[str] = []
