"""program.py - what tests of the program share: starting it, a work folder of checkpoints and inputs
that are made once, what a refusal looks like, and running a list of cases."""

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import evaluate as ev

OK, CHECK_FAILED, USAGE, REFUSED, FAILED = range(5)
REFUSAL_LIMIT_S = 5  # a refusal reads headers, never weights
RUN_LIMIT_S = 60

TINY = {"hidden": 512, "heads": 16, "head_dim": 512, "rope_dim": 64, "groups": 4}
MAX_POSITION = 1048576
WO_A, WO_B = "layers.0.attn.wo_a", "layers.0.attn.wo_b"
INDEX = "model.safetensors.index.json"


class CaseFailure(Exception):
    """One sentence: what differs from what was expected."""


def expect(condition, sentence):
    if not condition:
        raise CaseFailure(sentence)


# ---- running the program -----------------------------------------------------------------------


def stop(process):
    """mpirun ends its ranks when it is asked to end."""
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def own_lines(stderr):
    """The lines that oproj wrote: without mpirun's banners between dashes and its [host:pid]."""
    lines, in_banner = [], False
    for line in stderr.splitlines():
        if re.fullmatch(r"-{20,}", line.strip()):
            in_banner = not in_banner
        elif not in_banner and line.strip() and not re.match(r"\[[^\]\s]+:\d+\] ", line):
            lines.append(line.strip())
    return lines


class Program:
    """Starts oproj, alone (ranks = 0) or through oproj-run."""

    def __init__(self, oproj, oproj_run):
        self.oproj, self.oproj_run = oproj, oproj_run
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("OPROJ_")}
        self.environment |= {"OMPI_MCA_btl_vader_single_copy_mechanism": "none",
                             "OMP_NUM_THREADS": "1"}

    def command(self, arguments, ranks=0):
        launcher = [self.oproj_run, "-n", str(ranks)] if ranks else [self.oproj]
        return [*launcher, *map(str, arguments)]

    def start(self, arguments, ranks=0, limit_s=RUN_LIMIT_S, environment=None, **popen):
        """oproj to its end; `seconds` of the result is how long that took."""
        return self.execute(self.command(arguments, ranks), limit_s, environment, **popen)

    def execute(self, command, limit_s=RUN_LIMIT_S, environment=None, **popen):
        """Any command, with `environment` on top of the usual one."""
        begin = time.monotonic()
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | popen
        process = subprocess.Popen(command, env=self.environment | (environment or {}), text=True,
                                   errors="surrogateescape", **streams)
        try:
            stdout, stderr = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            stop(process)
            raise CaseFailure(f"no end after {limit_s} s: {' '.join(command)}") from None
        done = subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
        done.seconds = time.monotonic() - begin
        return done

    def succeed(self, *arguments, ranks=0, code=OK):
        done = self.start(arguments, ranks)
        expect(done.returncode == code, f"exit {done.returncode}, not {code}: "
               f"{' '.join(done.args)}: {' | '.join(own_lines(done.stderr))}")
        expect(not own_lines(done.stderr), f"stderr of a success: {own_lines(done.stderr)}")
        return done


def rank_process(launcher, rank):
    """The process of a rank below this launcher."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            words = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == launcher and b"OMPI_COMM_WORLD_RANK=%d" % rank in words:
            return int(folder.name)
    raise CaseFailure(f"rank {rank} has no process below {launcher}")


def limit_files(limit):
    """Files end at `limit` bytes, as on a full disk."""
    def apply():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return apply


# ---- the work folder ---------------------------------------------------------------------------


def fresh(path):
    """`path`, at which nothing exists any more."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    return path


def listing(folder):
    """Every path below `folder` with its size, to see what came or went."""
    return {str(p.relative_to(folder)): p.lstat().st_size for p in folder.rglob("*")}


