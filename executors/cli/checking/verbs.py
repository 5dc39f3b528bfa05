"""The verbs before a run: a new project, checks of a run's requirements, and help for the shell.

    init ─▶ check ─▶ (plan, train)        the steps of a new project
    setup doctor                          an account and a store
    objectives completion                 the menu of losses, tab completion

Not promised: that a run which passes the checks learns anything, or that a reward is right: only you know whether its
numbers are as intended.
"""

import os
import shlex
from argparse import Namespace
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executors.cli.answers import Answer, print_answer
from executors.cli.checking.init import MODEL, TASKS, init
from executors.cli.completion import SCRIPTS, completion_script, slots_of
from executors.cli.options import add_config, add_verb, again, flag, read_config, value
from executors.preflight import run_url
from rendezvous.clock import SystemClock

if TYPE_CHECKING:
    from inner.usercode.trial import PromptTrial, Trial

WIDTH = 72  # the limit of characters that `diloco check` shows of a prompt or completion


def add_verbs(verbs: Any) -> None:
    start = add_verb(verbs, "init", "make a small project that runs as it is: config, prompts, reward, test", _init)
    value(start, "folder", "FOLDER", "the project's new folder")
    value(start, "--model", "MODEL", f"a model on the Hub, a folder or .gguf ({MODEL})", default=MODEL)
    start.add_argument("--task", default="sums", choices=tuple(TASKS), help="sums (default), or yours: a template")
    check = add_verb(verbs, "check", "call the reward on the first prompts; starts nothing", _check)
    add_config(check)
    value(check, "--rows", "N", "prompts (default 3)", type="positive", default=3)
    again(check, "--completion", default=[], metavar="TEXT", help="an answer to score, too; may be repeated")
    doctor = add_verb(verbs, "doctor", "check that a store can carry a run; estimate time and cost of a sync", _doctor)
    value(doctor, "store", "URL", "URL of a store, or of a run to be created in it")
    size = doctor.add_mutually_exclusive_group()
    value(size, "--parameters", "N", "parameters of the model, e.g. 600M or 1.7B", type="count")
    value(size, "--config", "CONFIG", "a run.toml: its model, codec and replicas")
    value(doctor, "--replicas", "N", "number of replicas (default: as in CONFIG, else 4)", type="positive")
    text = "check login, store and secret, make missing ones if you agree, and print the command that starts a run"
    setup = add_verb(verbs, "setup", text, _setup)
    value(setup, "place", "PLACE", "modal or hf", choices=("modal", "hf"))
    value(setup, "--run", "URL", "default: modal://diloco/first, or a bucket of your namespace", dest="url")
    value(setup, "--secret", "NAME", "Modal's secret with the store's keys", type="secret", default="diloco-storage")
    flag(setup, "--yes", "-y", help="make missing things without asking")
    text = "show the menu for inner.grpo.objective: formulas, knobs, uses"
    told = "a run.toml: also list the knobs without effect in it"
    add_verb(verbs, "objectives", text, _objectives).add_argument("config", nargs="?", metavar="CONFIG", help=told)
    text = 'tab completion for your shell: eval "$(diloco completion bash)"'
    shell = add_verb(verbs, "completion", text, partial(_completion, verbs))
    value(shell, "shell", "SHELL", ", ".join(SCRIPTS), choices=tuple(SCRIPTS))
    shell.add_argument("--verb", default="", help="the verb to complete (`logs` takes sessions, such as r01-2, too)")
    value(shell, "--slots", "RUN", "only print the slots of a run, one per line (for the scripts)")


def _init(args: Namespace) -> Answer:
    names = init(Path(args.folder), model=args.model, task=args.task)
    steps = [
        f"cd {shlex.quote(args.folder)}",
        "python test_rewards.py                         # the reward, without a model",
        "diloco check run.toml                          # the reward on three prompts, with the model's tokenizer",
        "diloco plan run.toml --run runs/first          # what it would do; starts nothing",
        "diloco train run.toml --run runs/first",
    ]
    lines = [f"wrote {', '.join(names)}. Next:", *(f"  {step}" for step in steps)]
    return Answer({"folder": args.folder, "files": names}, lines)


def _check(args: Namespace) -> Answer:
    from inner.usercode.trial import try_reward

    config = read_config(args)
    steps = config.fleet.steps * config.outer.interval
    found = try_reward(config.inner, config.user_files(), rows=args.rows, given=args.completion, steps=steps)
    rewards = config.inner.rewards
    tried = ", ".join(rewards.named.values()) or str(config.inner.scoring_task)
    models = [f"not called here: {spelling}, a reward model" for spelling in rewards.models.values()]
    return Answer(asdict(found), [*check_lines(found, tried), *models])


