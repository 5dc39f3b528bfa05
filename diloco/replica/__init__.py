"""The process of one replica: `diloco.replica:main`.   replica.py: join, train, end.   ranks.py: --devices K."""

import argparse
import os

LAUNCHED = {"WORLD_SIZE", "LOCAL_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_PROCID"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m diloco.replica", description="Run one replica of a run.")
    parser.add_argument("url", help="the run: a folder or a bucket, as for `diloco train --run`")
    parser.add_argument("--slot", default="r00", help="which replica this is (r00, r01, …)")
    parser.add_argument("--parent", default="", help="PID:STARTTIME of a process; this replica leaves when it ends")
    parser.add_argument("--devices", type=int, default=1, help="processes that train the model together, one per GPU")
    asked = parser.parse_args(argv)
    if asked.devices < 1:
        parser.error(f"--devices {asked.devices}: a replica has at least one process. Use 1 or more")
    if asked.devices > 1 or LAUNCHED & os.environ.keys():  # variables of a launcher, such as torchrun or mpirun
        from diloco.replica.ranks import run_ranks

        return run_ranks(asked.url, asked.slot, parent=asked.parent, devices=asked.devices)
    from diloco.replica.replica import run_member, train_or_run_script

    return run_member(asked.url, asked.slot, train_or_run_script, parent=asked.parent)
