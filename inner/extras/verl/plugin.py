"""Registers the estimator and trainers: verl imports this module in each of its processes (entry point `verl.plugins`).

The import of verl's v1 trainers takes about three seconds in each process.

Not promised: a visible message from verl if the import fails (verl logs the failure at DEBUG). Then verl raises an
error that `adv_estimator=grpo_composer`, or the trainer mode `composer_sync`, is unknown.
"""

from inner.extras.verl.estimator import register

register()

from inner.extras.verl import trainer  # noqa: E402 - it needs TransferQueue, and the estimator does not

trainer.register()
