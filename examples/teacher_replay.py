"""Make preference pairs from traces: what would three stronger models have done?

    diloco traces runs/first --to traces.jsonl                                   your own run's rollouts, or
    python examples/teacher_replay.py traces.jsonl --failed --usd 2.00 --to pairs.jsonl
    python examples/teacher_replay.py traces.json --format tau-bench --usd 2.00 --to pairs.jsonl      other people's

    traces ─▶ states ─▶ three teachers, at most $2.00, answers in pairs.ledger ─▶ pairs.jsonl ─▶ inner.replay.pairs
                        after a kill, the same command continues, and pays for no answer twice

--failed asks only where the student's action failed, --unsure 0.5 only where its group was that unsure (in nats).
Other people's traces do not say how unsure their agent was: --entropy-of MODEL measures it with your model, in nats per
token, before the teachers are asked.

Needs OPENROUTER_API_KEY, or your own endpoint: --base-url http://127.0.0.1:8000/v1 --teacher MODEL --teacher OTHER.
With data-juicer installed, --normalize leaves out pairs that are too short, too long, garbage or repeated.

Not promised: good pairs from few teachers. Read some before you train on them.
"""

import argparse
import asyncio
import json
from pathlib import Path

from inner import (
    DEFAULT_TEACHERS,
    DJNormalizer,
    InnerError,
    Teacher,
    TraceState,
    extract_dpo_pairs,
    load_states,
    openhands_states,
    pair_outcomes,
    replay_trace,
    save_pairs,
    swe_agent_states,
    tau_bench_states,
)
from inner.replay.traces import harbor_states

FORMATS = {
    "states": lambda path, tools: load_states(path),
    "tau-bench": tau_bench_states,
    "swe-agent": swe_agent_states,
    "openhands": openhands_states,
    "harbor": harbor_states,
}


def main() -> None:
    given = arguments()
    tools = json.loads(given.tools.read_text()) if given.tools else []
    states = FORMATS[given.format](given.traces, tools)
    states = [state for state in states if state.get("error") or not given.failed][: given.limit]
    if not states:
        raise InnerError(f"{given.traces} has no state to ask about" + (" whose action failed" * given.failed))
    states = measured(given.entropy_of, states) if given.entropy_of else states
    teachers = [Teacher(m, 0.0, 0.0, base_url=given.base_url, key_env=None) for m in given.teacher] or DEFAULT_TEACHERS
    normalizer = DJNormalizer() if given.normalize else None
    if normalizer is not None:
        normalizer.check()
    ledger = given.to.with_suffix(".ledger")
    agreeing = {"agreement_threshold": given.agree, "key": given.key}
    options = {"ledger": ledger, "min_student_entropy": given.unsure} | agreeing
    actions = asyncio.run(replay_trace(states, teachers, given.usd, **options))
    print(actions.summary())
    print(f"{len(states)} states:", dict(pair_outcomes(states, actions, **agreeing)))
    pairs = extract_dpo_pairs(states, actions, **agreeing)
    save_pairs(pairs if normalizer is None else normalizer.normalize(pairs), given.to)
    print(f"pairs in {given.to}")


def measured(name: str, states: list[TraceState]) -> list[TraceState]:
    """Return the states with this model's entropy.   name: a folder, or a name on the Hub."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from inner.channels.state_entropy import measure_entropy

    try:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InnerError(f"--entropy-of {name} could not be loaded: {str(error).splitlines()[0]}") from error
    found = measure_entropy(model, tokenizer, states)
    values = sorted(state["student_entropy"] for state in found)
    print(f"student_entropy: {values[0]:.3f} to {values[-1]:.3f} nats, median {values[len(values) // 2]:.3f}")
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--format", choices=FORMATS, default="states")
    parser.add_argument("--tools", type=Path, help="a JSON file with the agent's tool schemas")
    parser.add_argument("--to", type=Path, default=Path("pairs.jsonl"))
    parser.add_argument("--usd", type=float, required=True, help="the most to spend, over all runs with the same --to")
    parser.add_argument("--agree", type=float, default=2, help="so many teachers must agree")
    parser.add_argument("--key", help="how commands are written in the turns: fenced, command_tag, function_tag, react")
    parser.add_argument("--failed", action="store_true", help="only states whose action failed")
    parser.add_argument("--unsure", type=float, metavar="NATS", help="only states with this student_entropy or more")
    parser.add_argument(
        "--entropy-of", metavar="MODEL", help="measure student_entropy with this model where it is missing"
    )
    parser.add_argument("--limit", type=int, help="only the first states")
    parser.add_argument(
        "--base-url", default="http://127.0.0.1:8000/v1", help="with --teacher: an endpoint without a price"
    )
    parser.add_argument("--teacher", action="append", default=[], help="a model at --base-url; may be given again")
    parser.add_argument("--normalize", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except InnerError as error:
        raise SystemExit(str(error)) from None
