"""Owns the proof that a job survives no rank that it has lost: it ends, soon, and says which.

    python3 tests/integration/test_faults.py --oproj PATH/oproj [--bench PATH/oproj-bench]
                                             --mpirun mpirun --fault PATH/fault.so --workdir DIR
                                             [--all] [--ranks N,N...] [--deadline S] [--jobs N]
                                             [--table FILE]

A cell is a fault (SIGKILL, SIGSTOP, exit(3), abort()) that strikes one rank in one phase of
`oproj run`, or in the replays of `oproj-bench layer`, on n ranks; fault.so strikes it.  Each must end with a code that is not 0, within 15 s (a
stopped rank: within the deadline and 15 s), with one sentence of oproj's that names the rank and
the phase, and leave no process and no file.  Without --all a selection; --ranks leaves out what
needs other numbers of ranks; --deadline is what the ranks have (3 s; a GPU's start takes longer);
--jobs runs as many checks at once; --table writes what was measured.  Exit status 0 = all cells hold.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

KILL_AFTER_S = 2.5  # when they are in their first forward
LIMIT_S = 15
KINDS = ("kill", "stop", "exit", "abort")
# name: the call that is struck, in which one, and what the sentence calls the place
PHASES = {
    "start": ("MPI_Init_thread", 1, "start"),
    "set-up": ("oproj_ctx_create", 1, "set-up"),
    "load": ("oproj_layers_load", 1, "load of layers.0"),
    "forward": ("oproj_forward", 1, "forward of layers.0"),
    "later forward": ("oproj_forward", 3, "forward of layers.2"),
    "replays": ("replays", 1, "of 1 token"),
    "shutdown": ("MPI_Finalize", 1, "shutdown"),
}
SELECTION = [("kill", "start", 2, 1), ("stop", "start", 2, 1), ("exit", "set-up", 2, 1),
             ("stop", "set-up", 4, 3), ("abort", "load", 2, 0), ("kill", "load", 4, 2),
             ("kill", "forward", 4, 3), ("kill", "forward", 2, 0), ("stop", "forward", 2, 1),
             ("stop", "forward", 2, 0), ("exit", "later forward", 4, 0),
             ("stop", "later forward", 4, 2), ("kill", "replays", 4, 0),
             ("stop", "replays", 2, 1), ("exit", "replays", 2, 0), ("kill", "shutdown", 2, 1),
             ("stop", "shutdown", 2, 0), ("exit", "shutdown", 2, 1)]

# Replays for seconds; of one layer, so that it is made soon.
BENCH = ["layer", "--model", "v4-flash", "-b", "1", "-r", "20000", "--warm", "--no-naive"]

# Two at once, killed from outside or stopped: also those who would have spoken about the other.
PAIRS = [("kill", 4, (0, 1)), ("kill", 4, (1, 2)), ("stop", 4, (0, 1)), ("stop", 4, (0, 2)),
         ("kill", 2, (0, 1))]

# Commands of all ranks and of rank 0 alone, and the codes they end with.
SLOW_ENDS = [(["synth", "--frobnicate"], 2), (["inspect", "absent"], 3), (["run", "--frobnicate"], 2),
             (["run", "absent"], 3)]


def processes_of(mark):
    """Processes, zombies apart, that carry the mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            pass
    return found


