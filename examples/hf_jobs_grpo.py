"""GRPO by three replicas that are Hugging Face Jobs and meet in a bucket.

pip install -c constraints.txt -e '.[local,serverless]' && hf auth login
export AWS_ACCESS_KEY_ID=HFAK… AWS_SECRET_ACCESS_KEY=…        S3 keys of your namespace, from its token settings
python examples/hf_jobs_grpo.py hf://buckets/NAMESPACE/BUCKET/grpo                the plan, its price, a question
python examples/hf_jobs_grpo.py hf://buckets/NAMESPACE/BUCKET/grpo --detach       the supervisor is a job too

Watch it from anywhere with `diloco status URL` and `diloco logs URL r00 -f`; end it with `diloco stop URL`.
The same without this file:  diloco train examples/hf_jobs_grpo.toml --run URL --executor hf-jobs --gpu t4-small
    --secret HF_TOKEN --secret AWS_ACCESS_KEY_ID --secret AWS_SECRET_ACCESS_KEY --max-usd 1 [--detach]
"""

import argparse
import os
import sys
from pathlib import Path

from diloco.run.config import load_config
from diloco.run.founding import open_run
from executors.cli.starting.foreground import supervise_here
from executors.platforms.base import ExecutorError
from executors.platforms.on_hf_jobs.executor import HFJobsExecutor
from executors.platforms.places import Place
from executors.preflight.quote import UsageError, ask_agreement, make_offer, slots_of, write_quote
from executors.supervision.costs import Costs
from executors.supervision.hosted import start_hosted
from executors.supervision.money.budget import Budget
from rendezvous.clock import SystemClock

SECRETS = ("HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
PLAIN = ("AWS_REGION", "AWS_ENDPOINT_URL", "HF_S3_ENDPOINT")  # where the bucket is, if that is not the usual place


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="where the replicas meet: hf://buckets/…, s3://…, gs://…, az://…")
    parser.add_argument("--config", default=Path(__file__).with_suffix(".toml"))
    parser.add_argument("--hardware", default="cpu-basic", help="a flavor; a wrong one lists all, with prices")
    parser.add_argument("--max-usd", type=float, default=1.0)
    parser.add_argument("--yes", action="store_true", help="start without asking")
    parser.add_argument("--detach", action="store_true", help="return at once; a small job supervises")
    args = parser.parse_args()

    config = load_config(args.config)
    env = {name: os.environ[name] for name in PLAIN if name in os.environ}
    place = Place("hf-jobs", gpu=(args.hardware,), timeout_s=3600.0, secrets=SECRETS, env=env)
    try:
        offer = make_offer(args.run, [place], slots_of(config.fleet.replicas), Budget(max_usd=args.max_usd), Costs())
    except (UsageError, ExecutorError) as error:
        sys.exit(str(error))
    print("\n".join(offer.lines()))
    if not ask_agreement(offer, args.yes):
        return 1
    run = open_run(config, args.run, SystemClock())
    write_quote(run.store, SystemClock(), offer)
    if args.detach:
        print(f"supervised by the job {start_hosted(HFJobsExecutor(), run.url).native}")
        return 0
    outcome = supervise_here(run)
    print(outcome.text)
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
