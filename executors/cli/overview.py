"""The texts of `diloco --help`, and `diloco --version`.  A command with a verb does not import this file."""

import sys
from argparse import Action, ArgumentParser
from collections.abc import Mapping

SHOWN = {
    "starting": ("init", "check", "demo", "plan", "train", "launch", "resume"),
    "looking": ("status", "watch", "logs", "report"),
    "changing": ("scale", "stop"),
    "writing": ("export",),
    "checking": ("doctor",),
}
EXIT_CODES = """\
exit codes (docs/reference/operations.md says what to do):
  0    done; for `demo`: every check held; for `stop`: no replica runs any more; for `plan`: it could be started (75:
       the bucket, or the model that would be published from here, gave no answer)
  1    something failed (a replica that crashes again and again, a check that does not hold)
  2    a mistake in the command, the config, a file, or the run's URL, or a platform that cannot do it as asked
       (credentials, GPU, price, SDK): starting again changes nothing; for `doctor`: the store cannot carry a run
  3    another supervisor has taken over this run
  4    ended before the last outer step, because you asked or the budget is used up; `diloco resume` continues
  75   no progress for too long, or no answer from a platform or the bucket: repeat the command later (for a run:
       `diloco resume` continues it)
  130  interrupted (`diloco status` shows what goes on), or the price was declined, and nothing was started

DILOCO_DEBUG=1 shows the traceback behind an error.  DILOCO_RUN_KEY, set for all participants, seals a run's
records: what others write into its bucket does not count (docs/internals/protocol.md).
A run is a folder (runs/demo, file:///an/absolute/path), lies in a bucket (s3://bucket/prefix, gs://…, az://…,
hf://buckets/namespace/bucket/prefix), or on Modal itself (modal://name/prefix).  docs/operations.md says how to look
after one."""


def verbs_in_groups(texts: Mapping[str, str]) -> str:
    """Return the verbs in groups: most verbs have a line, the other verbs only their names."""
    lines = ["Train one model on replicas that meet only in a bucket."]
    for group, names in SHOWN.items():
        lines += ["", f"{group}:", *(f"    {name:8s} {texts[name]}" for name in names)]
    shown = {name for names in SHOWN.values() for name in names}
    return "\n".join([*lines, "", "more:", f"    {'  '.join(name for name in texts if name not in shown)}"])


class Version(Action):
    """The action of `diloco --version`, which looks up the release only when it is used."""

    def __call__(self, parser: ArgumentParser, *_: object) -> None:
        from importlib import metadata

        try:
            release = metadata.version("serverless-diloco")
        except metadata.PackageNotFoundError:
            release = "(not installed as a package)"
        print(f"diloco {release}, Python {sys.version.split()[0]}")
        parser.exit()
