"""Owns the proof that `oproj` writes to what can be written to, all of it or nothing, and reads no
file that is none.

    python3 tests/integration/test_targets.py --oproj PATH/oproj --oproj-run PATH/oproj-run
                                              --workdir DIR [--only NAME]

NAME is a case or a group: target.
"""

import itertools
import json
import os
import socket

from program import (FAILED, INDEX, REFUSED, bound, expect, fresh, limit_files, listing,
                     option_case, own_lines, run_on, run_cases)

SPECIAL = {
    "fifo": os.mkfifo,
    "socket": lambda path: bind_socket(path),
    "folder": os.mkdir,
}


def bind_socket(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def special(bench, kind, linked=False):
    """A file that is none, or a link to it, outside the watched folders."""
    path = bench.path("special")
    SPECIAL[kind](path)
    if not linked:
        return path
    link = bench.path("link")
    link.symlink_to(path)
    return link


def target_cases():
    """(name, function of the bench giving (arguments, words)): files that must not be written."""
    for kind, flag, linked in itertools.product(SPECIAL, ("--output", "--json"), (False, True)):
        yield (f"{flag[2:]}-{kind}{'-link' if linked else ''}",
               lambda b, k=kind, f=flag, n=linked: (["run", b.one(), f, special(b, k, n)],
                                                    ["special", "regular"]))
    yield "info-fifo", lambda b: (["info", "--json", special(b, "fifo")], ["special"])
    yield "inspect-fifo", lambda b: (["inspect", b.one(), "--json", special(b, "fifo")],
                                     ["special"])
    for flag in ("--output", "--json"):
        yield (f"{flag[2:]}-is-input", lambda b, f=flag: (
            ["run", b.one(), "--input", b.input(), f, b.workdir / "input.safetensors"],
            [f, "input.safetensors"]))
        for name in ("config.json", "model.safetensors"):
            yield (f"{flag[2:]}-is-{name}", lambda b, f=flag, n=name: (
                ["run", b.one(), f, b.one() / n], [f, n]))
    yield "output-links-to-weights", lambda b: (
        ["run", b.one(), "--output", link_to(b, b.one() / "model.safetensors")], ["--output"])
    yield "inspect-is-config", lambda b: (
        ["inspect", b.one(), "--json", b.one() / "config.json"], ["--json"])
    yield "both-one", lambda b: (["run", b.one(), "--output", "@y", "--json", "@y"],
                                 ["--output", "--json"])
    yield "both-one-spelled-apart", lambda b: (["run", b.one(), "--output", "@y", "--json",
                                                "@../room/./y"], ["--output", "--json"])


def link_to(bench, path):
    link = bench.path("link")
    link.symlink_to(path)
    return link


def special_cases():
    """The same form: files to read that are none."""
    for name in ("config.json", INDEX, "model.safetensors"):
        yield f"read-{name}", lambda b, n=name: (run_on(with_fifo(b, n)), [n, "regular"])
    yield "read-manifest", lambda b: (run_on(with_fifo(b, "oproj-split.json")),
                                      ["oproj-split.json"])
    for kind in SPECIAL:
        yield f"read-input-{kind}", lambda b, k=kind: (
            run_on(b.one(), "--input", special(b, k)), ["special"])


def with_fifo(bench, name):
    folder = bench.copy(bench.one())
    os.mkfifo(fresh(folder / name))
    return folder


def links_case(bench):
    """A link stays one; what it names gets the bytes, there already or not."""
    folder, room = bench.one(), bench.path("room")
    wanted = bench.project(folder)
    room.mkdir()
    for name in ("y", "j"):
        (room / name).symlink_to(f"../real-{name}")
        fresh(bench.workdir / f"real-{name}")
    for _ in range(2):
        bench.program.succeed("run", folder, "--tokens", 3, "--output", room / "y", "--json",
                              room / "j")
        expect((room / "y").is_symlink() and (room / "j").is_symlink(), "a link was replaced")
        expect((bench.workdir / "real-y").read_bytes() == wanted, "other bytes")
        json.loads((bench.workdir / "real-j").read_text())
    expect(sorted(listing(room)) == ["j", "y"], f"left {sorted(listing(room))}")
    return "followed"


def both_or_none_case(bench):
    """Where one file does not fit, neither comes, and former ones stay."""
    folder, room = bench.one(), bench.path("room")
    room.mkdir()
    for tokens, limit, fails in ((0, 200, "j"), (3, 2000, "y")):
        for name in ("y", "j"):
            (room / name).write_text("former")
        done = bench.program.start(["run", folder, "--tokens", tokens, "--output", room / "y",
                                    "--json", room / "j"], preexec_fn=limit_files(limit))
        lines = own_lines(done.stderr)
        expect(done.returncode == REFUSED and len(lines) == 1 and f"room/{fails}" in lines[0],
               f"exit {done.returncode}, {lines}")
        expect({p.name: p.read_text() for p in room.iterdir()} == {"y": "former", "j": "former"},
               f"{sorted(listing(room))}")
    return "the former files stay"


def lost_output_case(bench):
    """Results that stdout does not take are a failure, however stdout fails."""
    folder = bench.one()
    commands = [["--help"], ["--version"], ["run", "--help"], ["info"], ["inspect", folder],
                ["run", folder, "--tokens", 1, "--check"]]
    for arguments in commands:
        reading, writing = os.pipe()
        os.close(reading)
        full = open(bench.path("full"), "w")
        with full:
            ways = {"closed": {"preexec_fn": lambda: os.close(1)}, "pipe": {"stdout": writing},
                    "full": {"stdout": full, "preexec_fn": limit_files(1)}}
            for way, popen in ways.items():
                done = bench.program.start(arguments, **popen)
                expect(done.returncode == FAILED and len(done.stderr.splitlines()) == 1 and
                       "cannot write to standard output: " in done.stderr,
                       f"{arguments}, {way}: exit {done.returncode}, {done.stderr!r}")
        os.close(writing)
    output = bench.path("y.safetensors")
    bench.program.start(["run", folder, "--tokens", 3, "--output", output],
                        preexec_fn=lambda: os.close(1))
    expect(output.read_bytes() == bench.project(folder), "what is printed is in the file")
    return f"{len(commands)} commands, 3 ways"


# ---- the list ----------------------------------------------------------------------------------


def all_cases():
    for name, build in (*target_cases(), *special_cases()):
        yield f"target-{name}", "target", bound(option_case, build, 0)
    for name, function in (("links", links_case), ("both-or-none", both_or_none_case),
                           ("lost-output", lost_output_case)):
        yield f"target-{name}", "target", function


if __name__ == "__main__":
    run_cases(__doc__, all_cases())
