"""The verbs that show a run. All verbs only read its bucket, except `--publish`, and drain and scale in `watch`.

    status costs report diff   short; they write nothing before all is read, so they are repeated if the bucket is busy
    watch logs                 follow a run

Not promised: data that are newer than the bucket's.
"""

import json
import shutil
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executors.cli.answers import Answer
from executors.cli.options import SLOTS, add_run_verb, add_verb, flag, offer, value
from executors.cli.reaching import opened, patient, patient_store
from executors.preflight import run_url
from rendezvous.clock import SystemClock

if TYPE_CHECKING:
    from diloco.run.record import Run
    from diloco.runlog.opening import View
    from diloco.runlog.reader import Reader
    from diloco.runlog.scope import Scope


HOME = "127.0.0.1"  # where --web serves the page


def add_verbs(verbs: Any) -> None:
    add_run_verb(verbs, "status", "show the state of a run", patient(_status))
    text = "follow a run live: curves, sessions, events; keys open logs and rollouts"
    watch = add_run_verb(verbs, "watch", text, _watch)
    flag(watch, "--web", help="show a page in your browser")
    value(watch, "--port", "P", "the page's port (default: 8642 if free; 0: any free port)", type="port")
    value(watch, "--bind", "HOST", f"the page's address (default: {HOME}; any other: a token in the URL)", default=HOME)
    flag(watch, "--publish", help="keep writing the current page into the bucket")
    logs = add_run_verb(verbs, "logs", "show the output of a replica", opened(_logs))
    told = "r00 (its newest launch), r00-1 (one session), or supervisor; left out: list the slots"
    offer(value(logs, "slot", "SLOT", told, nargs="?", default=""), SLOTS)
    flag(logs, "--follow", "-f", help="keep printing new lines until it ends")
    value(logs, "--tail", "N", "print only the last N lines", type="natural")
    add_run_verb(verbs, "costs", "show the costs of a run so far, by replica and place", patient(_costs))
    report = add_run_verb(verbs, "report", "the run as a page in one file, report.html", patient(_report))
    value(report, "--to", "DIR", "folder, or NAME.html (default: the run's folder; for a bucket, the current one)")
    flag(report, "--publish", help="also write the page into the bucket, below page/")
    flag(report, "--png", help="also write report.png, a picture of the page")
    text = "compare two runs: the settings that differ, and the curves side by side"
    diff = add_verb(verbs, "diff", text, patient(_diff))
    value(diff, "old", "OLD", "a run")
    value(diff, "new", "NEW", "the other run")


def _opened(url: str, scope: "Scope") -> "tuple[View, Reader]":
    from diloco.runlog.opening import open_view
    from diloco.runlog.reader import Reader

    view = open_view(run_url.checked_url(url), scope)
    return view, Reader(view.run.store, scope, view.cache, view.answers)


def _status(args: Namespace) -> Answer:
    from diloco.runlog.reached import note_chain_damage
    from diloco.runlog.reader import SUPERVISOR
    from diloco.runlog.scope import STATUS
    from executors.cli.looking import status
    from executors.supervision.money.bills import costs, unpriced
    from rendezvous.agreement.membership import read_beat

    view, reader = _opened(args.run, STATUS)
    report = reader.refresh()
    note_chain_damage(report, view.run.store)
    now = time.time()
    last, supervisor = status.describe_supervisor(read_beat(reader.ahead, SUPERVISOR), SystemClock(), report)
    spent = costs(report, now)
    table = status.status_table(report, now, shutil.get_terminal_size().columns)
    money = [f"  {status.cost_line(spent, report.wanted)}"] if spent.usd or unpriced(spent) else []
    data = {**status.status_dict(report, now), **status.cost_status(spent, report.wanted), **supervisor}
    return Answer(data, [*table, *money, f"  {last}"])


