"""Adapters to other trainers: what is ours, in the form that they load.  Nothing here is imported by the rest.

prime_rl.py   PRIME-RL's custom loss      [trainer.loss] type = "custom"
verl.py       an advantage of verl        algorithm.adv_estimator=grpo_composer
monarch/      one replica as actors       examples/monarch/replica.py
"""
