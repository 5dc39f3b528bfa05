"""Tab completion, made from the parser itself: verbs, their options, and words that are chosen from a list.

    eval "$(diloco completion bash)"                               in ~/.bashrc
    eval "$(diloco completion zsh)"                                in ~/.zshrc
    diloco completion fish > ~/.config/fish/completions/diloco.fish

Not promised: names of runs and slots; those would need a look into a bucket for every key pressed.
"""

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """options: (flags, help, takes a value).   words: what its positional arguments are chosen from."""

    name: str
    text: str
    options: tuple[tuple[tuple[str, ...], str, bool], ...]
    words: tuple[str, ...]

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(flag for flags, _, _ in self.options for flag in flags)


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    return {"bash": bash, "zsh": zsh, "fish": fish}[shell](list(verbs_of(parser)))


def verbs_of(parser: argparse.ArgumentParser) -> Iterator[Verb]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, verb in action.choices.items():
                yield Verb(name, texts.get(name, ""), tuple(_options(verb)), tuple(_words(verb)))


def _options(verb: argparse.ArgumentParser) -> Iterator[tuple[tuple[str, ...], str, bool]]:
    for action in verb._actions:
        if action.option_strings:
            yield tuple(action.option_strings), action.help or "", action.nargs != 0


def _words(verb: argparse.ArgumentParser) -> Iterator[str]:
    for action in verb._actions:
        if not action.option_strings and action.choices:
            yield from map(str, action.choices)


def bash(verbs: list[Verb]) -> str:
    rows = "\n".join(
        f"        {v.name}) words={shlex.quote(' '.join(v.words))} flags={shlex.quote(' '.join(v.flags))} ;;"
        for v in verbs
    )
    return f"""\
_diloco() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words="" flags=""
    if [ "$COMP_CWORD" -eq 1 ]; then words={shlex.quote(" ".join(v.name for v in verbs))} flags=--help
    else case "${{COMP_WORDS[1]}}" in
{rows}
    esac; fi
    case "$current" in -*) words="$flags" ;; esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _diloco diloco"""


def zsh(verbs: list[Verb]) -> str:
    described = " ".join(shlex.quote(f"{v.name}:{v.text}") for v in verbs)
    rows = "\n".join(f"        {v.name}) compadd -- {' '.join(map(shlex.quote, v.words + v.flags))} ;;" for v in verbs)
    return f"""\
_diloco() {{
    local -a verbs; verbs=({described})
    if (( CURRENT == 2 )); then _describe verb verbs; return; fi
    case "$words[2]" in
{rows}
    esac
    _files
}}
compdef _diloco diloco"""


def fish(verbs: list[Verb]) -> str:
    lines = []
    for verb in verbs:
        inside = f"complete -c diloco -n '__fish_seen_subcommand_from {verb.name}'"
        lines.append(f"complete -c diloco -f -n __fish_use_subcommand -a {verb.name} -d {shlex.quote(verb.text)}")
        lines += [f"{inside} -f -a {word}" for word in verb.words]
        for flags, text, takes_value in verb.options:
            named = " ".join(f"-l {f[2:]}" if f.startswith("--") else f"-s {f[1:]}" for f in flags)
            lines.append(f"{inside} {named}{' -r' if takes_value else ''} -d {shlex.quote(text)}")
    return "\n".join(lines)
