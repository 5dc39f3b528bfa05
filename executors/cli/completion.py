"""Tab completion, made from the parser itself: verbs, their options, choices of arguments, slots of a run.

    eval "$(diloco completion bash)"                               in ~/.bashrc
    eval "$(diloco completion zsh)"                                in ~/.zshrc
    diloco completion fish > ~/.config/fish/completions/diloco.fish

    diloco drain runs/mine <TAB>  ──▶  diloco completion bash --slots runs/mine --verb drain  ──▶  r00 r01 r02
    diloco logs runs/mine <TAB>                                              … --verb logs   ──▶  r00 … r00-1 r00-2 …

Not promised: names of runs; slots if the bucket cannot be read now.
"""

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from executors.cli.options import SLOTS


@dataclass(frozen=True)
class Option:
    """One option.   words: the values that the option takes; (): any value."""

    flags: tuple[str, ...]
    text: str
    takes_value: bool
    words: tuple[str, ...]


@dataclass(frozen=True)
class Verb:
    """One verb.   words: the choices for its positional arguments.   slots: the word after RUN is a slot."""

    name: str
    text: str
    options: tuple[Option, ...]
    words: tuple[str, ...]
    slots: bool

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(flag for option in self.options for flag in option.flags)


def completion_script(verbs: Any, shell: str) -> str:
    """Return the completion script for this shell.   verbs: the parser's subparsers (argparse's action)."""
    return SCRIPTS[shell](list(verbs_of(verbs)))


def slots_of(url: str, sessions: bool = False) -> list[str]:
    """Return the slots of the run at `url`; [] instead of an error, which a shell cannot show.

    sessions: add the sessions of each slot, and the supervisor.
    """
    from diloco.runlog.look import SUPERVISOR, ReadSoFar, take_look
    from diloco.runlog.scope import COSTS
    from rendezvous.stores.ahead import Ahead
    from rendezvous.stores.run_key import open_signed

    try:
        found = take_look(Ahead(open_signed(url)), COSTS, ReadSoFar())
    except Exception:  # a half-typed URL, no keys, no network: a shell cannot show errors during completion
        return []
    slots = found.wanted.member_names
    ended = [f"{slot}-{g}" for slot in slots for g in range(1, found.claims.get(slot, 0) + 1)]
    return [*slots, *ended, SUPERVISOR] if sessions else slots


def verbs_of(verbs: Any) -> Iterator[Verb]:
    texts = {choice.dest: choice.help for choice in verbs._choices_actions}
    for name, verb in verbs.choices.items():
        words = tuple(_positional_words(verb))
        plain = tuple(w for w in words if w != SLOTS)
        yield Verb(name, texts[name], tuple(_options_of(verb)), plain, SLOTS in words)


def _options_of(verb: argparse.ArgumentParser) -> Iterator[Option]:
    for action in verb._actions:
        if action.option_strings:
            yield Option(tuple(action.option_strings), action.help or "", action.nargs != 0, _offered_values(action))


def _positional_words(verb: argparse.ArgumentParser) -> Iterator[str]:
    for action in verb._actions:
        if not action.option_strings:
            yield from _offered_values(action)


def _offered_values(action: argparse.Action) -> tuple[str, ...]:
    return tuple(map(str, getattr(action, "offered", None) or action.choices or ()))


def bash_script(verbs: list[Verb]) -> str:
    rows = "\n".join(
        f"        {v.name}) words={shlex.quote(' '.join(v.words))} flags={shlex.quote(' '.join(v.flags))} ;;"
        for v in verbs
    )
    values = "\n".join(
        f"        {shlex.quote(f'{v.name} {flag}')}) words={shlex.quote(' '.join(o.words))} ;;"
        for v in verbs for o in v.options if o.words for flag in o.flags
    )  # fmt: skip
    slots = "|".join(v.name for v in verbs if v.slots)
    ask = 'diloco completion bash --verb "${COMP_WORDS[1]}" --slots'
    return f"""\
_diloco() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" words="" flags=""
    if [ "$COMP_CWORD" -eq 1 ]; then words={shlex.quote(" ".join(v.name for v in verbs))} flags="--help --version"
    else case "${{COMP_WORDS[1]}}" in
{rows}
    esac; fi
    case "${{COMP_WORDS[1]}} $previous" in
{values}
    esac
    case "${{COMP_WORDS[1]}} $COMP_CWORD $current" in
        *" -"*) words="$flags" ;;
        {_slot_cases(slots, "3")}) words="$({ask} "${{COMP_WORDS[2]}}" 2>/dev/null)" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _diloco diloco"""


def _slot_cases(verbs: str, at: str) -> str:
    """Return patterns for word `at` of these verbs: "logs|drain" -> "logs\\ 3\\ *|drain\\ 3\\ *"."""
    return "|".join(f"{verb}\\ {at}\\ *" for verb in verbs.split("|"))


def zsh_script(verbs: list[Verb]) -> str:
    described = " ".join(shlex.quote(f"{v.name}:{v.text}") for v in verbs)
    rows = "\n".join(f"        {v.name}) compadd -- {' '.join(map(shlex.quote, v.words + v.flags))} ;;" for v in verbs)
    values = "\n".join(
        f"        {shlex.quote(f'{v.name} {flag}')}) compadd -- {' '.join(o.words)}; return ;;"
        for v in verbs for o in v.options if o.words for flag in o.flags
    )  # fmt: skip
    slots = _slot_cases("|".join(v.name for v in verbs if v.slots), "4")
    return f"""\
_diloco() {{
    local -a verbs; verbs=({described})
    if (( CURRENT == 2 )); then _describe verb verbs; return; fi
    case "$words[2] $words[CURRENT-1]" in
{values}
    esac
    case "$words[2] $CURRENT $words[CURRENT]" in
        {slots}) compadd -- ${{(f)"$(diloco completion zsh --verb $words[2] --slots $words[3] 2>/dev/null)"}} ;;
    esac
    case "$words[2]" in
{rows}
    esac
    _files
}}
compdef _diloco diloco"""


def fish_script(verbs: list[Verb]) -> str:
    lines = []
    for verb in verbs:
        inside = f"complete -c diloco -n '__fish_seen_subcommand_from {verb.name}'"
        lines.append(f"complete -c diloco -f -n __fish_use_subcommand -a {verb.name} -d {shlex.quote(verb.text)}")
        lines += [f"{inside} -f -a {word}" for word in verb.words]
        if verb.slots:
            ask = f"diloco completion fish --verb {verb.name} --slots (commandline -opc)[3]"
            lines.append(f"{inside} -f -a '({ask} 2>/dev/null)'")
        for option in verb.options:
            named = " ".join(f"-l {f[2:]}" if f.startswith("--") else f"-s {f[1:]}" for f in option.flags)
            value = f" -x -a {shlex.quote(' '.join(option.words))}" if option.words else " -r" * option.takes_value
            lines.append(f"{inside} {named}{value} -d {shlex.quote(option.text)}")
    return "\n".join(lines)


SCRIPTS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
