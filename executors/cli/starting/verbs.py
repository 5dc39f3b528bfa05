"""The verbs that start a run, or only describe a start.

    typed ──_request──▶ StartRequest ─▶ pre-flight ─▶ the quote, agreed? ─▶ found, or change the run ─▶ supervise
                                              plan ends here ┘                   foreground, or --detach: elsewhere

Not promised: that a platform has a free machine, or its present price.
"""

import shlex
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executors.cli.answers import DECLINED, Answer, agree_on_price, say
from executors.cli.opening import finished_words, present_url
from executors.cli.options import add_config, add_run_verb, add_verb, again, flag, offer, read_config, value
from executors.platforms import EXECUTORS
from executors.preflight import run_url
from rendezvous import layout
from rendezvous.clock import SystemClock
from rendezvous.errors import RendezvousError

if TYPE_CHECKING:
    from diloco.model.fork import Fork
    from diloco.run.config import RunConfig
    from diloco.run.record import Run
    from executors.preflight.checks import Checked
    from executors.preflight.quote import StartRequest
    from rendezvous.agreement.membership import Wanted


UNSAID = {
    "config": "", "no_preflight": False, "alert": None, "again": False, "origin": "", "momentum": False,
    "detach": False, "yes": False,
}  # fmt: skip


def add_verbs(verbs: Any) -> None:
    train = add_verb(verbs, "train", "start a run, or resume it: the same command does both", _train)
    plan = add_verb(verbs, "plan", "show what `train` would start, and its price; starts nothing", _plan)
    for parser in (train, plan):
        add_config(parser)
        value(parser, "--run", "URL", "the run: runs/mine, s3://…", dest="url", required=parser is train)
        flag(parser, "--no-preflight", help="start without checking for mistakes")
    launch = add_verb(verbs, "launch", "start a script of your own as a run: replicas of `python train.py`", _launch)
    value(launch, "--run", "URL", "the run's bucket or folder: s3://… (default: runs/NAME of this folder)", dest="url")
    again(launch, "--file", metavar="PATH", dest="files", help="a file or folder that the script reads, to be sent")
    flag(launch, "--no-preflight", help="skip the check that the script joins a run")
    flag(launch, "--dry-run", help="show the files to send, the processes and the price; starts nothing")
    resume = add_run_verb(verbs, "resume", "continue a run; its bucket has everything that it needs", _resume)
    for parser in (train, plan, launch, resume):
        _add_requests(parser)
    flag(launch, "-m", dest="is_module", help="SCRIPT is a module, as for python -m")
    launch.add_argument("script", metavar="SCRIPT", help="a Python file whose trainer has DiLoCoCallback()")
    launch.add_argument("arguments", metavar="ARGUMENTS", nargs=REMAINDER, help="the script's own arguments")
    flag(train, "--again", help="recreate a run in which nothing was trained yet")
    value(train, "--from", "OLD[@STEP]", "begin with another run's weights after STEP outer steps", dest="origin")
    flag(train, "--momentum", help="with --from: begin with that run's outer momentum, too")
    for parser in (train, launch, resume):
        flag(parser, "--detach", help="return once a supervisor elsewhere supervises the run")
        flag(parser, "--yes", "-y", help="accept the price without a question")
        told = "a webhook that gets messages about troubles (or DILOCO_ALERT in the environment)"
        value(parser, "--alert", "URL", told, default="")
    demo = add_verb(verbs, "demo", "a whole run on this machine, with a kill -9 in the middle", _demo)
    value(demo, "--run", "DIR", "the run's folder (default: runs/demo; then runs/demo-2, …)", dest="url")


