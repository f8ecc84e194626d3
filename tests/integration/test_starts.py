"""Owns the proof that ranks start together or not at all: launchers, mixtures of ranks, variables.

    python3 tests/integration/test_starts.py --oproj PATH/oproj --oproj-run PATH/oproj-run
                                             --workdir DIR [--only NAME]

NAME is a case or a group: start.
"""

import json
import os
import resource
import shutil

from program import FAILED, OK, REFUSED, TINY, USAGE, expect, expect_refusal, own_lines, run_cases


def stray_rank_case(bench):
    """A rank that lingers in the environment silences nobody."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"):
        for arguments, code in ((["run"], USAGE), (["walk"], USAGE), (["inspect", "@no"], REFUSED)):
            done = bench.program.start(arguments, environment={name: "3"})
            expect(done.returncode == code and len(done.stderr.splitlines()) == 1,
                   f"{name}, {arguments}: exit {done.returncode}, {done.stderr!r}")
    return "speaks"


def mixed_ranks_case(bench):
    """Ranks that were started differently all end, and one sentence says how they differ."""
    folder = bench.one()
    run = ["run", folder, "--tokens", "3"]
    cases = ((["info"], run, ["info", "run"]),
             (run, [*run[:-1], "4"], ["word 4", "3", "4"]),
             (run, [*run, "--check"], ["word 5", "--check"]),
             ([*run, "--check"], run, ["word 5", "--check"]),
             (run, [*run, "--tok"], ["--tok"]), (run, ["walk"], ["walk"]),
             (run, ["inspect", folder], ["word 1", "inspect", "run"]),
             (["inspect", folder], run, ["word 1", "inspect", "run"]),
             (["inspect", folder], ["split", folder], ["word 1", "split"]))
    for first, second, words in cases:
        command = ["mpirun", "-q", "--allow-run-as-root", "--oversubscribe", "-n", "2",
                   *bench.program.command(first), ":", "-n", "1", *bench.program.command(second)]
        done = bench.program.execute(command, 20)
        lines = own_lines(done.stderr)
        expect(done.returncode == REFUSED and len(lines) == 1 and not done.stdout,
               f"{second}: exit {done.returncode}, {lines}, {done.stdout!r}")
        for word in ("rank 2", *words):
            expect(word in lines[0], f"{word} is not in {lines[0]}")
    return f"{len(cases)} mixtures"


def absent_ranks_case(bench):
    """Ranks that never come are named; a start that was called late ends the job."""
    run = bench.program.command(["run", bench.one(), "--tokens", "3"])
    cases = ((["true"], run, "2", "start has not ended within 2 s: rank 0 was not there"),
             (run, ["true"], "2", "start has not ended within 2 s: rank 1 was not there"),
             (run, run, "0.01", "start has not ended within 0.01 s: some rank has not come"))
    for first, second, deadline, words in cases:
        command = ["env", f"OPROJ_DEADLINE={deadline}", "SLURM_PROCID=0", "mpirun", "-q", "--allow-run-as-root",
                   "--oversubscribe", "-n", "1", *first, ":", "-n", "1", *second]
        done = bench.program.execute(command, 15)
        lines = own_lines(done.stderr)
        expect(done.returncode == FAILED and lines == [f"oproj: {words}"] and not done.stdout,
               f"{words}: exit {done.returncode}, {lines}, {done.stdout!r}")
    return f"{len(cases)} launches"


def different_ranks_case(bench):
    """One path that names another checkpoint on the last rank, or another environment there."""
    rooms = {}
    for name, options in (("here", ["--seed", 1]), ("seed", ["--seed", 2]),
                          ("names", ["--seed", 1, "--names", "hf"]),
                          ("layers", ["--seed", 1, "--layers", 2])):
        rooms[name] = bench.path(name)
        rooms[name].mkdir()
        bench.program.succeed("synth", "--model", "tiny", "--mtp", 0, *options, "--out",
                              rooms[name] / "ck")
    cases = (("seed", [], "the checkpoint's tensors must be the same"),
             ("names", [], "the checkpoint's tensors must be the same"),
             ("layers", [], "the number of layers must be the same"),
             ("here", ["env", "OPROJ_BIND=0"], "OPROJ_BIND must be the same"),
             ("here", ["env", "NCCL_ALGO=Ring"], "NCCL_ALGO must be the same"),
             ("here", ["env", "OPROJ_DEADLINE=7"], "OPROJ_DEADLINE must be the same"))
    run = bench.program.command(["run", "ck", "--tokens", "3", "--uneven"])
    for name, before, words in cases:
        command = ["mpirun", "-q", "--allow-run-as-root", "--oversubscribe", "-n", "2", "--wdir",
                   str(rooms["here"]), *run, ":", "-n", "1", "--wdir", str(rooms[name]), *before,
                   *run]
        done = bench.program.execute(command, 10)
        lines = own_lines(done.stderr)
        expect(done.returncode == REFUSED and len(lines) == 1 and not done.stdout,
               f"{name} {before}: exit {done.returncode}, {lines}, {done.stdout!r}")
        for word in (words, "on ranks 0, 1", "on rank 2"):
            expect(word in lines[0], f"{word} is not in {lines[0]}")
    return f"{len(cases)} differences"


def spare_ranks_case(bench):
    """Work of one process is done once, and its verdict is mpirun's."""
    path = bench.path("new")
    done = bench.program.succeed("synth", "--model", "tiny", "--layers", 1, "--mtp", 0, "--out",
                                 path, ranks=3)
    expect(done.stdout == f"made {path}\n", done.stdout)
    done = bench.program.succeed("inspect", path, ranks=3)
    expect(done.stdout == bench.program.succeed("inspect", path).stdout, done.stdout)
    halves = bench.path("halves")
    bench.program.succeed("split", path, "--tp", 2, "--out", halves, ranks=3)
    again = bench.program.start(["split", path, "--tp", 2, "--out", halves], 3)
    expect(again.returncode == REFUSED and len(own_lines(again.stderr)) == 1, again.stderr)
    return "once"


