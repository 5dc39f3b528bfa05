"""Extras: the core never imports them. Each has a page, tests, and its own pip extra if it needs packages.

deletion/        Feature Deletion: make tasks, judge them in a sandbox      docs/feature-deletion.md
boxes/           rented or local boxes for episodes, Harbor tasks           docs/reference/boxes.md
openenv/         environments behind an OpenEnv or MCP server               docs/reference/openenv.md
rollout_check/   did the policy write these rollouts? log-probs, TOPLOC     docs/weights.md
engines/         programs that sample an actor's rollouts                   docs/reference/engines.md
nf4.py           a frozen base model in 4 bits, under an adapter            docs/choose.md
prime_rl.py      PRIME-RL's custom loss      [trainer.loss] type = "custom"           docs/backends.md
verl/            an advantage of verl        algorithm.adv_estimator=grpo_composer
monarch/         one replica as actors       examples/monarch/replica.py
"""
