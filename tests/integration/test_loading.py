"""Owns the proof that `oproj run` loads as it says: progress and summary, bounded by --load-memory,
and a job that ends, leaving nothing, when a rank is interrupted or killed while it loads.

    python3 tests/integration/test_loading.py --oproj PATH/oproj --oproj-run PATH/oproj-run
                                              --shim PATH/liboproj_test_shim.so --workdir DIR

The shim makes large reads take long.  One line per case; exit status 0 = all passed, 1 = a failure.
"""

import argparse
import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from program import (FAILED, OK, REFUSED, Bench, CaseFailure, Program, expect, expect_refusal,
                     fresh, listing, own_lines, rank_process)

RANKS = 4
KILL_LIMIT_S = 15
LARGE_BYTES = 1 << 20  # reads of weights; headers and scales stay quick
SUMMARY = re.compile(r"# loaded (\d+) layers? in [\d.]+ s: ([\d.]+) MB needed, ([\d.]+) MB read, "
                     r"([\d.]+) MB moved between ranks, [\d.]+ GB/s")


def large(bench):
    return bench.synth("large", "--model", "v4-flash", "--layers", 3, "--mtp", 0)


def slow(bench, latency_s):
    return {"LD_PRELOAD": bench.shim, "SHIM_LATENCY_US": str(int(latency_s * 1e6)),
            "SHIM_LATENCY_LEAST": str(LARGE_BYTES)}


