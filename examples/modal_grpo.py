"""GRPO by replicas on Modal's GPUs that meet in a bucket; nothing depends on this terminal.

pip install -c constraints.txt -e '.[local,serverless]' && modal token new
modal secret create bucket-keys AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=… AWS_REGION=…
modal run -m examples.modal_grpo --run s3://BUCKET/grpo --secret bucket-keys           shows it; Ctrl-C leaves it
modal run -m examples.modal_grpo --run … --secret … --gpu L4,A10 --replicas 4 --max-usd 10 --detach

The same command again, on any machine, shows the run; so does `diloco status URL`.  `diloco stop URL` ends it.
The same without this file:  diloco train examples/modal_grpo.toml --run URL --executor modal --gpu T4
    --secret bucket-keys --max-usd 2 --detach
"""

import sys
from pathlib import Path

import modal

from diloco.run.config import load_config
from diloco.run.founding import open_run
from executors.cli.answers import say
from executors.cli.looking.lines import view_for
from executors.cli.starting.detached import hand_over
from executors.cli.starting.look_on import look_on
from executors.platforms.base import ExecutorError
from executors.platforms.places import Place
from executors.preflight.quote import UsageError, make_offer, slots_of, write_quote
from executors.supervision.costs import Costs
from executors.supervision.money.budget import Budget
from rendezvous.clock import SystemClock

app = modal.App("diloco-door")  # this app only starts the run's own app, which outlives it


@app.local_entrypoint()
def main(
    run: str, secret: str, gpu: str = "T4", replicas: int = 3, max_usd: float = 2.0, detach: bool = False,
    config: str = str(Path(__file__).with_suffix(".toml")),
) -> None:  # fmt: skip
    place = Place("modal", gpu=tuple(gpu.split(",")) if gpu != "none" else (), secrets=(secret,))
    try:
        offer = make_offer(run, [place], slots_of(replicas), Budget(max_usd=max_usd), Costs())
        print("\n".join(offer.lines()))
        found = open_run(load_config(Path(config)), run, SystemClock(), replicas=replicas)
        write_quote(found.store, SystemClock(), offer)
        supervised = hand_over(found, SystemClock(), say)
    except (UsageError, ExecutorError) as error:
        sys.exit(str(error))
    print(supervised.text)
    if supervised.code:
        sys.exit(supervised.code)
    print("this terminal is not needed any more")
    if detach:
        return
    try:
        print(look_on(found, SystemClock(), view_for(sys.stdout)).text)
    except KeyboardInterrupt:
        print(f"the run continues: diloco status {run}")