def _add_requests(parser: ArgumentParser) -> None:
    parser.set_defaults(**UNSAID)
    value(parser, "--replicas", "N", "replicas to keep (default: the run's number)", type="positive")
    value(parser, "--steps", "T", "outer steps in all (default: the run's number)", type="positive")
    value(parser, "--min-replicas", "M", "offers that every outer step needs", type="positive")
    where = parser.add_argument_group("where replicas run (default: this machine, or as the run had it)")
    names = f"{', '.join(EXECUTORS)}: all replicas there"
    offer(value(where, "--executor", "NAME", names, default=""), *EXECUTORS)
    several = "N replicas there, e.g. --place modal:2:H100,A100 --place local; the last one takes the rest"
    offer(again(where, "--place", type="place", metavar="NAME[:N[:GPU]]", dest="places", help=several), *EXECUTORS)
    ahead = "processes that only sample rollouts, ahead of the replicas, e.g. 4 or modal:8:L4; 0: none from now on"
    offer(again(where, "--actors", type="actors", metavar="[NAME:]N[:GPU]", help=ahead), *EXECUTORS)
    again(where, "--gpu", metavar="KIND", help="GPU type, as the platform names it; repeat for a second choice")
    again(where, "--secret", type="secret", metavar="NAME", dest="secrets", help="a secret for replicas, or PLACE.NAME")
    value(where, "--timeout", "TIME", "time limit of a replica: 6h, 90m (then it restarts)", type="duration")
    again(where, "--pip", metavar="PACKAGE", help="a package that your reward needs there")
    again(where, "--option", type="option", metavar="KEY=VALUE", help="an option of the platform: partition=gpu")
    money = parser.add_argument_group("limits of the costs: the run ends before it exceeds one (0: no limit)")
    value(money, "--max-usd", "X", "US dollars, since the run began", type="amount")
    value(money, "--max-hours", "H", "hours with any replica running", type="amount")
    flag(money, "--no-lease", help="let rented replicas continue (and cost) without a supervisor")
    flag(money, "--allow-unknown-price", default=None, help="start even if a price is unknown")


def request_of(args: Namespace, url: str) -> "StartRequest":
    """Return the typed options as a request.   url: the run's present URL.   Raises UsageError."""
    from executors.platforms.places import Place
    from executors.preflight.quote import BudgetRequest, FleetRequest, PlaceRequest, StartRequest

    places = tuple(Place.from_dict(p) for p in args.places or ())
    actors = None if args.actors is None else tuple(Place.from_dict(p) for p in args.actors if p["count"])
    where = PlaceRequest(
        executor=args.executor, places=places, actors=actors, gpu=tuple(args.gpu or ()),
        secrets=tuple(args.secrets or ()), timeout_s=args.timeout or 0.0, pip=tuple(args.pip or ()),
        options=tuple(args.option or ()), no_lease=args.no_lease,
    )  # fmt: skip
    return StartRequest(
        url,
        places=where,
        budget=BudgetRequest(args.max_usd, args.max_hours, args.allow_unknown_price),
        fleet=FleetRequest(args.replicas, args.steps, args.min_replicas).within(places),
        as_json=args.json,
        **{name: getattr(args, name) for name in UNSAID},
    )


def _train(args: Namespace) -> Answer:
    from diloco.run.founding import open_run
    from executors.preflight import quote
    from rendezvous.agreement.membership import read_control
    from rendezvous.stores.open import open_store

    clock = SystemClock()
    asked = request_of(args, present_url(run_url.shareable_url(args.url)))
    if asked.momentum and not asked.origin:
        raise run_url.UsageError("--momentum takes the momentum of the run that --from names; add --from OLD[@STEP]")
    wanted = read_control(open_store(asked.url))
    config = read_config(args)
    if asked.places.actors or wanted.most_actors:
        from executors.cli.starting.with_actors import with_actors

        config = with_actors(config, asked)
    for note in _checked(asked, config, wanted).notes:
        say(note)
    fork = _read_fork(asked, config) if asked.origin else None
    offer = quote.quote_start(asked, config, config.fleet.replicas)
    over = finished_words(open_store(asked.url), asked.url, asked.fleet.steps or config.fleet.steps)
    if not over and not agree_on_price(offer, asked.yes):
        return Answer(code=DECLINED)
    if asked.again:
        from executors.cli.starting.again import found_again

        asked = replace(asked, url=found_again(config, asked.url, clock, say))
    run_url.make_folder(asked.url)
    run = open_run(config, asked.url, clock, parent=fork.parent if fork else None, **vars(asked.fleet))
    if fork is not None:
        _begin_fork(run, fork, asked)
    if over:
        say(over)
    else:
        quote.write_quote(run.store, clock, offer)
    if run.record.why_codec:
        say(f"codec {run.record.codec}: {run.record.why_codec}")
    return _supervise(run, asked, read_control(run.store))