def begin_slow_run(bench, latency_s, ranks):
    """A run on slow storage, and the room in which it would leave its files."""
    room = bench.path("room")
    room.mkdir()
    command = bench.program.command(["run", large(bench), "--tokens", 1, "--output", room / "y",
                                     "--json", room / "j"], ranks)
    process = subprocess.Popen(command, env=bench.program.environment | slow(bench, latency_s),
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return process, room


def rank_processes(process, ranks):
    """Once all of them are there."""
    begin = time.monotonic()
    while True:
        try:
            return [rank_process(process.pid, rank) for rank in range(ranks)]
        except CaseFailure:
            expect(time.monotonic() - begin < 10, "the ranks have not started")
            time.sleep(0.05)


def has_file_open(pid, name):
    try:
        return any(os.readlink(link).endswith(name) for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def is_alive(pid):
    """A process that is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def killed_case(bench):
    """SIGKILL of a rank while it loads, once the job has told of its progress."""
    process, room = begin_slow_run(bench, 2.5, RANKS)
    try:
        pids = rank_processes(process, RANKS)
        line = process.stderr.readline()
        while line and not line.startswith("oproj:"):
            line = process.stderr.readline()
        expect(re.fullmatch(r"oproj: loading 0\.\d\d of 0\.20 GB, 0\.\d\d GB/s, \d+ s left\n", line),
               f"progress: {line!r}")
        begin = time.monotonic()
        os.kill(pids[2], signal.SIGKILL)
        stdout = process.communicate(timeout=KILL_LIMIT_S)[0]
        seconds = time.monotonic() - begin
    finally:
        process.kill()
        process.wait()
    expect(process.returncode != OK, "exit 0")
    expect(not stdout, f"stdout {stdout!r}")
    time.sleep(0.2)
    alive = [pid for pid in pids if is_alive(pid)]
    expect(not alive, f"still running: {alive}")
    expect(not listing(room), f"left {sorted(listing(room))}")
    return f"{line.strip()}; ended after {seconds:.1f} s with exit {process.returncode}"


def interrupted_case(bench, ranks):
    """SIGTERM to the last rank while it loads ends the job at the next step."""
    process, room = begin_slow_run(bench, 0.5, ranks)
    try:
        pid = rank_processes(process, ranks)[ranks - 1] if ranks else process.pid
        begin = time.monotonic()
        while not has_file_open(pid, "model.safetensors") and time.monotonic() - begin < 10:
            time.sleep(0.02)
        time.sleep(0.3)
        os.kill(pid, signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=KILL_LIMIT_S)
    finally:
        process.kill()
        process.wait()
    wanted = f"oproj: rank {ranks - 1}: interrupted" if ranks else "oproj: interrupted"
    expect(own_lines(stderr) == [wanted], f"stderr {own_lines(stderr)}")
    expect((process.returncode, stdout) == (FAILED, ""), f"exit {process.returncode}, {stdout!r}")
    expect(not listing(room), f"left {sorted(listing(room))}")
    return wanted


def truncated_case(bench):
    """A file that is cut while it loads: one sentence, whichever rank meets it."""
    source = large(bench) / "model.safetensors"
    whole = source.stat().st_size
    process, room = begin_slow_run(bench, 1, RANKS)
    try:
        pid = rank_processes(process, RANKS)[0]
        begin = time.monotonic()
        while not has_file_open(pid, "model.safetensors") and time.monotonic() - begin < 10:
            time.sleep(0.02)
        time.sleep(0.3)
        os.truncate(source, whole // 2)
        stdout, stderr = process.communicate(timeout=KILL_LIMIT_S)
    finally:
        process.kill()
        process.wait()
        os.truncate(source, whole)
    lines = own_lines(stderr)
    expect((process.returncode, stdout) == (REFUSED, ""), f"exit {process.returncode}, {stdout!r}")
    expect(len(lines) == 1 and "model.safetensors: ends at byte" in lines[0], f"stderr {lines}")
    expect(not listing(room), f"left {sorted(listing(room))}")
    return re.sub(r"\S*/", "", lines[0])


def summary_case(bench):
    """What was needed, read and moved; the same in the JSON."""
    source, room = large(bench), bench.path("room")
    room.mkdir()
    needed = (room.parent / "large" / "model.safetensors").stat().st_size / 1e6
    told = []
    for ranks in (0, RANKS):
        done = bench.program.succeed("run", source, "--tokens", 0, "--json", room / "j",
                                     ranks=ranks)
        lines = [SUMMARY.fullmatch(line) for line in done.stdout.splitlines()]
        lines = [line for line in lines if line]
        expect(len(lines) == 1, f"{len(lines)} summaries: {done.stdout}")
        count, *values = map(float, lines[0].groups())
        expect(count == 3 and values[0] == values[1], f"{lines[0].group()}")
        expect(abs(values[0] - needed) < 0.01, f"{values[0]} MB, the file has {needed}")
        # Of WO_B, half of the bytes, every rank reads a share and keeps of that only its own.
        moved = needed / 2 * (ranks - 1) / ranks if ranks else 0
        expect(abs(values[2] - moved) < 0.1, f"{values[2]} MB moved, not {moved}")
        load = json.loads((room / "j").read_text())["load"]
        expect(load["seconds"] > 0 and [round(load[f"{k}_bytes"] / 1e6, 2) for k in
                                        ("needed", "read", "moved")] == values, f"{load}")
        told.append(f"{values[2]} MB moved")
    return ", ".join(told)


def memory_case(bench):
    """--load-memory bounds what loading takes, and is refused when nothing fits into it."""
    source = large(bench)
    line = expect_refusal(bench, ["run", source, "--tokens", 1, "--load-memory", 1],
                          ["at least", "allowed"], code=REFUSED)
    bench.program.succeed("run", source, "--tokens", 0, "--load-memory", 68)
    return line


def passes_case(bench):
    """Where memory does not hold all layers at once, they come in several passes; y is the same."""
    source, room = large(bench), bench.path("room")
    room.mkdir()
    arguments = ["run", source, "--tokens", 1, "--load-memory", 68, "--output", room / "y"]
    bench.program.succeed(*arguments)
    wanted = (room / "y").read_bytes()
    for megabytes in range(560, 200, -32):
        limit = (megabytes << 20, megabytes << 20)
        done = bench.program.start(
            arguments, preexec_fn=lambda r=limit: resource.setrlimit(resource.RLIMIT_AS, r))
        expect(done.returncode == OK, f"exit {done.returncode} with {megabytes} MB: {done.stderr}")
        passes = sum(bool(SUMMARY.fullmatch(line)) for line in done.stdout.splitlines())
        expect((room / "y").read_bytes() == wanted, "y differs")
        if passes > 1:
            return f"{passes} passes in {megabytes} MB"
    raise CaseFailure("one pass at any memory")


def terminal_case(bench, ranks):
    """On a terminal, be it mpirun's: a bar that is redrawn in place, and a line's end behind it."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(bench.program.command(["run", large(bench), "--tokens", 0], ranks),
                               env=bench.program.environment | slow(bench, 0.2),
                               stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    drawn = b""
    try:
        while chunk := os.read(ours, 4096):
            drawn += chunk
    except OSError:  # the terminal's other end is closed
        pass
    os.close(ours)
    expect(process.wait(timeout=20) == OK, f"exit {process.returncode}")
    bars = [part for part in drawn.decode().split("\r") if part.startswith("loading")]
    expect(len(bars) >= 3, f"drawn: {drawn!r}")
    for bar in bars:
        expect(re.match(r"loading \[=* *\] 0\.\d\d of 0\.20 GB", bar), f"bar {bar!r}")
    expect(re.search(r"\[=+\] 0\.20 of 0\.20 GB, [\d.]+ GB/s, 0 s left", bars[-1]), f"{bars[-1]!r}")
    return bars[-2].split("\033")[0]


CASES = {"summary": summary_case, "memory": memory_case, "passes": passes_case,
         "terminal": lambda b: terminal_case(b, 0), "terminal-n2": lambda b: terminal_case(b, 2),
         "interrupted": lambda b: interrupted_case(b, 0),
         "interrupted-n2": lambda b: interrupted_case(b, 2), "killed": killed_case,
         "truncated": truncated_case}


def main():
    parser = argparse.ArgumentParser(description="how oproj run loads")
    for flag in ("--oproj", "--oproj-run", "--shim"):
        parser.add_argument(flag, required=True, type=lambda p: str(Path(p).resolve()))
    parser.add_argument("--workdir", required=True, type=lambda p: Path(p).resolve())
    options = parser.parse_args()
    options.workdir.mkdir(parents=True, exist_ok=True)
    bench = Bench(Program(options.oproj, options.oproj_run), options.workdir)
    bench.shim = options.shim
    failed = 0
    for name, case in CASES.items():
        try:
            print(f"ok   {name}: {case(bench)}", flush=True)
        except (CaseFailure, OSError, subprocess.TimeoutExpired) as failure:
            failed += 1
            print(f"FAIL {name}: {failure}", flush=True)
    fresh(options.workdir / "large")
    print(f"{len(CASES) - failed} of {len(CASES)} passed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
