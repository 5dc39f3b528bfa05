"""Create the run of a loop that has no run.toml: a script's, or any loop's around make_diloco.

    no run.json at the URL  ─▶ write it: the loop's mathematics, its layout, what is frozen
    run.json exists there   ─▶ compare, and take its codec                                    WrongRun if it differs

Not promised: that frozen weights are right; only their digests are compared.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.outer.flat import layout_of
from diloco.outer.frozen import frozen_digest
from diloco.process.session import Session
from diloco.run.founding import solo_warning
from diloco.run.library import agree_on_run

if TYPE_CHECKING:
    from diloco.outer.loop import OuterLoop


def found_run(session: Session, loop: "OuterLoop", frozen: str | None) -> None:
    """Write run.json, or compare with the existing one. Take the codec from run.json.

    frozen: digest of frozen weights (frozen.py); None: computed here.
    """
    rv = session.rv
    frozen = frozen_digest(loop.model) if frozen is None else frozen
    stands = agree_on_run(
        rv.store, session.clock, loop.mathematics(), layout_of(loop.model),
        frozen=frozen, replicas=rv.wanted.replicas,
    )  # fmt: skip
    loop.rules = replace(loop.rules, codec=stands.codec)
    if text := solo_warning(rv.wanted):
        session.emit("warning", kind="solo", text=text)
    session.emit("codec", codec=stands.codec, why=stands.why_codec or "as asked for")