def threads_case(bench):
    """More threads than CPUs are not started."""
    done = bench.program.start(["run", bench.one(), "--tokens", 3, "--check"],
                               environment={"OMP_NUM_THREADS": "100000"})
    expect(done.returncode == OK, f"exit {done.returncode}: {done.stderr}")
    return "100000"


def dry_run_case(bench):
    """The whole command and where ranks would be; nothing is run."""
    script = bench.program.oproj_run
    result = bench.program.execute([script, "--dry-run", "-n", "2", "run", "no such", "--check"])
    lines = result.stdout.splitlines()
    expect(result.returncode == OK, f"exit {result.returncode}: {result.stderr}")
    command = lines[0]
    expect("OPROJ_DEADLINE=" in command and "mpirun " in command, f"not the command: {command}")
    expect(command.rstrip().endswith("oproj run 'no such' --check"), f"not the words: {command}")
    expect([line.split()[:2] for line in lines[1:]] == [["rank", "0"], ["rank", "1"]],
           f"not two ranks: {lines[1:]}")
    expect(all("cpus " in line and "GPU" in line for line in lines[1:]), f"no map: {lines[1:]}")
    wrong = bench.program.execute([script, "--dry-run", "-n", "2", "run", "x"],
                                  environment={"OPROJ_LOG": "junk"})
    expect(wrong.returncode == USAGE, f"exit {wrong.returncode} where the map is refused")
    return command


def other_mpi_case(bench):
    """Four processes of a launcher that is not this MPI's: each would be alone."""
    launchers = {"PMI_SIZE": lambda rank: {"PMI_RANK": rank, "PMI_SIZE": "4"},
                 # Slurm's with PMIx, which knows no size
                 "SLURM_NTASKS": lambda rank: {"PMIX_RANK": rank, "PMIX_NAMESPACE": "x",
                                               "SLURM_PROCID": rank, "SLURM_NTASKS": "4",
                                               "SLURM_STEP_ID": "0"}}
    for size, environment in launchers.items():
        said = []
        for rank in ("0", "1"):
            result = bench.program.start(["info"], environment=environment(rank))
            expect(result.returncode == REFUSED, f"exit {result.returncode}: {result.stderr}")
            said += own_lines(result.stderr)
        # Each ran when the other was gone; side by side the lowest speaks.
        expect(len(said) == 2 and all(f"4 ranks ({size}) but MPI finds 1" in s for s in said),
               f"said {said}")
    return said[0]


def oproj_run_case(bench):
    script = bench.program.oproj_run
    for words in (["0"], ["1025"], ["x"], [""], ["-1"], ["99999999999999999999"]):
        done = bench.program.execute([script, "-n", *words, "info"])
        expect(done.returncode == USAGE and len(done.stderr.splitlines()) == 1 and
               "1024" in done.stderr, f"-n {words}: exit {done.returncode}, {done.stderr!r}")
    for words in ([], ["info"], ["-n", "2"]):
        done = bench.program.execute([script, *words])
        expect(done.returncode == USAGE and len(done.stderr.splitlines()) == 1, f"{words}")
    done = bench.program.execute([script, "--help"])
    expect(done.returncode == OK and "Usage" in done.stdout and not done.stderr, "--help")
    tools = bench.path("tools")  # what the script needs, without mpirun
    tools.mkdir()
    for tool in ("sh", "dirname", "readlink", "id", "nproc"):
        (tools / tool).symlink_to(shutil.which(tool))
    done = bench.program.execute([script, "-n", "1", "info"], environment={"PATH": str(tools)})
    expect(done.returncode == FAILED and "mpirun" in done.stderr and
           len(done.stderr.splitlines()) == 1, f"exit {done.returncode}, {done.stderr!r}")
    return "refuses and helps"


