"""The errors of this package.

    InnerError's message: what cannot work · the value found · what to do next

Not promised: that every failure is an InnerError; our own bugs keep their type and traceback.
"""


class InnerError(RuntimeError):
    """A setting or file of the user cannot work. The message names the setting, the value found, and what to do."""


class SandboxMissing(InnerError):
    """This machine cannot sandbox programs that a model wrote; another machine may be able to."""


class RewardFailed(RuntimeError):
    """The reward returns no numbers any more. This session ends; its slot restarts, with growing pauses."""


FLOAT16 = (
    "{} cannot be trained: AdamW steps the weights in their own dtype, and in float16 its epsilon of 1e-8 is 0, so the "
    "first steps divide 0 by 0 and the weights are NaN. Use float32 (or bfloat16, which loses small updates)."
)
