"""The one error of this room.

    InnerError: what cannot work · what was seen · the next thing to do

Not promised: that every mistake is one; a defect of ours keeps its own type and traceback.
"""


class InnerError(RuntimeError):
    """Something the user wrote cannot work. The message says what, what was seen, and the next thing to do."""
