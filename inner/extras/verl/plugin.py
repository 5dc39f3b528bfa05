"""verl loads this module in each of its processes (entry point `verl.plugins`); loading it registers the estimator.

Not promised: a word from verl where this fails; it logs that at DEBUG.  `adv_estimator=grpo_composer` then is unknown,
which verl says loudly.
"""

from inner.extras.verl.estimator import register

register()
