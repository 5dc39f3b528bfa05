"""The verbs that change a running fleet: more or fewer replicas, drain one replica, stop all replicas.

    scale drain ─▶ control records, which a supervisor reads        stop ─▶ the platforms, until all replicas have ended

Not promised: an immediate effect; only `stop` waits for the result.
"""

import sys
import time
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from executors.cli.answers import DECLINED, Answer, agree_on_price, say
from executors.cli.opening import present_url
from executors.cli.options import SLOTS, add_run_verb, again, flag, offer, value
from executors.cli.reaching import opened, reach_store
from executors.platforms import EXECUTORS
from executors.preflight import run_url
from rendezvous.clock import SystemClock

if TYPE_CHECKING:
    from diloco.run.record import Run

SCOPES = {  # where `stop --all` looks
    "hf-jobs": "the namespace of your token; --option namespace=NAME for another one",
    "modal": "your Modal environment; MODAL_ENVIRONMENT=NAME for another one",
}
SWEPT_S = 120.0  # time for a platform to report that cancelled processes have ended


def add_verbs(verbs: Any) -> None:
    scale = add_run_verb(verbs, "scale", "keep another number of replicas from now on", opened(_scale))
    value(scale, "replicas", "N", "replicas to keep", type="positive")
    value(scale, "--min-replicas", "M", "offers that every outer step needs", type="positive")
    value(scale, "--actors", "A", "actors to keep, at the places that the run has for them", type="natural")
    flag(scale, "--yes", "-y", help="accept the price without a question")
    text = "let one replica end its inner step, offer its work and leave (`scale` and `resume` undo it)"
    drain = add_run_verb(verbs, "drain", text, opened(_drain))
    offer(value(drain, "slot", "SLOT", "r00, r01, … as `diloco status` names them"), SLOTS)
    stop = add_run_verb(verbs, "stop", "end all replicas of a run, and check that they ended", _stop)
    stop._actions[-1].nargs = "?"
    offer(value(stop, "--executor", "NAME", "with --all, instead of RUN: all processes there"), *EXECUTORS)
    flag(stop, "--all", help="end processes of all runs, and processes of no known run; asks first")
    again(stop, "--option", type="option", metavar="KEY=VALUE", help="with --all: e.g. namespace=me, for hf-jobs")
    flag(stop, "--yes", "-y", help="with --all: do not ask")
    value(stop, "--grace", "S", "seconds before a kill (default: 20, and three inner steps)", type="seconds")
    flag(stop, "--purge", help="also remove the data that platforms keep of the run; never the run itself")


def _scale(args: Namespace, run: "Run") -> Answer:
    from executors.cli.changing import scale
    from executors.preflight.quote import spent_so_far
    from executors.supervision.costs import Costs

    offer = scale.growth_quote(run, args.replicas, args.min_replicas, args.actors, spent_so_far(run.url) or Costs())
    if offer is not None and not agree_on_price(offer, args.yes):
        return Answer(code=DECLINED)
    lines = scale.scale(run, SystemClock(), args.replicas, args.min_replicas, args.actors)
    return Answer({"run": run.url, "replicas": args.replicas, "messages": lines}, lines)


def _drain(args: Namespace, run: "Run") -> Answer:
    from executors.cli.changing import scale

    lines = scale.drain(run, SystemClock(), args.slot)
    return Answer({"run": run.url, "slot": args.slot, "messages": lines}, lines)


def _stop(args: Namespace) -> Answer:
    if args.all or args.executor or not args.run:
        return _stop_all(args)
    if args.option:
        raise run_url.UsageError("--option belongs to --all: a run's records name its platforms. Leave it out")
    from executors.cli.changing import scale
    from executors.supervision.shutdown import purge_run, stop_run

    url = present_url(args.run)
    store = reach_store(url)
    words = sys.stderr if args.json else sys.stdout
    found = stop_run(store, SystemClock(), args.grace, lambda text: print(text, file=words, flush=True))
    live = [end.name for end in found if end.live]
    over = scale.after_stop_words(store, found=bool(found))
    rows = [f"  {end.name:12s} {end.text}" for end in found]
    purged = purge_run(store) if args.purge and not live else []
    ends = [{"name": e.name, "live": e.live, "text": e.text} for e in found]
    data = {"run": url, "live": live, "ends": ends, "purged": purged}
    if not live:
        return Answer(data, [*rows, over, *purged])
    advice = "; nothing was purged" if args.purge else ""
    note = f"diloco stop: {', '.join(live)} may still run; repeat the command, or look at the place above{advice}"
    return Answer(data, rows, 1, note)


def _stop_all(args: Namespace) -> Answer:
    from executors.platforms.places import Place, make_executor
    from executors.preflight import quote

    if args.run or not (args.all and args.executor):
        raise run_url.UsageError(
            "give either a RUN or --executor NAME --all: `diloco stop RUN` ends one run, and `diloco stop --executor "
            "NAME --all` ends all runs there"
        )
    if args.purge or args.grace is not None:
        raise run_url.UsageError("--purge and --grace belong to `diloco stop RUN`: --all ends everything there at once")
    options = dict(args.option or ())
    executor = make_executor(Place(args.executor, options=options))
    try:
        found = executor.sweep_all(dry_run=True)
        say("\n".join(found))
        if found and not quote.yes("end them?", args.yes):
            return Answer(code=DECLINED, note="nothing was ended; --yes ends them without asking")
        ended = executor.sweep_all() if found else []
        until = time.monotonic() + SWEPT_S
        while (left := executor.sweep_all(dry_run=True)) and time.monotonic() < until:
            time.sleep(1.0)
    finally:
        executor.close()
    words = [*(f"ended {what}" for what in ended), *(f"still there: {what}" for what in left)]
    scope = ", ".join(f"{k} {v}" for k, v in options.items()) or SCOPES.get(args.executor, "")
    nothing = f"no process of this project runs on {args.executor}{f' ({scope})' if scope else ''}"
    data = {"executor": args.executor, "ended": ended, "live": left}
    return Answer(data, words or [nothing], 1 if left else 0)