def _watch(args: Namespace) -> Answer:
    url = run_url.checked_url(args.run)
    if not args.web and (args.port is not None or args.bind != HOME):
        raise run_url.UsageError("--port and --bind belong to the page that --web serves. Add --web, or leave them out")
    if args.web or args.publish:
        from executors.cli.web.run import PageRequest, watch_page

        asked = PageRequest(web=args.web, publish=args.publish, port=args.port, bind=args.bind, as_json=args.json)
        return Answer(code=watch_page(asked, url, SystemClock()))
    from executors.cli.watch.run import watch

    return Answer(code=watch(url, SystemClock(), as_json=args.json, out=sys.stdout))


def _logs(args: Namespace, run: "Run") -> Answer:
    from executors.cli.looking import logs
    from rendezvous.agreement.membership import read_control

    with logs.log_of(run, read_control(run.store), args.slot) as log:
        if not args.follow:
            lines = log.lines(args.tail)
            return Answer({"slot": args.slot, "handle": log.handle, "lines": lines}, lines)
        for line in log.follow(args.tail):
            print(json.dumps({"slot": args.slot, "line": line}) if args.json else line, flush=True)
    return Answer()


def _costs(args: Namespace) -> Answer:
    from diloco.runlog.scope import COSTS, EVERYTHING, STATUS
    from executors.cli.looking import status
    from executors.cli.looking.box_costs import box_costs
    from executors.supervision.money.bills import costs
    from rendezvous import layout
    from rendezvous.records.records import Commit, decode_or_none

    view, reader = _opened(args.run, COSTS)
    report = reader.refresh()
    if report.taken > max((beat.step for beat in report.beats.values()), default=report.taken):
        newest = decode_or_none(Commit, view.run.store.get(layout.commit_key(report.taken - 1)))
        if newest is None or newest.t != report.taken - 1:  # that key has no commit: read and count all commits
            report = _opened(args.run, STATUS)[1].refresh()
    sampling = report.setting("inner", "sampling", {})
    if isinstance(sampling.get("boxes"), str):
        report = _opened(args.run, EVERYTHING)[1].refresh()  # the replicas' logs count the boxes that they used
    spent = costs(report, time.time())
    used = box_costs(sampling, report.events, spent.boxes)
    data = {
        "name": report.name,
        "url": report.url,
        **status.costs_dict(spent),
        **status.cost_status(spent, report.wanted),
        **({"boxes": used.to_dict()} if used else {}),
    }
    return Answer(data, [*status.cost_table(spent, report), *([used.line] if used else [])])


def _report(args: Namespace) -> Answer:
    from diloco.runlog.reached import FOLDERS, note_chain_damage
    from diloco.runlog.scope import EVERYTHING
    from diloco.runlog.summary import summary
    from executors.cli.looking import status
    from executors.cli.looking.report import late_lines, late_rewards_of, publish_page, write_page
    from executors.cli.warnings_said import warnings_said

    view, reader = _opened(args.run, EVERYTHING)
    report = reader.refresh()
    note_chain_damage(report, view.run.store, FOLDERS)
    to = Path(args.to) if args.to else Path(getattr(view.run.store, "root", "."))
    now = time.time()
    page = write_page(report, view.run.store, to, now)
    data = {**status.status_dict(report, now), "page": str(page)}
    wrote = f"\nwrote {page}"
    if args.png:
        from diloco.views.page.charts import write_picture

        data["picture"] = str(write_picture(report, page.parent))
        wrote += f" and {data['picture']}"
    with warnings_said():
        late = late_rewards_of(report, view.run.store, view.run.record.nonce)
    data |= {"late_rewards": late} if late else {}
    if args.publish:
        data["published"] = publish_page(report, patient_store(view.run.store), now)
        wrote += f"\npublished: {data['published']}"
    return Answer(data, [summary(report), *late_lines(late), wrote])


def _diff(args: Namespace) -> Answer:
    from diloco.runlog.scope import EVERYTHING
    from diloco.views.comparison import compare_runs

    (old, reader), (new, other) = (_opened(url, EVERYTHING) for url in (args.old, args.new))
    found = compare_runs((old.run.record, new.run.record), (reader.refresh(), other.refresh()))
    return Answer({"old": args.old, "new": args.new, **found.to_dict()}, found.lines(args.old, args.new))
