"""How many examples hypothesis tries: all of them where the slow tests run too, else a quarter.

    @settings(max_examples=examples(300))

Not promised: the same examples twice, unless the test says derandomize=True.
"""

import os

QUICK = "DILOCO_TEST_QUICK"  # conftest.py sets it for `-m "not slow"`


def examples(number: int) -> int:
    return -(-number // 4) if os.environ.get(QUICK) else number