def check_lines(trial: "Trial", reward: str) -> list[str]:
    """Return the lines that `diloco check` prints.   reward: the reward's name in the config."""
    shortest, longest = trial.tokens
    how = "through the model's chat template" if trial.template else "as plain text"
    lines = [f"{trial.prompts} prompts of {shortest} to {longest} tokens, {how}"]
    for number, tried in enumerate(trial.trials, 1):
        lines += _prompt_lines(number, tried)
    calls = len(trial.trials)
    lines.append(f"{reward} answered {len(trial.rewards)} completions in {1000 * trial.seconds:.3g} ms ({calls} calls)")
    return lines + _warnings(trial, reward)


def _prompt_lines(number: int, tried: "PromptTrial") -> list[str]:
    lines = [f"prompt {number}: {_shorten(tried.prompt)}"]
    for scored in tried.scored:
        value = "cannot say" if scored.reward is None else f"{scored.reward:g}"
        text = "an empty completion" if scored.source == "empty" else f"{scored.source}: {_shorten(scored.completion)}"
        lines.append(f"  {value:>10}   {text}")
    return lines


def _warnings(trial: "Trial", reward: str) -> list[str]:
    if trial.answered or trial.cut:
        return [*filter(None, [trial.answered, trial.cut and f"warning: {trial.cut}"])]
    values = set(trial.rewards)
    if values == {None}:
        return [
            f"warning: {reward} returned no number for any completion; a run with it learns nothing. Return a number "
            "for each completion that you can judge, 0.0 for a wrong one"
        ]
    if len(values) == 1:
        return [
            f"warning: every completion got {next(iter(values)):g}, and a group of equal rewards teaches nothing. "
            f'{trial.cause}Try an answer that should be worth more: --completion "…"'
        ]
    return []


def _shorten(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= WIDTH else f"{flat[: WIDTH - 1]}…"


def _doctor(args: Namespace) -> Answer:
    from executors.cli.checking.doctor import doctor
    from executors.cli.opening import notice_of_silence

    with notice_of_silence():
        table, good = doctor(run_url.checked_url(args.store), args.parameters, args.config, args.replicas)
    return Answer({"url": args.store, "good": good, "table": table.splitlines()}, [table], 0 if good else 2)


def _setup(args: Namespace) -> Answer:
    from executors.cli.checking import setup
    from executors.platforms.places import Place
    from executors.preflight.quote import check_reach, yes

    clock = SystemClock()
    url = run_url.checked_url(args.url or setup.default_url(args.place, clock))
    check_reach(url, [Place("hf-jobs" if args.place == "hf" else "modal")])
    steps = list[setup.SetupStep]()
    for step in setup.setup(args.place, url, args.secret, clock, lambda text: yes(text, args.yes), os.environ):
        steps.append(step)
        if not args.json:
            print_answer(Answer(lines=[step.line, *([f"  next: {step.todo}"] if step.todo else [])]), args.json)
    good = not any(step.todo for step in steps)
    typed = setup.next_command(args.place, url, args.secret)
    data = {"good": good, "steps": [vars(step) for step in steps], "command": typed}
    lines = ["all steps are ok. A small first run, for some cents (`plan` instead of `train` shows its price):", typed]
    return Answer(data, lines if good else [], 0 if good else 2)


def _objectives(args: Namespace) -> Answer:
    from diloco.run.config import load_config
    from inner.settings.menu import format_menu
    from inner.settings.objectives import PO_OBJECTIVES

    settings = {}
    about = []
    if args.config:
        inner = load_config(args.config).inner
        settings = {
            "gradient_accumulation_steps": inner.gradient_accumulation_steps,
            "steps_per_generation": inner.grpo.steps_per_generation,
            "num_iterations": inner.grpo.num_iterations,
        }
        about = [f"{args.config} has inner.grpo.objective = {inner.grpo.objective!r}\n"]
    return Answer({name: asdict(o) for name, o in PO_OBJECTIVES.items()}, [*about, format_menu(settings)])


def _completion(verbs: Any, args: Namespace) -> Answer:
    if args.slots is not None:
        found = slots_of(args.slots, sessions=args.verb == "logs")
        return Answer({"run": args.slots, "slots": found}, found)
    text = completion_script(verbs, args.shell)
    return Answer({"shell": args.shell, "script": text}, [text])