def environment_case(bench):
    path = bench.path("info.json")
    done = bench.program.start(["info", "--json", path],
                               environment={"CUDA_VISIBLE_DEVICES": "a\udcffb"})
    shown = json.loads(path.read_text())["environment"]["CUDA_VISIBLE_DEVICES"]
    expect(done.returncode == OK and shown == "a\\xffb", f"{shown!r}")
    return shown


def variables_case(bench):
    """A value that a variable cannot have is refused before anything is done, on whichever rank."""
    folder = bench.one()
    run = ["run", folder, "--tokens", "3"]
    wrong = {"OPROJ_LOG": ("junk", "warning", ""), "OPROJ_BIND": ("yes", "2", ""),
             "OPROJ_DEADLINE": ("soon", "-1", "nan", "1e7", ""), "OPROJ_PUSH": ("on", ""),
             "OPROJ_TERMINAL": ("2",)}
    for name, values in wrong.items():
        for value in values:
            done = bench.program.start(["inspect", folder], environment={name: value})
            lines = done.stderr.splitlines()
            expect(done.returncode == USAGE and len(lines) == 1 and not done.stdout and
                   f'{name} is "{value}"; it must be ' in lines[0],
                   f"{name}={value}: exit {done.returncode}, {done.stderr!r}")
    launch = ["mpirun", "-q", "--allow-run-as-root", "--oversubscribe"]
    for before in ([*launch, "-x", "OPROJ_LOG=junk", "-n", "3"],
                   [*launch, "-n", "2", *bench.program.command(run), ":", "-x", "OPROJ_LOG=junk",
                    "-n", "1"]):
        done = bench.program.execute([*before, *bench.program.command(run)], 20)
        lines = own_lines(done.stderr)
        expect(done.returncode == USAGE and len(lines) == 1 and not done.stdout and
               'OPROJ_LOG is "junk"' in lines[0], f"exit {done.returncode}, {lines}")
    for level, count in (("warn", 1), ("error", 0)):
        done = bench.program.start(run, 4, environment={"OPROJ_LOGS": "1", "OPROJ_TEST_X": "1",
                                                        "OPROJ_LOG": level})
        lines = own_lines(done.stderr)
        expect(done.returncode == OK and len(lines) == count and
               all("no variable OPROJ_LOGS" in line for line in lines), f"{lines}")
    return f"{len(wrong)} variables"


def size_case(bench):
    """Made-up input that no memory holds is refused before there is any."""
    large = bench.synth("large", "--model", "v4-flash", "--layers", 3, "--mtp", 0)
    expect_refusal(bench, ["run", large, "--tokens", 1 << 20], [1 << 20, 4096])
    # Each buffer of the small model would fit into more memory than all of them together.
    bytes_each = TINY["heads"] * TINY["head_dim"] * 2
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    tokens = min(1 << 20, memory // (2 * bytes_each))
    limit = 4_000_000 << 10  # so that a run that is not refused ends soon, and harms nobody
    for ranks in (0, 4) if tokens < 1 << 20 or memory < 60e9 else ():
        done = bench.program.start(
            ["run", bench.one(), "--tokens", tokens], ranks,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
        lines = own_lines(done.stderr)
        expect(done.returncode == REFUSED and len(lines) == 1 and not done.stdout,
               f"exit {done.returncode}: {lines}")
        expect(all(word in lines[0] for word in (f"{tokens} tokens", f"{memory / 1e9:.1f} GB")),
               lines[0])
    return f"{tokens} tokens of tiny"


# ---- the list ----------------------------------------------------------------------------------


def all_cases():
    for name, function in (("stray-rank", stray_rank_case), ("mixed", mixed_ranks_case),
                           ("spare-ranks", spare_ranks_case), ("absent-ranks", absent_ranks_case),
                           ("different-ranks", different_ranks_case),
                           ("threads", threads_case), ("oproj-run", oproj_run_case),
                           ("dry-run", dry_run_case), ("other-mpi", other_mpi_case),
                           ("environment", environment_case), ("variables", variables_case),
                           ("size", size_case)):
        yield f"start-{name}", "start", function


if __name__ == "__main__":
    run_cases(__doc__, all_cases())
