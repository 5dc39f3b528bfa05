"""What every replica does once after its imports: a fork server that has done it forks quicker ones (fleet.py).

Not promised: that a child needs all of it.
"""

import gc
from contextlib import suppress

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import diloco.outer.fragments.in_place  # noqa: F401

with suppress(ImportError):  # no wheels for macOS, ARM and Python 3.14
    import torchft  # noqa: F401  its telemetry is a third of a small replica's imports
get_checkpoint_conversion_mapping("llama")  # compiles a thousand patterns, once per process
gc.freeze()  # a child's collections do not walk what is imported: fleet.py preloads this module last
