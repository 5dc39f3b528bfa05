"""Stop all boxes of a run, of all its sessions.

    python -m inner.extras.boxes.sweep PROVIDER RUN ──▶ {"stopped": 3, "left": 0} or {"trouble": "E2B_API_KEY is not …"}

RUN is the label that the boxes have: the run's nonce in run.json. `diloco stop` and a supervisor that ends call this.

Not promised: boxes of the provider "local" on other machines than this one.
"""

import argparse
import json
from typing import Any

from inner.errors import InnerError
from inner.extras.boxes.box import ProviderFailed
from inner.extras.boxes.starting import BoxStarter, open_provider


def sweep(provider: str, run: str) -> dict[str, Any]:
    """Stop the boxes; return {"stopped", "left"}: numbers of boxes; or {"trouble"}: why the numbers are unknown."""
    try:
        starter = BoxStarter(open_provider(provider))
        return {"stopped": starter.sweep({"run": run}), "left": len(starter.provider.find({"run": run}))}
    except (InnerError, ProviderFailed) as error:
        return {"trouble": str(error)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m inner.extras.boxes.sweep", description="Stop all boxes of a run")
    parser.add_argument("provider")
    parser.add_argument("run", help="the run's nonce")
    asked = parser.parse_args()
    print(json.dumps(sweep(asked.provider, asked.run)))


if __name__ == "__main__":
    main()
