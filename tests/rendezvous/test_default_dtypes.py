"""A script's own default dtype or device (torch.set_default_dtype, set_default_device) changes no bit of a body.

Before: the kernels' trials wrote fp32 into bfloat16 memory at import, which ended the process ("double free").
"""

import subprocess
import sys

import numpy as np
import pytest
import torch

from rendezvous.codecs.kernels import cpu

PROGRAM = """import sys, zlib
import numpy as np, torch
import os
for default in sys.argv[2:]:  # a process for each, which need not import torch again
    sys.stdout.flush()
    if os.fork() == 0:
        break
    _, status = os.wait()
    assert status == 0, (default, status)
    print("----")
else:
    sys.exit()
exec(default)
if sys.argv[1] == "without":
    sys.modules["rendezvous.codecs.kernels.cpu"] = None
from rendezvous import codecs
from rendezvous.codecs import get_codec, load_mean_kernel, why_no_kernels
assert bool(why_no_kernels()) == (sys.argv[1] == "without"), why_no_kernels()
x = np.linspace(-3, 5, 20_001, dtype=np.float32) ** 3
for name in codecs.NAMES:
    codec = get_codec(name)
    out = np.zeros(codec.max_body_size(x.size), np.uint8)
    for e in (None, x / 7):
        used = codec.encode(x, out, e, *([x * 2] if name == "bf16-gate" else []))
        total = x / 3
        codec.accumulate(out[:used], 0.3, total, False)
        print(name, *(zlib.crc32(a.tobytes()) for a in (out, total, total if e is None else e)))
    if codec.ages:
        age = np.zeros(x.size, np.uint8)
        list(codec.encode_each(x, out, [(0, x.size)], x / 7, age))
        print("ages", zlib.crc32(out.tobytes()), zlib.crc32(age.tobytes()))
"""


def bodies_with(kernels: str, defaults: list[str]) -> list[str]:
    command = [sys.executable, "-c", PROGRAM, kernels, *defaults]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return done.stdout.split("----\n")[:-1]


DEFAULTS = ("dtype(torch.bfloat16)", 'device("meta")', "dtype(torch.float16)", "dtype(torch.float64)")


@pytest.mark.parametrize(
    ("kernels", "number"),
    [("with", 2), pytest.param("with", 4, marks=pytest.mark.slow), pytest.param("without", 4, marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_a_default_dtype_or_device_changes_no_bit(kernels: str, number: int) -> None:
    expected, *found = bodies_with(kernels, ["", *(f"torch.set_default_{name}" for name in DEFAULTS[:number])])
    assert expected and found == [expected] * number


@pytest.mark.parametrize("wrong", ["bfloat16", "float64", "meta", "strided"])
def test_memory_of_another_kind_does_not_reach_c(wrong: str) -> None:
    x, rows = torch.ones(1024), torch.zeros(1, 1028, dtype=torch.uint8)
    bad = {
        "bfloat16": x.bfloat16(), "float64": x.double(), "meta": x.to("meta"), "strided": torch.ones(2048)[::2],
    }[wrong]  # fmt: skip
    for call in (
        lambda: cpu.encode("int8", bad, None, rows),
        lambda: cpu.encode("int8", x, bad, rows),
        lambda: cpu.encode("int8", x, None, x.view(1, -1)),
        lambda: cpu.add("int8", rows, 1.0, bad, True),
        lambda: cpu.add("int8", bad, 1.0, x, True),
    ):
        with pytest.raises(TypeError, match="a C kernel takes contiguous"):
            call()
    assert np.array_equal(rows.numpy(), np.zeros((1, 1028)))