def _launch(args: Namespace) -> Answer:
    from executors.cli.starting.launch import ScriptRequest, found_script
    from rendezvous.agreement.membership import read_control

    stem = args.script.rpartition(".")[2] if args.is_module else Path(args.script).stem
    asked = request_of(args, present_url(run_url.shareable_url(args.url or f"runs/{stem}")))
    typed = ScriptRequest(
        args.script, tuple(args.arguments), is_module=args.is_module, files=tuple(args.files or ()),
        checked=not args.no_preflight, dry_run=args.dry_run,
    )  # fmt: skip
    made = found_script(typed, asked)
    return made if isinstance(made, Answer) else _supervise(made, asked, read_control(made.store))


def _read_fork(asked: "StartRequest", config: "RunConfig") -> "Fork":
    from diloco.model.fork import read_fork

    return read_fork(run_url.checked_url(asked.origin), config, asked.momentum)


def _begin_fork(run: "Run", fork: "Fork", asked: "StartRequest") -> None:
    from diloco.model.fork import begin

    begin(run, fork, SystemClock())
    say(f"continues from {fork.parent}, {'with' if asked.momentum else 'without'} its outer momentum")


def _resume(args: Namespace) -> Answer:
    from executors.cli.starting.resume import resume

    asked = request_of(args, present_url(run_url.shareable_url(args.run)))
    found = resume(asked)
    return found if isinstance(found, Answer) else _supervise(found[0], asked, found[1])


def _plan(args: Namespace) -> Answer:
    from executors.cli.starting.plan import look_for_run, plan

    config, bucket = read_config(args), look_for_run(args.url)
    asked = request_of(args, bucket.url)
    if asked.places.actors or bucket.wanted.most_actors:
        from executors.cli.starting.with_actors import with_actors

        config = with_actors(config, asked)
    return plan(config, asked, bucket, _checked(asked, config, bucket.wanted))


def _checked(asked: "StartRequest", config: "RunConfig", wanted: "Wanted") -> "Checked":
    """Check config, places and options before a run is created.  Raises UsageError."""
    from executors.preflight import quote
    from executors.preflight.checks import Checked, preflight

    places = quote.wanted_places(asked.places, wanted.places)
    quote.check_reach(asked.url or "s3://", places)
    return Checked() if asked.no_preflight else preflight(config, asked.config, asked.url, places)


def _supervise(run: "Run", asked: "StartRequest", wanted: "Wanted") -> Answer:
    from diloco.process import exitcodes
    from diloco.process.output import survive_lost_output
    from diloco.run.founding import solo_warning
    from executors.cli.looking.lines import view_for
    from executors.cli.starting.foreground import supervise_here

    if text := solo_warning(wanted):
        say(f"warning: {text}")
    if asked.detach:
        from executors.cli.starting.detached import detach_answer

        return detach_answer(run, asked.url)
    survive_lost_output()  # the fleet must outlive a closed pipe (`| head`) and a full disk under the log
    outcome = supervise_here(run, view=view_for(sys.stderr if asked.as_json else sys.stdout))
    if run.config.script is not None:
        from executors.cli.starting.launch import end_of

        outcome = end_of(run, outcome)
    said = [] if asked.as_json else [outcome.text]
    if outcome.code in (exitcodes.LEFT, exitcodes.GAVE_UP):
        more = next((f" {limit} N" for limit in ("--max-usd", "--max-hours") if f"raise {limit}" in outcome.text), "")
        said.append(f"to continue: diloco resume {shlex.quote(asked.url)}{more}")
    if outcome.code == exitcodes.DONE:
        export = f", or diloco export {shlex.quote(asked.url)} --to DIR" if _has_model(run) else ""
        said.append(f"next: diloco report {shlex.quote(asked.url)}{export}")
    return Answer({"run": run.url, "code": outcome.code, "text": outcome.text}, code=outcome.code, note="\n".join(said))


def _has_model(run: "Run") -> bool:
    """Whether `diloco export` has a model to write; a script with make_diloco publishes no model."""
    with suppress(RendezvousError):
        return run.store.get(layout.MODEL_MANIFEST) is not None
    return True


def _demo(args: Namespace) -> Answer:
    from executors.cli.starting.demo import demo_answer

    return demo_answer(args.url, as_json=args.json)
