"""The first code in the sandbox: it limits itself, runs one program, and writes one value.   Standard library only.

    stdin   {"run": program, "limits": {"memory": bytes, "cpu": seconds, "file": bytes}, "value": bool,
             "paths": folders before the standard library, "packages": folders after it,
             "room": a folder to write to, "beside": {path: text}, written there}

    value   true: fds 1 and 2 go to /dev/null (a warning is not a wrong answer); the program's `result` is written as
            canonical JSON, or {"raises": "ValueError"} if the program raised, with the error's class
            false: the program's own output is written

This code reads no expected value and no other test.   With -s -P -S -B, Python reads no sitecustomize and no *.pth.

Not promised: that the value comes from the program. Code in this process can write to any descriptor. So judge.py
compares the output with a value that this process cannot see.
"""

import json
import os
import resource
import sys


def main() -> None:
    asked = json.loads(sys.stdin.buffer.read())
    limits = asked["limits"]
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_CPU, limits["cpu"]),
        (resource.RLIMIT_FSIZE, limits["file"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_SIGPENDING, 64),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_NPROC, 1),
    ):
        resource.setrlimit(kind, (value, value))
    sys.path[:] = [*asked["paths"], *sys.path, *asked["packages"]]
    sys.dont_write_bytecode = True
    for name, text in asked["beside"].items():
        path = os.path.join(asked["room"], name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    if asked["beside"]:
        os.environ["TMPDIR"] = asked["room"]
        os.chdir(asked["room"])
        sys.path.insert(0, asked["room"])
    if not asked["value"]:
        exec(compile(asked["run"], "<program>", "exec"), {"__name__": "__main__"})
        return
    dumps, write, leave = json.dumps, os.write, os._exit
    out = os.dup(1)
    for fd in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
    names = {"__name__": "__main__"}
    try:
        exec(compile(asked["run"], "<test>", "exec"), names)
        value = names.get("result")
    except Exception as error:
        value = {"raises": type(error).__name__}
    write(out, dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())
    leave(0)


main()