class Job:
    """One run of the program under mpirun, in a process group and a TMPDIR of its own."""

    def __init__(self, arguments, workdir):
        self.mark = f"OPROJ_TEST_MARK={uuid.uuid4().hex}"
        # Short: Open MPI puts sockets there, whose names must not exceed 100 bytes.
        self.scratch = Path(f"/tmp/of{self.mark[-8:]}")
        self.model, self.place = workdir / "model", workdir / self.mark[-8:]
        self.arguments = arguments

    def environment(self):
        name, value = self.mark.split("=")
        return os.environ | {
            name: value, "TMPDIR": str(self.scratch), "OPROJ_DEADLINE": str(self.arguments.deadline),
            "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}

    def process_of(self, rank):
        wanted = f"OMPI_COMM_WORLD_RANK={rank}".encode()
        for pid in processes_of(self.mark):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
        raise ProcessLookupError(f"rank {rank} has no process")

    def run(self, ranks, fault=None, meanwhile=None, program=None):
        """(code, seconds, stderr, faults found in what was left behind) of a program and its words,
        by default `oproj run`; `meanwhile` is called with this job and mpirun's process."""
        self.scratch.mkdir()
        self.place.mkdir()
        command = [self.arguments.mpirun, "-n", str(ranks)]
        for name, value in (fault or {}).items():
            command += ["-x", f"{name}={value}"]
        output = self.place / "y.safetensors"
        command += program or [self.arguments.oproj, "run", str(self.model), "--tokens", "4",
                               "--output", str(output)]
        begin = time.monotonic()
        process = subprocess.Popen(command, env=self.environment(), stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True, start_new_session=True,
                                   errors="replace")
        try:
            if meanwhile:
                meanwhile(self, process)
            stderr = process.communicate(timeout=self.arguments.deadline + LIMIT_S + 5)[1]
            seconds = time.monotonic() - begin
            return process.returncode, seconds, stderr, self.left_behind(output)
        except subprocess.TimeoutExpired:
            for pid in processes_of(self.mark):
                os.kill(pid, signal.SIGKILL)
            stderr = process.communicate()[1]
            return None, time.monotonic() - begin, stderr, ["it had to be killed"]
        finally:
            shutil.rmtree(self.place, ignore_errors=True)
            shutil.rmtree(self.scratch, ignore_errors=True)

    def left_behind(self, output):
        wrong = []
        until = time.monotonic() + 1
        while processes_of(self.mark) and time.monotonic() < until:
            time.sleep(0.05)
        for pid in processes_of(self.mark):
            wrong.append(f"process {pid} is left")
            os.kill(pid, signal.SIGKILL)
        files = [str(path) for path in self.scratch.rglob("*")]
        # A core that abort() asked for is the system's to place.
        wrong += [f"{path} is left" for path in files if not re.match(r".*/core(\.\d+)?$", path)]
        beside = [path.name for path in self.place.iterdir() if path != output]
        return wrong + [f"{name} is left beside the output" for name in beside]


def sentences(stderr):
    return [line for line in stderr.splitlines() if line.startswith("oproj")]


def check_cell(arguments, workdir, kind, phase, ranks, victim):
    call, count, place = PHASES[phase]
    fault = {"LD_PRELOAD": str(arguments.fault), "FAULT_RANK": victim, "FAULT_KIND": kind,
             "FAULT_CALL": call, "FAULT_COUNT": count}
    program = [arguments.bench, *BENCH] if phase == "replays" else None
    code, seconds, stderr, wrong = Job(arguments, workdir).run(ranks, fault, program=program)
    said = sentences(stderr)
    limit = LIMIT_S + (arguments.deadline if kind == "stop" else 0)
    if code == 0:
        wrong.append("the job ended with 0")
    if seconds > limit:
        wrong.append(f"it took {seconds:.1f} s, more than {limit}")
    if len(said) != 1:
        wrong.append(f"{len(said)} sentences: {said}")
    elif f"rank {victim} " not in said[0] or place not in said[0]:
        wrong.append(f"the sentence does not name rank {victim} and {place}: {said[0]}")
    return code, seconds, said[0] if said else "", wrong


def check_pair(arguments, workdir, kind, ranks, victims):
    """Two ranks at once: a survivor names one of them.  Where none is left only mpirun could, and it
    does not always."""
    def kill(job, _):
        time.sleep(KILL_AFTER_S)
        for pid in [job.process_of(victim) for victim in victims]:
            os.kill(pid, signal.SIGKILL)

    fault = {"LD_PRELOAD": str(arguments.fault), "FAULT_CALL": "oproj_forward",
             "FAULT_RANK": ",".join(map(str, victims)), "FAULT_KIND": kind}
    if kind == "kill":  # they pause until it is done to them
        fault |= {"FAULT_KIND": "60", "OPROJ_DEADLINE": "60"}
    code, seconds, stderr, wrong = Job(arguments, workdir).run(ranks, fault,
                                                               kill if kind == "kill" else None)
    said, survivors = sentences(stderr), ranks - len(victims)
    if code == 0:
        wrong.append("the job ended with 0")
    if seconds > LIMIT_S + (arguments.deadline if kind == "stop" else 0):
        wrong.append(f"it took {seconds:.1f} s")
    if len(said) != min(survivors, 1):
        wrong.append(f"{len(said)} sentences: {said}")
    elif said and not any(f"rank {victim} " in said[0] for victim in victims):
        wrong.append(f"the sentence names none of {victims}: {said[0]}")
    return code, seconds, said[0] if said else "", wrong


def check_healthy(arguments, workdir):
    code, seconds, stderr, wrong = Job(arguments, workdir).run(2)
    if code != 0 or stderr:
        wrong.append(f"it ended with {code}: {stderr}")
    return code, seconds, "", wrong


def check_signal(arguments, workdir, number, delay):
    def send(_, process):
        time.sleep(delay)
        process.send_signal(number)

    code, seconds, stderr, wrong = Job(arguments, workdir).run(
        2, {"LD_PRELOAD": str(arguments.fault), "FAULT_RANK": 1, "FAULT_KIND": "30",
            "FAULT_CALL": "oproj_forward"} | {"OPROJ_DEADLINE": "60"}, send)
    said = sentences(stderr)
    if code == 0:
        wrong.append("the job ended with 0")
    if seconds > delay + 5:
        wrong.append(f"it took {seconds - delay:.1f} s after the signal")
    if said != ["oproj: interrupted"]:
        wrong.append(f"it said {said}")
    return code, seconds, said[0] if said else "", wrong


def check_suspended(arguments, workdir):
    """All ranks stop, as under `docker pause`, for longer than the deadline, and go on: so does the
    job."""
    deadline, pause = 4, 2

    def suspend(job, _):
        time.sleep(KILL_AFTER_S)
        pids = [job.process_of(rank) for rank in range(4)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(deadline + 2)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    fault = {"LD_PRELOAD": str(arguments.fault), "FAULT_RANK": 1, "FAULT_KIND": str(pause),
             "FAULT_CALL": "oproj_forward", "OPROJ_DEADLINE": str(deadline)}
    code, seconds, stderr, wrong = Job(arguments, workdir).run(4, fault, suspend)
    if code != 0:
        wrong.append(f"it ended with {code}: {sentences(stderr)}")
    return code, seconds, "", wrong


def check_slow_end(arguments, workdir, words, code_wanted):
    """A rank is still ending when the others have ended, one with a code: nobody was lost."""
    fault = {"LD_PRELOAD": str(arguments.fault), "FAULT_RANK": 1, "FAULT_KIND": "1",
             "FAULT_CALL": "end"}
    code, seconds, stderr, wrong = Job(arguments, workdir).run(
        4, fault, program=[arguments.oproj, *words])
    said = sentences(stderr)
    if code != code_wanted:
        wrong.append(f"it ended with {code}, not {code_wanted}")
    if len(said) != 1 or "lost" in said[0]:
        wrong.append(f"it said {said}")
    return code, seconds, said[0] if said else "", wrong


def cells(every):
    """(fault, phase, ranks, victim)"""
    if not every:
        return SELECTION
    return [(kind, phase, n, victim) for phase in PHASES for kind in KINDS for n in (2, 4, 8)
            for victim in (0, n - 1)]


def checks(every):
    """(what happens, on how many ranks, the check and what it is asked)"""
    yield "nothing", 2, (check_healthy,)
    for kind, phase, n, victim in cells(every):
        yield f"{kind:5} {phase:13} n={n} rank {victim}", n, (check_cell, kind, phase, n, victim)
    for kind, n, victims in PAIRS:
        yield f"{kind:5} forward       n={n} ranks {victims}", n, (check_pair, kind, n, victims)
    for number in (signal.SIGINT, signal.SIGTERM):
        yield f"{number.name} to mpirun, after 2 s", 2, (check_signal, number, 2.0)
    yield "all ranks stopped for a while", 4, (check_suspended,)
    for words, code in SLOW_ENDS:
        yield f"a slow end of {' '.join(words)}", 4, (check_slow_end, words, code)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--oproj", required=True, type=Path)
    parser.add_argument("--bench", type=Path)  # without it no replays
    parser.add_argument("--mpirun", default="mpirun")
    parser.add_argument("--fault", required=True, type=Path)
    parser.add_argument("--workdir", required=True, type=Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--ranks", type=lambda text: {int(n) for n in text.split(",")})
    parser.add_argument("--deadline", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    workdir = arguments.workdir.absolute()
    shutil.rmtree(workdir, ignore_errors=True)
    workdir.mkdir(parents=True)
    subprocess.run([arguments.oproj, "synth", "--model", "v4-flash", "--layers", "3", "--mtp", "0",
                    "--out", workdir / "model"], check=True, stdout=subprocess.DEVNULL)

    chosen = [(what, check, asked) for what, ranks, (check, *asked) in checks(arguments.all)
              if (not arguments.ranks or ranks in arguments.ranks) and
              (arguments.bench or "replays" not in asked)]
    failed = 0
    rows = ["| what | code | s | sentence |", "|---|---|---|---|"]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = pool.map(lambda c: c[1](arguments, workdir, *c[2]), chosen)
        for (what, _, _), (code, seconds, said, wrong) in zip(chosen, results):
            failed += bool(wrong)
            rows.append(f"| {what} | {code} | {seconds:.1f} | {said} |")
            print(f"{'FAIL' if wrong else 'ok  '} {what}: code {code}, {seconds:.1f} s: {said}",
                  flush=True)
            for sentence in wrong:
                print(f"     {sentence}")
    if arguments.table:
        arguments.table.write_text("\n".join(rows) + "\n")
    print(f"{failed} of {len(chosen)} failed")
    shutil.rmtree(workdir, ignore_errors=True)
    return 1 if failed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
