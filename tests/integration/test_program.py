"""Owns the proof that the program `oproj` keeps its contract with whoever starts it.

    python3 tests/integration/test_program.py --oproj PATH/oproj --oproj-run PATH/oproj-run
                                              --workdir DIR [--only NAME]

Exit codes, one sentence per refusal, nothing left behind, results that are the same however they
are come by, help, interrupted writing, tampered files.  NAME is a case ("refuse-tp-3") or a group
("usage").  One line per case; exit status 0 = all passed, 1 = a failure.

What y is worth is test_foreign.py's matter; here two results are equal or they are not.
"""

import argparse
import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import evaluate as ev
from test_foreign import CaseFailure, expect, own_lines, stop

OK, CHECK_FAILED, USAGE, REFUSED, FAILED = range(5)
REFUSAL_LIMIT_S = 5  # a refusal reads headers, never weights
RUN_LIMIT_S = 60

TINY = {"hidden": 512, "heads": 16, "head_dim": 512, "rope_dim": 64, "groups": 4}
MAX_POSITION = 1048576
WO_A, WO_B = "layers.0.attn.wo_a", "layers.0.attn.wo_b"
INDEX = "model.safetensors.index.json"

FLAGS = {  # what DESIGN.md lists
    "info": ["--json"],
    "synth": ["--model", "v4-flash", "v4-pro", "v4.1-flash", "tiny", "--out", "--layers", "--mtp",
              "--seed", "--files", "--names", "release", "hf", "--scale-dtype", "e8m0", "u8", "f32",
              "--exact"],
    "inspect": ["DIR", "--tp", "--uneven", "--json"],
    "split": ["DIR", "--tp", "--out"],
    "run": ["DIR", "--tokens", "--layers", "--input", "--output", "--check", "--seed", "--backend",
            "auto", "ref", "cuda", "--comm", "mpi", "nccl", "--reduce", "--uneven", "--json",
            "--load-memory"],
}

# ---- running the program ----------------------------------------------------------------------


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


# ---- refusals ---------------------------------------------------------------------------------


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
                      ("seed", ("-1", "seven")), ("load-memory", ("0", "1G")), ("backend", ("gpu", "")), ("comm", ("tcp",)),
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


# Each builder returns (arguments, words that the sentence must have, folders that must not change).


def run_on(folder, *flags):
    return ["run", folder, "--tokens", 3, "--output", "@y", "--json", "@j", *flags]


def refuse_run(name_words, build):
    """A run on a checkpoint that `build` makes."""
    def case(bench):
        folder = build(bench)
        return run_on(folder), name_words, [folder]
    return case


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, dtype, shape):
    def edit(tensors):
        elements = int(np.prod(shape))
        size = {"F16": 2, "BF16": 2, "F32": 4}.get(dtype, 1)
        tensors[name] = ev.Tensor(dtype, shape, bytes([0x38]) * (elements * size))
    return edit


def double(tensors):
    tensors["model.layers.0.self_attn.o_a_proj.weight"] = tensors[WO_A + ".weight"]


def last_byte_255(tensors, name=WO_B + ".scale"):
    scale = tensors[name]
    tensors[name] = ev.Tensor(scale.dtype, scale.shape, scale.data[:-1] + b"\xff")


LATE_SCALE = "mtp.0.attn.wo_b.scale"


def late_255(bench):
    """A checkpoint of four layers whose very last scale is NaN."""
    folder = bench.copy(bench.synth("random"))
    tensors = ev.read_safetensors(folder / "model.safetensors")
    last_byte_255(tensors, LATE_SCALE)
    ev.write_safetensors(folder / "model.safetensors", tensors)
    return folder


def drop_scale_but_list_it(bench):
    folder = bench.indexed(lambda m: None)
    tensors = ev.read_safetensors(folder / "model.safetensors")
    del tensors[WO_A + ".scale"]
    ev.write_safetensors(folder / "model.safetensors", tensors)
    return folder


def changed_file(name, change):
    """A copy of the small checkpoint in which the bytes of one file went through `change`."""
    def build(bench):
        folder = bench.copy(bench.one())
        path = folder / name
        data = change(path.read_bytes())
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        return folder
    return build


def empty_folder(bench):
    folder = bench.path("tampered")
    folder.mkdir()
    return folder


