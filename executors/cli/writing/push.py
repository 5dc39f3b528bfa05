"""`diloco export RUN --to DIR --push OWNER/NAME`: an exported model as a repository of the Hub.

    DIR ─▶ model or adapter + README.md (the card) + report.html + rollouts.jsonl ─▶ one commit of OWNER/NAME
           --dry-run ends here ┘                          no other file of DIR is uploaded

The card comes from the run's log alone: base model, curve, held-out rewards, sessions and their ends, price, versions,
and the digest by which `diloco verify` knows the weights.  A new repository is private unless --public says otherwise.

Not promised: a licence. The card names none; the base model's licence counts.
"""

import glob
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from diloco.model.traces import freeze
from diloco.run.config import ConfigError
from diloco.run.record import Run
from diloco.runlog.evaluation import score_words
from diloco.runlog.reader import Report, read_report
from diloco.runlog.summary import headline, summary
from diloco.units import dollars
from executors.cli.looking.report import write_page
from executors.preflight.run_url import UsageError
from executors.supervision.money.bills import costs
from inner.models.naming import is_hub_name
from inner.printable import first_line
from rendezvous.clock import SystemClock

CARD, ROLLOUTS = "README.md", "rollouts.jsonl"
SHARD = f"model-{'[0-9]' * 5}-of-{'[0-9]' * 5}.safetensors"
# an export writes no other files; on the Hub `*` matches `/` too, and would delete files of the user's own folders
WEIGHTS = (
    "adapter_config.json", "adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json", SHARD,
)  # fmt: skip
PACKAGES = ("serverless-diloco", "torch", "transformers", "trl", "peft")


def write_bundle(run: Run, step: int, to: Path) -> list[str]:
    """Write card, report and rollouts beside an exported model.   Return their names."""
    report = read_report(run.store)
    now = SystemClock().wall()
    write_page(report, run.store, to, now)
    with suppress(ConfigError):  # a run that logs no rollouts
        freeze(run.store, to / ROLLOUTS, run.record.nonce, sampled=True)
    (to / CARD).write_text(card(report, step, to, now), encoding="utf-8")
    return [name for name in (CARD, "report.html", ROLLOUTS) if (to / name).exists()]


def card(report: Report, step: int, folder: Path, now: float) -> str:
    """Return the model card of θ_step.   folder: has the exported model.   now: Unix time."""
    base = report.setting("inner", "model", "") or ""
    facts = {
        "base model": f"[{base}](https://huggingface.co/{base})" if is_hub_name(base) else base or "a script's own",
        "outer step": f"{step} of {report.wanted.steps}",
        "held out": "; ".join(f"step {e.step}: {score_words(e.headline[1])}" for e in _ends(report)) or "not measured",
        "sessions": ", ".join(f"{x.name} {x.how}" for x in report.sessions),
        "price": dollars(costs(report, now).usd),
        "versions": ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES if _is_here(name)),
        "digest of the weights": f"`{_digest(report, step)}` (`diloco verify RUN --step {step}` computes it again)",
    }
    rows = "\n".join(f"| {name} | {text} |" for name, text in facts.items())
    sample = f" `{ROLLOUTS}` has a sample of the rollouts." if (folder / ROLLOUTS).exists() else ""
    return (
        f"---\n{_front_matter(base, folder)}---\n\n# {report.name}\n\n{headline(report)}.\n\n"
        f"| | |\n|---|---|\n{rows}\n\n"
        f"```\n{summary(report)}\n```\n\n`report.html` has the curves.{sample}\n"
    )


def _ends(report: Report) -> list[Any]:
    """Return the first and the last evaluation on held-out prompts."""
    found = report.evaluations
    return [found[0], found[-1]] if len(found) > 1 else list(found)


def _front_matter(base: str, folder: Path) -> str:
    library = "peft" if (folder / "adapter_config.json").exists() else "transformers"
    named = f"base_model: {base}\n" if is_hub_name(base) else ""
    return f"library_name: {library}\n{named}tags:\n- serverless-diloco\n- diloco\n- trl\n"


def _is_here(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def _digest(report: Report, step: int) -> str:
    """Return the digest of θ_step that the replicas agreed on; "unknown" if the log has none."""
    found = {digest for s in report.steps if s.t == step - 1 for digest in s.thetas.values()}
    return found.pop() if len(found) == 1 else "unknown"


def push(folder: Path, files: Sequence[str], name: str, *, public: bool) -> str:
    """Upload these files of a folder as one commit; return its URL.   Raises UsageError with the next thing to do.

    Weights of an earlier export that the repository still has are deleted by the same commit."""
    try:
        from huggingface_hub import HfApi
    except ModuleNotFoundError:
        raise UsageError("--push needs huggingface_hub: pip install 'serverless-diloco[serverless]'") from None
    api = HfApi(library_name="serverless-diloco")
    try:
        api.create_repo(name, private=not public, exist_ok=True)
        found = api.upload_folder(
            folder_path=folder, repo_id=name, commit_message="diloco export",
            allow_patterns=[glob.escape(file) for file in files], delete_patterns=[*WEIGHTS],
        )  # fmt: skip
    except Exception as error:  # without a network, the client raises errors of whichever HTTP library it uses
        why = first_line(error)
        raise UsageError(
            f"the Hub did not take {name}: {why}. {folder} is written; log in with a token that may write "
            "(`hf auth login`) or repair the connection, and type the command again"
        ) from None
    return str(found)
