"""The one error of this package.

    InnerError: the thing that cannot work · the value found · the next thing to do

Not promised: that every mistake is one; a defect of ours keeps its own type and traceback.
"""


class InnerError(RuntimeError):
    """Something the user wrote cannot work. The message says what, what was seen, and the next thing to do."""


class SandboxMissing(InnerError):
    """This machine cannot sandbox programs that a model wrote; another one may."""


class RewardFailed(RuntimeError):
    """The reward gives no numbers any more. This session ends; its slot is started again, with growing pauses."""


FLOAT16 = (
    "{} cannot be trained: AdamW steps the weights in their own dtype, and in float16 its epsilon of 1e-8 is 0, so the "
    "first steps divide 0 by 0 and the weights are NaN. Use float32 (or bfloat16, which loses small updates)."
)
