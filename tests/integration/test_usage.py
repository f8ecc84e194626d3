"""Owns the proof that `oproj` says what it can be asked, and refuses what it cannot.

    python3 tests/integration/test_usage.py --oproj PATH/oproj --oproj-run PATH/oproj-run
                                            --workdir DIR [--only NAME]

NAME is a case or a group: usage or help.
"""

import json
import os
import re

import evaluate as ev
from program import MAX_POSITION, TINY, USAGE, bound, expect, expect_refusal, on_ranks, run_cases

FLAGS = {  # what --help must mention
    "info": ["--json"],
    "synth": ["--model", "v4-flash", "v4-pro", "v4.1-flash", "tiny", "--out", "--layers", "--mtp",
              "--seed", "--files", "--names", "release", "hf", "--scale-dtype", "e8m0", "u8", "f32",
              "--exact"],
    "inspect": ["DIR", "--tp", "--uneven", "--json"],
    "split": ["DIR", "--tp", "--out"],
    "run": ["DIR", "--tokens", "--layers", "--input", "--output", "--check", "--seed", "--backend",
            "auto", "ref", "cuda", "--comm", "mpi", "nccl", "--reduce", "--uneven", "--json",
            "--load-memory", "--chunk"],
}


def usage_cases():
    """(name, arguments, words); DIR stands for a checkpoint."""
    run = ["run", "DIR"]
    synth = ["synth", "--model", "tiny", "--out", "@new"]
    yield "unknown-command", ["walk"], ["walk"]
    yield "flag-as-command", ["--tokens", "3"], ["--tokens"]
    for command in FLAGS:
        yield f"unknown-flag-{command}", [command, "--frobnicate"], ["--frobnicate"]
    yield "missing-value", [*run, "--tokens"], ["--tokens"]
    for flag, bad in (("tokens", ("x", "", "3.5", "0x10", " 3", "-1", "1048577", "1e3",
                                  "99999999999999999999")),
                      ("layers", ("x", "1:", ":1", "2:2", "2:1", "-1", "0:1:2", "0-2")),
                      ("chunk", ("-1", "x", "1048577")), ("seed", ("-1", "seven")),
                      ("load-memory", ("0", "1G")), ("backend", ("gpu", "")), ("comm", ("tcp",)),
                      ("reduce", ("sum",))):
        for value in bad:
            yield f"{flag}-{value or 'empty'}", [*run, f"--{flag}={value}"], [f"--{flag}"]
    yield "run-no-folder", ["run"], ["folder"]
    yield "run-two-folders", [*run, "extra"], ["extra"]
    yield "none-with-output", [*run, "--reduce", "none", "--output", "@y"], ["--reduce none"]
    yield "none-with-check", [*run, "--reduce", "none", "--check"], ["--reduce none"]
    yield "synth-no-out", ["synth", "--model", "tiny"], ["--out"]
    yield "synth-no-model", ["synth", "--out", "@new"], ["--model"]
    yield "synth-extra", [*synth, "extra"], ["extra"]
    for flag, value in (("model", "v5"), ("layers", "-1"), ("mtp", "1000"), ("files", "0"),
                        ("names", "x"), ("scale-dtype", "f16"), ("seed", "1.5")):
        yield f"synth-{flag}-{value}", [*synth, f"--{flag}={value}"], [f"--{flag}"]
    yield "inspect-no-folder", ["inspect"], ["folder"]
    yield "inspect-tp-x", ["inspect", "DIR", "--tp", "x"], ["--tp"]
    yield "inspect-tp-huge", ["inspect", "DIR", "--tp", "99999999999"], ["--tp"]
    yield "split-no-tp", ["split", "DIR", "--out", "@new"], ["--tp"]
    yield "split-no-out", ["split", "DIR", "--tp", "2"], ["--out"]
    yield "info-extra", ["info", "extra"], ["extra"]
    yield "version-extra", ["--version", "extra"], ["extra"]
    yield "help-extra", ["help", "run", "extra"], ["extra"]
    yield "help-unknown", ["help", "walk"], ["walk"]
    yield "abbreviated", [*run, "--tok", "3"], ["--tok"]
    yield "abbreviated-switch", [*run, "--che"], ["--che"]
    yield "one-dash", [*run, "-tokens", "3"], ["-tokens"]
    yield "switch-with-value", [*run, "--check=yes"], ["--check"]
    for command in ("run", "inspect"):
        yield f"{command}-empty-folder", [command, ""], ["DIR", "empty"]
    for flag in ("input", "output", "json"):
        yield f"run-empty-{flag}", [*run, f"--{flag}", ""], [f"--{flag}", "empty"]
    yield "control-bytes", ["run", "a", "b\nc"], ["b?c"]


