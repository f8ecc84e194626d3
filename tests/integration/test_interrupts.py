"""Owns the proof that `oproj`, interrupted, ends soon and leaves nothing that loads.

    python3 tests/integration/test_interrupts.py --oproj PATH/oproj --oproj-run PATH/oproj-run
                                                 --workdir DIR [--only NAME]

NAME is a case or a group: interrupt.
"""

import os
import re
import signal
import subprocess
import time

from program import (FAILED, OK, REFUSED, bound, expect, fresh, listing, own_lines, rank_process,
                     run_cases)


def has_begun(target):
    """The temporary folder is there, and files in it are being written: they have no names yet."""
    if not list(target.parent.glob(target.name + ".tmp-*")):
        return False
    time.sleep(0.1)
    return True


def interrupt(bench, arguments, target, sent):
    """Ends the command in the middle: nothing is left, or, after SIGKILL, nothing that loads."""
    command = bench.program.command(arguments)
    process = subprocess.Popen(command, env=bench.program.environment, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    try:
        begin = time.monotonic()
        while time.monotonic() - begin < 10 and not has_begun(target):
            time.sleep(0.005)
        expect(process.poll() is None, "ended before it could be interrupted")
        process.send_signal(sent)
        stderr = process.communicate(timeout=10)[1]
        code = process.returncode
    finally:
        process.kill()
        process.wait()
    left = sorted(p for p in target.parent.iterdir() if p.name.startswith(target.name))
    try:
        expect(code != OK, "the signal came too late")
        expect(target not in left, f"{target.name} is there")
        if sent != signal.SIGKILL:
            expect((code, stderr, left) == (FAILED, "oproj: interrupted\n", []),
                   f"exit {code}, {stderr!r}, left {left}")
        for path in left:
            expect(re.fullmatch(rf"{re.escape(target.name)}\.tmp-\d+", path.name),
                   f"{path.name} does not look temporary")
            done = bench.program.start(["inspect", path])
            expect(done.returncode == REFUSED, f"{path.name} loads: exit {done.returncode}")
    finally:
        for path in left:
            fresh(path)
    return f"left {', '.join(p.name for p in left) or 'nothing'}"


def begun_run(bench, ranks=0):
    """A run whose layers take long, its first row read."""
    source = bench.synth("large", "--model", "v4-flash", "--layers", 3, "--mtp", 0)
    room = bench.path("room")
    room.mkdir()
    command = bench.program.command(["run", source, "--tokens", 48, "--output", room / "y", "--json",
                                     room / "j"], ranks)
    process = subprocess.Popen(command, env=bench.program.environment, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if not line.startswith("#"):
            break
    return process, room


def interrupt_run(bench, ranks):
    """A signal to one rank stops all of them after the layer; nothing is written."""
    process, room = begun_run(bench, ranks)
    try:
        target = rank_process(process.pid, ranks - 1) if ranks else process.pid
        os.kill(target, signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    expect(process.returncode == FAILED, f"exit {process.returncode}: {own_lines(stderr)}")
    wanted = f"oproj: rank {ranks - 1}: interrupted" if ranks else "oproj: interrupted"
    expect(own_lines(stderr) == [wanted], f"stderr {own_lines(stderr)}")
    expect(len(stdout.splitlines()) < 2, f"all layers ran: {stdout}")
    expect(not listing(room), f"left {sorted(listing(room))}")
    return wanted


def interrupt_twice(bench):
    """Whoever does not want to wait for the layer sends a second signal."""
    process, _ = begun_run(bench)
    try:
        for _ in range(2):
            time.sleep(0.2)  # well into a layer; the first has been noted
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
    finally:
        process.kill()
        process.wait()
    expect(process.returncode == -signal.SIGINT, f"exit {process.returncode}")
    return "ends at once"


def interrupt_synth(bench, sent):
    target = bench.path("killed")
    return interrupt(bench, ["synth", "--model", "v4-flash", "--layers", 4, "--mtp", 0, "--out",
                             target], target, sent)


def interrupt_split(bench, sent):
    source = bench.synth("large", "--model", "v4-flash", "--layers", 3, "--mtp", 0)
    target = bench.path("killed")
    return interrupt(bench, ["split", source, "--tp", 4, "--out", target], target, sent)


# ---- the list ----------------------------------------------------------------------------------


def all_cases():
    for sent in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        yield f"interrupt-synth-{sent.name}", "interrupt", bound(interrupt_synth, sent)
        yield f"interrupt-split-{sent.name}", "interrupt", bound(interrupt_split, sent)
    for n in (0, 2):
        yield f"interrupt-run-n{n}", "interrupt", bound(interrupt_run, n)
    yield "interrupt-twice", "interrupt", interrupt_twice


if __name__ == "__main__":
    run_cases(__doc__, all_cases())