class Bench:
    """The work folder: checkpoints and inputs, each made once."""

    def __init__(self, program, workdir):
        self.program, self.workdir = program, workdir
        self._made = {}

    def path(self, name):
        return fresh(self.workdir / name)

    def synth(self, name, *flags):
        """A made-up checkpoint, tiny unless the flags say otherwise."""
        if name not in self._made:
            model = () if "--model" in flags else ("--model", "tiny")
            self._made[name] = self.path(name)
            self.program.succeed("synth", *model, "--out", self._made[name], *flags)
        return self._made[name]

    def one(self):
        """Small: tiny with one layer."""
        return self.synth("one", "--layers", 1, "--mtp", 0)

    def exact(self):
        return self.synth("exact", "--exact")

    def split(self, name, source, ranks, *flags):
        parts = self.path(name)
        self.program.succeed("split", source, "--tp", ranks, "--out", parts, *flags)
        return parts

    def copy(self, source):
        target = self.path("tampered")
        shutil.copytree(source, target)
        return target

    def edited(self, edit):
        """A copy of the small checkpoint whose tensors went through `edit`."""
        folder = self.copy(self.one())
        tensors = ev.read_safetensors(folder / "model.safetensors")
        edit(tensors)
        ev.write_safetensors(folder / "model.safetensors", tensors)
        return folder

    def configured(self, **values):
        """A copy of the small checkpoint with other values in config.json; None removes one."""
        folder = self.copy(self.one())
        config = json.loads((folder / "config.json").read_text()) | values
        config = {k: v for k, v in config.items() if v is not None}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def indexed(self, edit):
        """A copy of the small checkpoint with an index whose weight_map went through `edit`."""
        folder = self.copy(self.one())
        names = ev.read_safetensors(folder / "model.safetensors")
        weight_map = dict.fromkeys(names, "model.safetensors")
        edit(weight_map)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder

    def input(self, tokens=3, edit=None):
        """An input file for tiny; `edit` may change the dict of its tensors first."""
        rng = np.random.default_rng(7)
        values = rng.normal(size=(tokens, TINY["heads"], TINY["head_dim"]))
        tensors = {"attn_out": ev.tensor("BF16", ev.bf16_encode(values)),
                   "positions": ev.tensor("I64", np.arange(tokens))}
        if edit:
            edit(tensors)
        path = self.path("input.safetensors")
        ev.write_safetensors(path, tensors)
        return path

    def project(self, folder, *flags, ranks=0, tokens=3):
        """The bytes of the output file of a run that must succeed."""
        output = self.path("y.safetensors")
        self.program.succeed("run", folder, "--tokens", tokens, "--output", output, *flags,
                             ranks=ranks)
        return output.read_bytes()


def drop(name):
    return lambda tensors: tensors.pop(name)


def set_tensor(name, dtype, array):
    return lambda tensors: tensors.update({name: ev.tensor(dtype, array)})


def positions_with(value):
    def edit(tensors):
        tensors["positions"] = ev.tensor("I64", np.array([0, value, 2]))
    return edit


# ---- refusals ----------------------------------------------------------------------------------


def expect_refusal(bench, arguments, words=(), ranks=0, code=REFUSED, watched=()):
    """The code, one sentence with all `words`, no result, nothing left behind, and soon.

    The run happens in an empty folder, where files named @x in the arguments belong; `watched`
    folders must stay as they are."""
    room = bench.path("room")
    room.mkdir()
    arguments = [str(room / a[1:]) if str(a).startswith("@") else a for a in arguments]
    before = [listing(folder) for folder in watched]
    done = bench.program.start(arguments, ranks, REFUSAL_LIMIT_S * 4, cwd=room)
    lines = own_lines(done.stderr)
    expect(done.returncode == code, f"exit {done.returncode}, not {code}: {lines}")
    expect(len(lines) == 1, f"{len(lines)} lines on stderr, not one: {lines}")
    for word in words:
        expect(re.search(rf"(?<![\w.]){re.escape(str(word))}(?!\w)", lines[0]),
               f"the sentence does not name {word}: {lines[0]}")
    expect(not done.stdout, f"stdout of a refused run: {done.stdout!r}")
    expect(not listing(room), f"left behind: {sorted(listing(room))}")
    expect(before == [listing(folder) for folder in watched], "a folder has changed")
    expect(done.seconds <= REFUSAL_LIMIT_S, f"took {done.seconds:.1f} s")
    return lines[0]


def run_on(folder, *flags):
    return ["run", folder, "--tokens", 3, "--output", "@y", "--json", "@j", *flags]


def option_case(bench, build, ranks):
    arguments, words = build(bench)
    return expect_refusal(bench, arguments, words, ranks, watched=[bench.one()])


# ---- cases -------------------------------------------------------------------------------------


def bound(function, *arguments):
    return lambda bench: function(bench, *arguments)


def on_ranks(name, four):
    """One process, and four ranks for a name among `four`; (ranks, suffix of the case's name)."""
    return ((0, ""), (4, "-n4")) if name in four else ((0, ""),)


def parse_arguments(description):
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    for flag in ("--oproj", "--oproj-run"):
        parser.add_argument(flag, required=True, type=lambda p: str(Path(p).resolve()))
    parser.add_argument("--workdir", required=True, type=lambda p: Path(p).resolve())
    parser.add_argument("--only", help="a case or a group of them")
    return parser.parse_args()


def run_listed(bench, all_cases, only):
    """Those called `only`, or all where that is None; the number that failed."""
    cases = [c for c in all_cases if only in (None, c[0], c[1])]
    if not cases:
        sys.exit(f"no case or group is called {only}")
    failed = 0
    for name, _, function in cases:
        try:
            print(f"ok   {name}: {function(bench)}", flush=True)
        except (CaseFailure, ValueError, OSError) as failure:
            failed += 1
            print(f"FAIL {name}: {failure}", flush=True)
    print(f"{len(cases) - failed} of {len(cases)} passed")
    return failed


def run_cases(description, all_cases):
    """Runs (name, group, function of the bench): one line each; exit status 0 = all passed."""
    options = parse_arguments(description)
    options.workdir.mkdir(parents=True, exist_ok=True)
    bench = Bench(Program(options.oproj, options.oproj_run), options.workdir)
    failed = run_listed(bench, all_cases, options.only)
    fresh(options.workdir / "large")
    sys.exit(1 if failed else 0)