USAGE_ON_FOUR_RANKS = ("unknown-command", "unknown-flag-run", "tokens-x", "none-with-output",
                       "unknown-flag-synth")


def usage_case(bench, arguments, words, ranks):
    folder = bench.one()
    arguments = [folder if a == "DIR" else a for a in arguments]
    return expect_refusal(bench, arguments, words, ranks, USAGE, [folder])


def no_command(bench):
    done = bench.program.start([])
    expect(done.returncode == USAGE and not done.stdout and "Usage:" in done.stderr,
           f"exit {done.returncode}, stdout {done.stdout!r}")
    return "shows the usage on stderr"


# ---- looking -----------------------------------------------------------------------------------


def help_case(bench, command):
    done = bench.program.succeed(command, "--help")
    for word in FLAGS[command]:
        expect(re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", done.stdout),
               f"{command} --help does not mention {word}")
    return f"{len(FLAGS[command])} words"


def help_once_case(bench):
    for arguments in (["--help"], ["run", "--help"], ["--version"]):
        alone = bench.program.succeed(*arguments).stdout
        expect(alone and bench.program.succeed(*arguments, ranks=4).stdout == alone,
               f"{arguments} on 4 ranks prints something else than alone")
    for command in FLAGS:
        expect(bench.program.succeed("help", command).stdout ==
               bench.program.succeed(command, "--help").stdout, f"help {command}")
        expect(command in bench.program.succeed("--help").stdout, f"--help lacks {command}")
    return "the same text on 4 ranks"


def info_case(bench):
    """The map: each rank beside its CPUs, its memory node and, dealt out in order, its GPU.  Open MPI
    binds one rank to one core; a run has all of them, unless there is a GPU to be near."""
    path, own = bench.path("info.json"), len(os.sched_getaffinity(0))
    for ranks in (0, 1, 4):
        done = bench.program.succeed("info", "--json", path, ranks=ranks)
        result = json.loads(path.read_text())
        expect(len(result["ranks"]) == max(ranks, 1), f"{result['ranks']}")
        devices = len(result["devices"])
        if ranks < 2 and not devices:
            expect(f"({own} of " in result["ranks"][0], f"{result['ranks']}, not {own} CPUs")
        for rank, line in enumerate(result["ranks"]):
            expect(re.search(r"cpus [\d,-]+ \(\d+ of \d+\), NUMA node ", line), line)
            expect((f"GPU {rank % devices} (" if devices else "no GPU") in line, line)
        expect(done.stdout.count("backend ") == 2, done.stdout)
    cpu = min(os.sched_getaffinity(0))  # one that was asked for stays
    done = bench.program.start(["info"], 1, environment={"OMPI_MCA_hwloc_base_cpu_set": str(cpu)})
    expect(f"cpus {cpu} (1 of " in done.stdout, f"not CPU {cpu} alone: {done.stdout}")
    return ", ".join(result["backends"].values())


def inspect_case(bench):
    """Shares add up to what the files hold; a split folder shows the same shares."""
    folder, path = bench.synth("random"), bench.path("inspect.json")
    stored = sum(len(t.data) for t in ev.read_safetensors(folder / "model.safetensors").values())
    parts = bench.split("parts3", folder, 3, "--uneven")
    for arguments, n in (([folder], 1), ([folder, "--tp", 4], 4), ([parts], 3),
                         ([folder, "--tp", 3, "--uneven"], 3)):
        bench.program.succeed("inspect", *arguments, "--json", path)
        result = json.loads(path.read_text())
        expect([r["rank"] for r in result["ranks"]] == list(range(n)), f"{arguments}")
        expect(sum(r["bytes"] for r in result["ranks"]) == stored, f"{arguments}: {result}")
        expect([r["layer"] for r in result["layers"]] ==
               ["layers.0", "layers.1", "layers.2", "mtp.0"], f"{arguments}")
        expect(result["model"]["max_position"] == MAX_POSITION, f"{result['model']}")
        expect(result["dims"].items() >= TINY.items(), f"{result['dims']}")
    return f"{stored} bytes in all"


# ---- the list ----------------------------------------------------------------------------------


def all_cases():
    yield "usage-no-command", "usage", no_command
    for name, arguments, words in usage_cases():
        for n, suffix in on_ranks(name, USAGE_ON_FOUR_RANKS):
            yield f"usage-{name}{suffix}", "usage", bound(usage_case, arguments, words, n)
    for command in FLAGS:
        yield f"help-{command}", "help", bound(help_case, command)
    yield "help-once", "help", help_once_case
    yield "info", "help", info_case
    yield "inspect", "help", inspect_case


if __name__ == "__main__":
    run_cases(__doc__, all_cases())