CHECKPOINTS = {
    "no-scale": ([WO_A], lambda b: b.edited(drop(WO_A + ".scale"))),
    "listed-scale-absent": ([WO_A + ".scale"], drop_scale_but_list_it),
    "no-weight": ([WO_B], lambda b: b.edited(drop(WO_B + ".weight"))),
    "two-matches": ([WO_A + ".weight", "model.layers.0.self_attn.o_a_proj.weight"],
                    lambda b: b.edited(double)),
    "weight-shape": ([WO_A + ".weight", "1024", "2048", "1000"],
                     lambda b: b.edited(put(WO_A + ".weight", "F8_E4M3", (1000, 2048)))),
    "weight-dimensions": ([WO_A + ".weight", "1024", "2048"],
                          lambda b: b.edited(put(WO_A + ".weight", "F8_E4M3", (1024, 2, 1024)))),
    "scale-shape": ([WO_A + ".scale", "8", "16", "15"],
                    lambda b: b.edited(put(WO_A + ".scale", "F8_E8M0", (8, 15)))),
    "scale-255": ([WO_B + ".scale"], lambda b: b.edited(last_byte_255)),
    "weight-dtype-f16": ([WO_A + ".weight", "F16"],
                         lambda b: b.edited(put(WO_A + ".weight", "F16", (1024, 2048)))),
    "weight-dtype-made-up": ([WO_A + ".weight", "F7"],
                             lambda b: b.edited(put(WO_A + ".weight", "F7", (1024, 2048)))),
    "scale-dtype": ([WO_A + ".scale", "F16"],
                    lambda b: b.edited(put(WO_A + ".scale", "F16", (8, 16)))),
    "missing-shard": (["gone.safetensors"],
                      lambda b: b.indexed(lambda m: m.update({WO_A + ".weight":
                                                              "gone.safetensors"}))),
    "index-outside": (["../x.safetensors"],
                      lambda b: b.indexed(lambda m: m.update({WO_A + ".weight":
                                                              "../x.safetensors"}))),
    "index-corrupt": ([], lambda b: corrupt_index(b)),
    "no-folder": (["tampered"], lambda b: empty_folder_removed(b)),
    "no-config": (["config.json"], changed_file("config.json", lambda data: None)),
    "empty-folder": (["config.json"], empty_folder),
    "config-corrupt": (["config.json"], changed_file("config.json", lambda data: data[:-30])),
    "config-empty": (["config.json"], changed_file("config.json", lambda data: b"")),
    "config-a-list": (["config.json"], changed_file("config.json", lambda data: b"[1]")),
    "no-tensors": (["tampered"], changed_file("model.safetensors", lambda data: None)),
    "tensors-cut": (["model.safetensors"],
                    changed_file("model.safetensors", lambda data: data[:len(data) // 2])),
    "tensors-empty": (["model.safetensors"],
                      changed_file("model.safetensors", lambda data: b"")),
    "tensors-huge-header": (["model.safetensors"],
                            changed_file("model.safetensors", lambda d: b"\xff" * 8 + d[8:])),
    "model-type": (["llama"], lambda b: b.configured(model_type="llama")),
    "model-type-absent": (["model_type"], lambda b: b.configured(model_type=None)),
    "hidden": (["512", "640"], lambda b: b.configured(hidden_size=640)),
    "hidden-0": (["hidden_size", "0"], lambda b: b.configured(hidden_size=0)),
    "hidden-word": (["hidden_size"], lambda b: b.configured(hidden_size="512")),
    "hidden-huge": (["hidden_size"], lambda b: b.configured(hidden_size=1 << 60)),
    "groups-0": (["o_groups", "0"], lambda b: b.configured(o_groups=0)),
    "groups-negative": (["o_groups", "-4"], lambda b: b.configured(o_groups=-4)),
    "groups-3": (["o_groups", "3", "16"], lambda b: b.configured(o_groups=3)),
    "rank-200": (["o_lora_rank", "200"], lambda b: b.configured(o_lora_rank=200)),
    "ratios-short": (["compress_ratios"], lambda b: b.configured(compress_ratios=[])),
    "more-layers": (["layers.1.attn.wo_a.weight"], lambda b: b.configured(
        num_hidden_layers=2, compress_ratios=[0, 4])),
    "block-64": (["weight_block_size"], lambda b: b.configured(
        quantization_config={"weight_block_size": [64, 64]})),
}
CHECKPOINTS_ON_FOUR_RANKS = ("no-scale", "two-matches", "weight-shape", "scale-255",
                             "missing-shard", "no-folder", "config-corrupt")


def corrupt_index(bench):
    folder = bench.copy(bench.one())
    (folder / INDEX).write_text("{\"weight_map\": ")
    return folder


def empty_folder_removed(bench):
    """A path at which nothing is."""
    return bench.path("tampered")


def positions_with(value):
    def edit(tensors):
        tensors["positions"] = ev.tensor("I64", np.array([0, value, 2]))
    return edit


def set_tensor(name, dtype, array):
    return lambda tensors: tensors.update({name: ev.tensor(dtype, array)})


INPUTS = {
    "position-past": ([MAX_POSITION], positions_with(MAX_POSITION)),
    "position-negative": (["-1"], positions_with(-1)),
    "position-huge": ([1 << 40], positions_with(1 << 40)),
    "position-past-own-table": (["2", "input.safetensors", "rows"], set_tensor("cos_sin", "F32", np.ones((2, 64)))),
    "table-width": (["cos_sin", "32", "64"], set_tensor("cos_sin", "F32", np.ones((9, 32)))),
    "table-dtype": (["cos_sin", "F64"], set_tensor("cos_sin", "F64", np.ones((9, 64)))),
    "heads": (["attn_out", "8", "16"], set_tensor("attn_out", "BF16", np.zeros((3, 8, 512)))),
    "head-dim": (["attn_out", "64", "512"], set_tensor("attn_out", "BF16", np.zeros((3, 16, 64)))),
    "dimensions": (["attn_out", "2", "3"], set_tensor("attn_out", "BF16", np.zeros((3, 8192)))),
    "dtype": (["attn_out", "F32", "BF16"], set_tensor("attn_out", "F32", np.zeros((3, 16, 512)))),
    "tokens": (["attn_out", "4", "3"], set_tensor("attn_out", "BF16", np.zeros((4, 16, 512)))),
    "positions-count": (["positions", "2", "3"], set_tensor("positions", "I64", np.arange(2))),
    "positions-dtype": (["positions", "F32"], set_tensor("positions", "F32", np.arange(3))),
    "no-attn-out": (["attn_out"], drop("attn_out")),
    "no-positions": (["positions"], drop("positions")),
}
INPUTS_ON_FOUR_RANKS = ("position-past", "heads")


def input_case(bench, words, edit, ranks):
    folder, path = bench.one(), bench.input(edit=edit)
    return expect_refusal(bench, run_on(folder, "--input", path), words, ranks, watched=[folder])


def broken_input(bench, change, ranks=0):
    """An input file that is cut, absent, or a folder."""
    folder, path = bench.one(), bench.input()
    change(path)
    return expect_refusal(bench, run_on(folder, "--input", path), [path.name], ranks)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def become_folder(path):
    path.unlink()
    path.mkdir()


def option_cases():
    """(name, function of the bench giving (arguments, words), rank counts)."""
    one, split = Bench.one, lambda b: ["split", b.one(), "--out", "@new", "--tp"]
    for n in (3, 8):
        yield f"ranks-{n}", lambda b: (run_on(one(b)), ["1", "2", "4"]), (n,)
    yield "uneven-8", lambda b: (run_on(one(b), "--uneven"), ["8", "4"]), (8,)
    for n in (0, -1, 3, 5):
        yield f"inspect-tp-{n}", lambda b, n=n: (["inspect", one(b), "--tp", n, "--json", "@j"],
                                                 [n]), (0,)
        yield f"split-tp-{n}", lambda b, n=n: ([*split(b), n], [n]), (0,)
    for n in (0, 5):
        yield (f"split-uneven-tp-{n}", lambda b, n=n: ([*split(b), n, "--uneven"], [n]), (0,))
    yield "layers-past", lambda b: (run_on(one(b), "--layers", "0:2"),
                                    ["--layers 0:2", "0 to 0"]), (0, 4)
    yield "layer-past", lambda b: (run_on(b.synth("random"), "--layers", "7"),
                                   ["--layers 7", "0 to 3"]), (0,)
    for command in (["inspect", "--json", "@j"], ["split", "--tp", 2, "--out", "@new"]):
        yield f"scale-255-{command[0]}", lambda b, c=command: ([*c, late_255(b)],
                                                               [LATE_SCALE]), (0,)
    yield "scale-255-run", lambda b: (run_on(late_255(b)), [LATE_SCALE]), (0, 4)
    yield "nccl", lambda b: (run_on(one(b), "--comm", "nccl"), ["NCCL"]), (0, 4)
    yield "cuda", lambda b: (run_on(one(b), "--backend", "cuda"), ["cuda"]), (0, 4)
    yield "synth-exists", lambda b: (["synth", "--model", "tiny", "--out", one(b)], [one(b)]), (0,)
    yield "split-exists", lambda b: (["split", one(b), "--tp", 2, "--out", one(b)], [one(b)]), (0,)
    yield "split-of-split", lambda b: (["split", b.split("parts", one(b), 2), "--tp", 2,
                                        "--out", "@new"], ["parts"]), (0,)
    yield "synth-no-parent", lambda b: (["synth", "--model", "tiny", "--out", "@no/where"],
                                        []), (0,)
    yield "output-no-parent", lambda b: (["run", one(b), "--output", "@no/y"], ["room/no/y"]), (0,
                                                                                                 4)
    yield "json-no-parent", lambda b: (["run", one(b), "--tokens", 1, "--output", "@y", "--json",
                                        "@no/j"], ["room/no/j"]), (0,)


def option_case(bench, build, ranks):
    arguments, words = build(bench)
    return expect_refusal(bench, arguments, words, ranks, watched=[bench.one()])


# ---- files to write and to read -----------------------------------------------------------------


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


def limit_files(limit):
    """Files end at `limit` bytes, as on a full disk."""
    def apply():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return apply


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


# ---- starting -----------------------------------------------------------------------------------


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
    return command


def other_mpi_case(bench):
    """Four processes of a launcher that is not this MPI's: each would be alone."""
    said = []
    for rank in (0, 1):
        result = bench.program.start(["info"], environment={"PMI_RANK": str(rank),
                                                            "PMI_SIZE": "4"})
        expect(result.returncode == REFUSED, f"exit {result.returncode}: {result.stderr}")
        said += own_lines(result.stderr)
    expect(len(said) == 1 and "4 ranks (PMI_SIZE) but MPI finds 1" in said[0], f"said {said}")
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


# ---- results ----------------------------------------------------------------------------------


def nan_weight(tensors):
    weight = tensors[WO_B + ".weight"]
    tensors[WO_B + ".weight"] = ev.Tensor(weight.dtype, weight.shape, b"\x7f" + weight.data[1:])


def all_nan_weights(tensors):
    weight = tensors[WO_B + ".weight"]
    tensors[WO_B + ".weight"] = ev.Tensor(weight.dtype, weight.shape, b"\x7f" * len(weight.data))


def overflowing_scales(tensors):
    scale = tensors[WO_B + ".scale"]
    tensors[WO_B + ".scale"] = ev.Tensor(scale.dtype, scale.shape, b"\xfe" * len(scale.data))


NOT_FINITE = {"one": nan_weight, "all": all_nan_weights, "overflow": overflowing_scales}


def not_finite_case(bench, edit):
    """Results that are not finite although the input is are no results: FAIL, in JSON too."""
    folder, path = bench.edited(edit), bench.path("table.json")
    done = bench.program.succeed("run", folder, "--tokens", 3, "--check", "--json", path,
                                 code=CHECK_FAILED)
    layers = json.loads(path.read_text())["layers"]
    expect(len(layers) == 1 and layers[0]["check"]["passed"] is False and
           layers[0]["check"]["not_finite"] > 0, f"{layers}")
    expect(" FAIL " in done.stdout, done.stdout)
    path = bench.input(edit=lambda t: t.update(attn_out=ev.tensor("BF16", np.full(
        (3, TINY["heads"], TINY["head_dim"]), 0x7FC0))))
    bench.program.succeed("run", bench.one(), "--input", path, "--check")
    return f"{layers[0]['check']['not_finite']} elements"


def far_positions_case(bench):
    """Tables have rows for the positions in use, not for all below them."""
    peaks = []
    for position in (1, MAX_POSITION - 1):
        path = bench.input(edit=positions_with(position))
        peaks.append(peak_bytes(bench, ["run", bench.synth("random"), "--input", path, "--check"]))
    near, far = (peak / 2**20 for peak in peaks)
    expect(far <= near + 64, f"{far:.0f} MB at far positions, {near:.0f} MB at near ones")
    return f"{near:.0f} MB near, {far:.0f} MB far"


def peak_bytes(bench, arguments):
    """The most memory that a run had resident.

    It is started by a small interpreter: a process's peak counts from before its exec, and this
    one's own would hide it."""
    script = ("import resource, subprocess, sys; code = subprocess.call(sys.argv[1:], stdout=2); "
              "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)")
    done = bench.program.execute([sys.executable, "-I", "-S", "-c", script,
                                  *bench.program.command(arguments)])
    expect(done.returncode == OK, f"exit {done.returncode}: {done.stderr}")
    return int(done.stdout) * 1024



def exact_case(bench):
    """The same file at any number of ranks, from any form of the checkpoint, however reduced."""
    whole = bench.exact()
    wanted = bench.project(whole, "--check")
    halves, quarters = bench.split("parts2", whole, 2), bench.split("parts4", whole, 4)
    thirds = bench.split("parts3", whole, 3, "--uneven")
    ways = [(whole, n, ()) for n in (1, 2, 4)]
    ways += [(whole, 3, ("--uneven",)), (halves, 2, ()), (quarters, 4, ("--check",)),
             (thirds, 3, ()), (whole, 2, ("--reduce", "scatter")),
             (whole, 3, ("--uneven", "--reduce", "scatter")), (whole, 4, ("--reduce", "vendor"))]
    for folder, n, flags in ways:
        expect(bench.project(folder, *flags, ranks=n) == wanted,
               f"another file from {folder.name} on {n} ranks with {flags}")
    return f"{len(ways)} ways, {len(wanted)} bytes each"


def exact_forms_case(bench):
    """Names, dtypes of scales and numbers of files do not show in y."""
    wanted = bench.project(bench.exact())
    forms = list(itertools.product(("release", "hf"), ("e8m0", "u8", "f32"), (1, 3)))
    for names, dtype, files in forms:
        folder = bench.path("form")
        bench.program.succeed("synth", "--model", "tiny", "--out", folder, "--exact", "--names",
                              names, "--scale-dtype", dtype, "--files", files)
        expect(bench.project(folder) == wanted, f"another y from {names}, {dtype}, {files} files")
    return f"{len(forms)} forms"


def exact_v41_case(bench):
    """Blocks of 32 and a draft layer, at the released size."""
    folder = bench.synth("v41", "--model", "v4.1-flash", "--layers", 1, "--mtp", 1, "--exact")
    alone = bench.project(folder, "--layers", 1, tokens=1)
    expect(bench.project(folder, "--layers", 1, tokens=1, ranks=4) == alone, "4 ranks differ")
    expect(set(ev.read_safetensors(bench.workdir / "y.safetensors")) == {"mtp.0.y"}, "other label")
    fresh(folder)
    del bench._made["v41"]
    return "mtp.0 equal on 1 and 4 ranks"


def repeated_case(bench):
    """Random data: the same bytes run after run, and from a split folder."""
    folder = bench.synth("random")
    parts = bench.split("parts4", folder, 4)
    first = bench.project(folder, ranks=4)
    expect(bench.project(folder, ranks=4) == first, "a second run differs")
    expect(bench.project(folder, "--reduce", "scatter", ranks=4) == first, "scatter differs")
    expect(bench.project(parts, ranks=4) == first, "the split folder differs")
    expect(bench.project(folder) != first, "one rank gives the same bits, so nothing was rounded")
    return f"{len(first)} bytes"


def check_case(bench, ranks):
    """--check passes, and table and JSON say the same."""
    folder, path = bench.synth("random"), bench.path("table.json")
    done = bench.program.succeed("run", folder, "--tokens", 3, "--check", "--json", path,
                                 ranks=ranks)
    result = json.loads(path.read_text())
    rows = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    labels = ["layers.0", "layers.1", "layers.2", "mtp.0"]
    expect([row[0] for row in rows] == labels, f"rows {rows}")
    expect([(r[0], r[1], r[3]) for r in rows] ==
           [(j["layer"], j["path"], j["checksum"]) for j in result["layers"]],
           f"the table has {rows}, JSON {result['layers']}")
    for r, j in zip(rows, result["layers"]):
        expect(r[4] == "ok" and j["check"]["passed"] is True, f"{r}")
        # The table rounds: times to 0.1 us, errors to 3 digits.
        expect(math.isclose(float(r[2]), j["us"], rel_tol=1e-3, abs_tol=0.05), f"{r}, {j}")
        expect(math.isclose(float(r[5]), j["check"]["error"], rel_tol=1e-3 + 5e-3), f"{r}, {j}")
    expect((result["ranks"], result["tokens"], result["passed"], result["checked"]) ==
           (max(ranks, 1), 3, True, True), f"{result}")
    return f"error {max(j['check']['error'] for j in result['layers']):.2e}"


def check_fails_case(bench, ranks):
    """Exit 1.  Random values that pass for exact ones: then bit equality is asked of them."""
    folder = bench.copy(bench.synth("random"))
    config = json.loads((folder / "config.json").read_text()) | {"oproj_exact": True}
    (folder / "config.json").write_text(json.dumps(config))
    path = bench.path("table.json")
    done = bench.program.succeed("run", folder, "--tokens", 3, "--check", "--json", path,
                                 ranks=ranks, code=CHECK_FAILED)
    rows = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    result = json.loads(path.read_text())
    expect(len(rows) == 4 and all(row[4] == "FAIL" for row in rows), f"{rows}")
    expect(result["passed"] is False and not any(j["check"]["passed"] for j in result["layers"]),
           f"{result}")
    return "FAIL in every row"


def no_tokens_case(bench):
    folder = bench.one()
    for ranks, flags in ((0, ()), (4, ()), (4, ("--reduce", "scatter")), (2, ("--check",))):
        bench.project(folder, *flags, ranks=ranks, tokens=0)
        tensors = ev.read_safetensors(bench.workdir / "y.safetensors")
        expect({n: (t.dtype, t.shape) for n, t in tensors.items()} ==
               {"layers.0.y": ("BF16", (0, 512))}, f"{ranks} ranks, {flags}: {tensors}")
    return "an empty layers.0.y"


def token_counts_case(bench):
    """One token, fewer tokens than ranks, and a count that nothing divides: the same rows."""
    folder = bench.exact()
    whole = ev.read_safetensors(written(bench, folder, 13))["layers.1.y"].bits()
    for ranks, tokens, flags in ((1, 1, ()), (4, 1, ("--reduce", "scatter")),
                                 (4, 3, ("--reduce", "scatter")), (4, 13, ()),
                                 (4, 13, ("--reduce", "scatter"))):
        y = ev.read_safetensors(written(bench, folder, tokens, *flags, ranks=ranks))
        expect((y["layers.1.y"].bits() == whole[:tokens]).all(), f"{tokens} tokens, {ranks} ranks")
    return "rows do not depend on the count"


def written(bench, folder, tokens, *flags, ranks=0):
    bench.project(folder, "--layers", 1, *flags, ranks=ranks, tokens=tokens)
    return bench.workdir / "y.safetensors"


def layers_case(bench):
    folder = bench.synth("draft", "--layers", 2, "--mtp", 2)
    labels = ["layers.0", "layers.1", "mtp.0", "mtp.1"]
    bench.project(folder)
    whole = ev.read_safetensors(bench.workdir / "y.safetensors")
    for which, chosen in (("all", labels), ("1", labels[1:2]), ("0:2", labels[:2]),
                          ("1:3", labels[1:3]), ("3", labels[3:]), ("0:4", labels)):
        bench.project(folder, "--layers", 2, "--layers", which)
        some = ev.read_safetensors(bench.workdir / "y.safetensors")
        expect(some == {f"{label}.y": whole[f"{label}.y"] for label in chosen},
               f"--layers {which} gives {sorted(some)} or other values")
    return ", ".join(labels)


def seed_case(bench):
    folder = bench.one()
    plain, zero, one = (bench.project(folder, *flags) for flags in ((), ("--seed", 0),
                                                                    ("--seed", 1)))
    expect(plain == zero and plain != one, "run --seed")
    again, other = (bench.path(name) for name in ("again", "other"))
    for path, seed in ((again, 0), (other, 1)):
        bench.program.succeed("synth", "--model", "tiny", "--layers", 1, "--mtp", 0, "--out", path,
                              "--seed", seed)
    weights = [(p / "model.safetensors").read_bytes() for p in (folder, again, other)]
    expect(weights[0] == weights[1] and weights[0] != weights[2], "synth --seed")
    return "of run and of synth"


def input_file_case(bench):
    """positions as I32 or I64, T from the file, and the model's own table handed in."""
    folder = bench.one()
    output, path = bench.path("y.safetensors"), bench.input()
    bench.program.succeed("run", folder, "--input", path, "--output", output)
    wanted = output.read_bytes()
    path = bench.input(edit=set_tensor("positions", "I32", np.arange(3)))
    expect(bench.project(folder, "--input", path) == wanted, "I32 positions")
    angles = np.outer(np.arange(3), 10000.0 ** (-np.arange(32) / 32)).astype(np.float32)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    path = bench.input(edit=set_tensor("cos_sin", "F32", table))
    ours = bench.project(folder, "--input", path)
    a, b = (ev.bf16_decode(np.frombuffer(raw[-3 * 512 * 2:], "<u2")) for raw in (ours, wanted))
    expect(ev.relative_error(a, b) < 1e-2, "its own cos_sin")
    path = bench.input(edit=set_tensor("cos_sin", "F32", -table))
    expect(bench.project(folder, "--input", path) != ours, "cos_sin is not used")
    return "T, I32, cos_sin"


# ---- looking ----------------------------------------------------------------------------------


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
    """The map: each rank beside its CPUs, its memory node and, dealt out in order, its GPU."""
    path = bench.path("info.json")
    for ranks in (0, 4):
        done = bench.program.succeed("info", "--json", path, ranks=ranks)
        result = json.loads(path.read_text())
        expect(len(result["ranks"]) == max(ranks, 1), f"{result['ranks']}")
        devices = len(result["devices"])
        for rank, line in enumerate(result["ranks"]):
            expect(re.search(r"cpus [\d,-]+ \(\d+ of \d+\), NUMA node ", line), line)
            expect((f"GPU {rank % devices} (" if devices else "no GPU") in line, line)
        expect(done.stdout.count("backend ") == 2, done.stdout)
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


# ---- interrupted writing ----------------------------------------------------------------------


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


def has_begun(target):
    """The temporary folder is there, and files in it are being written: they have no names yet."""
    if not list(target.parent.glob(target.name + ".tmp-*")):
        return False
    time.sleep(0.1)
    return True


def interrupt_synth(bench, sent):
    target = bench.path("killed")
    return interrupt(bench, ["synth", "--model", "v4-flash", "--layers", 4, "--mtp", 0, "--out",
                             target], target, sent)


def interrupt_split(bench, sent):
    source = bench.synth("large", "--model", "v4-flash", "--layers", 3, "--mtp", 0)
    target = bench.path("killed")
    return interrupt(bench, ["split", source, "--tp", 4, "--out", target], target, sent)


# ---- tampered split sets ----------------------------------------------------------------------


def rank_file(rank, size):
    return f"rank-{rank:05}-of-{size:05}.safetensors"


def split_copy(bench, ranks=2):
    return bench.split("tampered", bench.one(), ranks)


def tamper_bit(bench):
    """The last byte of rank 1's last tensor."""
    parts = split_copy(bench)
    path = parts / rank_file(1, 2)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    header = json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])
    header.pop("__metadata__")
    last = max(header, key=lambda name: header[name]["data_offsets"][1])
    return parts, 2, [last]


def tamper_ranks(bench):
    return split_copy(bench, 4), 2, ["4", "2"]


def tamper_other_set(bench):
    parts = split_copy(bench)
    other = bench.split("other", bench.synth("one-1", "--layers", 1, "--mtp", 0, "--seed", 1), 2)
    shutil.copy(other / rank_file(1, 2), parts)
    return parts, 2, [parts / rank_file(1, 2)]


def tamper_other_rank(bench):
    parts = split_copy(bench)
    shutil.copy(parts / rank_file(0, 2), parts / rank_file(1, 2))
    return parts, 2, [parts / rank_file(1, 2)]


def tamper_missing(bench):
    parts = split_copy(bench, 4)
    (parts / rank_file(2, 4)).unlink()
    return parts, 4, [parts / rank_file(2, 4)]


def tamper_config(bench):
    parts = split_copy(bench)
    text = (parts / "config.json").read_text()
    (parts / "config.json").write_text(text.replace("10000", "20000", 1))
    return parts, 2, ["config.json"]


def tamper_manifest(bench):
    parts = split_copy(bench)
    (parts / "oproj-split.json").write_text("{}")
    return parts, 2, ["oproj-split.json"]


TAMPERED = {"bit": tamper_bit, "ranks": tamper_ranks, "other-set": tamper_other_set,
            "other-rank": tamper_other_rank, "missing": tamper_missing, "config": tamper_config,
            "manifest": tamper_manifest}


def tampered_case(bench, build):
    parts, ranks, words = build(bench)
    return expect_refusal(bench, run_on(parts), words, ranks, watched=[parts])


# ---- the list ---------------------------------------------------------------------------------


def all_cases():
    """(case name, group, function of the bench)."""
    def bound(function, *arguments):
        return lambda bench: function(bench, *arguments)

    def on_ranks(name, four):
        return ((0, ""), (4, "-n4")) if name in four else ((0, ""),)

    yield "usage-no-command", "usage", no_command
    for name, arguments, words in usage_cases():
        for n, suffix in on_ranks(name, USAGE_ON_FOUR_RANKS):
            yield f"usage-{name}{suffix}", "usage", bound(usage_case, arguments, words, n)
    for name, build, rank_counts in option_cases():
        for n in rank_counts:
            yield (f"refuse-{name}" + (f"-n{n}" if n else ""), "refuse",
                   bound(option_case, build, n))
    for name, (words, build) in CHECKPOINTS.items():
        for n, suffix in on_ranks(name, CHECKPOINTS_ON_FOUR_RANKS):
            yield f"checkpoint-{name}{suffix}", "checkpoint", bound(checkpoint_case, words, build,
                                                                    n)
    for name, (words, edit) in INPUTS.items():
        for n, suffix in on_ranks(name, INPUTS_ON_FOUR_RANKS):
            yield f"input-{name}{suffix}", "input", bound(input_case, words, edit, n)
    for name, change in (("cut", cut), ("absent", Path.unlink), ("a-folder", become_folder)):
        yield f"input-{name}", "input", bound(broken_input, change)
    for name, build in (*target_cases(), *special_cases()):
        yield f"target-{name}", "target", bound(option_case, build, 0)
    for name, function in (("links", links_case), ("both-or-none", both_or_none_case)):
        yield f"target-{name}", "target", function
    for name, function in (("output", lost_output_case), ("stray-rank", stray_rank_case),
                           ("mixed", mixed_ranks_case), ("spare-ranks", spare_ranks_case),
                           ("absent-ranks", absent_ranks_case),
                           ("different-ranks", different_ranks_case),
                           ("threads", threads_case), ("oproj-run", oproj_run_case),
                           ("dry-run", dry_run_case), ("other-mpi", other_mpi_case),
                           ("environment", environment_case), ("variables", variables_case),
                           ("size", size_case)):
        yield f"start-{name}", "start", function
    for name, edit in NOT_FINITE.items():
        yield f"result-not-finite-{name}", "result", bound(not_finite_case, edit)
    yield "result-far-positions", "result", far_positions_case
    for name, function in (("exact", exact_case), ("exact-forms", exact_forms_case),
                           ("exact-v41", exact_v41_case), ("repeated", repeated_case),
                           ("no-tokens", no_tokens_case), ("token-counts", token_counts_case),
                           ("layers", layers_case), ("seed", seed_case),
                           ("input-file", input_file_case)):
        yield f"result-{name}", "result", function
    for n in (0, 4):
        yield f"result-check-n{n}", "result", bound(check_case, n)
        yield f"result-check-fails-n{n}", "result", bound(check_fails_case, n)
    for command in FLAGS:
        yield f"help-{command}", "help", bound(help_case, command)
    yield "help-once", "help", help_once_case
    yield "info", "help", info_case
    yield "inspect", "help", inspect_case
    for sent in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        yield f"interrupt-synth-{sent.name}", "interrupt", bound(interrupt_synth, sent)
        yield f"interrupt-split-{sent.name}", "interrupt", bound(interrupt_split, sent)
    for n in (0, 2):
        yield f"interrupt-run-n{n}", "interrupt", bound(interrupt_run, n)
    yield "interrupt-twice", "interrupt", interrupt_twice
    for name, build in TAMPERED.items():
        yield f"tampered-{name}", "tampered", bound(tampered_case, build)


def checkpoint_case(bench, words, build, ranks):
    folder = build(bench)
    watched = [folder] if folder.exists() else []
    return expect_refusal(bench, run_on(folder), words, ranks, watched=watched)


def parse_arguments():
    parser = argparse.ArgumentParser(description="the contract of the program oproj")
    for flag in ("--oproj", "--oproj-run"):
        parser.add_argument(flag, required=True, type=lambda p: str(Path(p).resolve()))
    parser.add_argument("--workdir", required=True, type=lambda p: Path(p).resolve())
    parser.add_argument("--only", help="a case, or usage, refuse, checkpoint, input, target, "
                        "start, result, help, interrupt or tampered")
    return parser.parse_args()


def main():
    options = parse_arguments()
    options.workdir.mkdir(parents=True, exist_ok=True)
    bench = Bench(Program(options.oproj, options.oproj_run), options.workdir)
    cases = [c for c in all_cases() if options.only in (None, c[0], c[1])]
    if not cases:
        sys.exit(f"no case or group is called {options.only}")
    failed = 0
    for name, _, function in cases:
        try:
            print(f"ok   {name}: {function(bench)}", flush=True)
        except (CaseFailure, ValueError, OSError) as failure:
            failed += 1
            print(f"FAIL {name}: {failure}", flush=True)
    fresh(options.workdir / "large")
    print(f"{len(cases) - failed} of {len(cases)} passed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
