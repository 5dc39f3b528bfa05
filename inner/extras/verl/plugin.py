"""verl imports this module in each of its processes (entry point `verl.plugins`); the import registers the estimator.

Not promised: a message from verl if the import fails (it logs it at DEBUG). Then verl raises an error that
`adv_estimator=grpo_composer` is unknown.
"""

from inner.extras.verl.estimator import register

register()
