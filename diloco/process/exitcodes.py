"""Exit codes of a replica's process, for the process or platform that started it.

Any other end (a signal, …) is a crash: start the slot again.
"""

DONE = 0  # the run has all its outer steps
CRASHED = 1  # an unexpected error, also in its heartbeat's thread
USER_ERROR = 2  # the config, a file or the model is wrong; starting again changes nothing
FENCED = 3  # another process has this slot; start again only when that process is silent
LEFT = 4  # the replica was asked to leave; its work is durable
DIVERGED = 5  # the replica's θ was not the commits', or an object that it needed was deleted; starting again heals
BAD_DELTA = 6  # the pseudogradient was not finite, or far too long, so it was not offered; starting again heals
RESUME = 7  # the replica left because its platform's time limit is near; start the slot again
HUNG = 8  # an inner step hung (diloco/process/watchdog.py); starting again may help
NO_REWARD = 9  # the reward gave no more numbers; starting again helps when the reward's service works again
GAVE_UP = 75  # EX_TEMPFAIL: no progress for too long; the same command resumes the run

NAMES = {
    DONE: "done",
    USER_ERROR: "user error",
    FENCED: "fenced",
    LEFT: "left",
    DIVERGED: "diverged",
    BAD_DELTA: "bad delta",
    RESUME: "time limit near",
    HUNG: "inner step hung",
    NO_REWARD: "no reward",
    GAVE_UP: "gave up",
}
