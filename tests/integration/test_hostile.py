"""Owns the proof that no file, however hostile or broken, does `oproj` any harm.

    python3 tests/integration/test_hostile.py --oproj PATH/oproj --workdir DIR [--sanitized]

Every case is a checkpoint of one small layer with one thing wrong.  `inspect` and `run` must refuse
it: exit code 3, one sentence that names the file and the reason, within a second and 300 MB, and no
signal.  With --sanitized, where everything takes its time, memory and time have no bounds.  One line
per case; exit status 0 = all passed, 1 = a failure.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from program import CaseFailure, expect, own_lines

OK, REFUSED = 0, 3
SECONDS, MEGABYTES = 1.0, 300
TENSORS, INDEX = "model.safetensors", "model.safetensors.index.json"
WO_A, WO_B = "layers.0.attn.wo_a.weight", "layers.0.attn.wo_b.weight"
SCALE = "layers.0.attn.wo_a.scale"


class File:
    """A safetensors file in pieces."""

    def __init__(self, path):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        self.header, self.data = json.loads(data[8:8 + length]), data[8 + length:]

    def image(self, text=None, length=None):
        text = text if text is not None else json.dumps(self.header).encode()
        length = len(text) if length is None else length
        return length.to_bytes(8, "little") + text + self.data


def length(value):
    """The file with another header length."""
    return lambda f: f.image(length=value)


def text(value):
    """The file with another header."""
    return lambda f: f.image(value)


def entry(name, **fields):
    """The file with other fields of one tensor."""
    def change(f):
        f.header[name].update(fields)
        return f.image()
    return change


def replaced(old, new):
    """The file with other words in its header's text."""
    def change(f):
        before = json.dumps(f.header).encode()
        after = before.replace(old, new, 1)
        assert before != after
        return f.image(after)
    return change


def moved(name, begin, end):
    """The file with one tensor's offsets moved."""
    def change(f):
        offsets = f.header[name]["data_offsets"]
        offsets[0] += begin
        offsets[1] += end
        return f.image()
    return change


def swapped(f):
    f.header[WO_A]["data_offsets"].reverse()
    return f.image()


def overlap(f):
    """WO_B begins a byte early: inside what lies before it."""
    return moved(WO_B, -1, -1)(f)


def hole(f):
    """A tensor that nobody needs is forgotten, and its bytes are not."""
    del f.header["spare"]
    return f.image()


def twice(f):
    """One name, two entries."""
    body = json.dumps(f.header)
    return f.image(f'{body[:-1]}, "{WO_A}": {json.dumps(f.header[WO_A])}}}'.encode())


def inside_twice(f):
    """One entry, two shapes."""
    return replaced(b'"shape"', b'"shape": [1], "shape"')(f)


def cut(count):
    return lambda f: f.image()[:-count]


# name: (how the tensors' file is made, words of the sentence beside the file's name)
FILES = {
    "length-0": (length(0), ["JSON"]),
    "length-1": (length(1), ["JSON"]),
    "length-2^63": (length(1 << 63), ["9223372036854775808"]),
    "length-2^64-4": (length((1 << 64) - 4), ["18446744073709551612"]),
    "length-beyond": (length(90_000_000), ["90000000"]),
    "a-list": (text(b"[]"), ["object"]),
    "bad-utf8": (replaced(b"spare", b"sp\xff\xferare"), ["JSON"]),
    "nested": (text(b'{"a":' + b"[" * 100_000), ["JSON"]),
    "nested-and-closed": (text(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), ["JSON"]),
    "many-numbers": (text(b'{"a":[' + b"0," * 10_000_000 + b"0]}"), ["10000002 items"]),
    "long-header": (text(b'{"a":[' + b"0," * 40_000_000 + b"0]}"), ["80000009 bytes", "33554432"]),
    "long-name": (text(b'{"' + b"n" * 1000 + b'":{}}'), ["name has 1000 bytes"]),
    "long-dtype": (entry(WO_A, dtype="F" * 100), [WO_A, "dtype has 100 bytes"]),
    "many-objects": (text(b'{"a":[' + b"{}," * 2_000_000 + b"0]}"), ["items"]),
    "tensor-twice": (twice, ["duplicate"]),
    "key-twice": (inside_twice, ["duplicate"]),
    "begin-beyond-end": (swapped, [WO_A, "data_offsets"]),
    "end-beyond-data": (moved(WO_A, 1 << 40, 1 << 40), [WO_A, "data_offsets"]),
    "offset-negative": (entry(WO_A, data_offsets=[-1, 5]), [WO_A, "data_offsets"]),
    "offset-2^63": (entry(WO_A, data_offsets=[0, 1 << 63]), ["JSON"]),
    "overlap": (overlap, ["overlap"]),
    "hole": (hole, ["belong to no tensor"]),
    "shape-negative": (entry(WO_A, shape=[-1, 2048]), [WO_A, "shape"]),
    "shape-overflow": (entry(WO_A, shape=[1 << 32, 1 << 32]), [WO_A, "shape"]),
    "shape-1.5": (entry(WO_A, shape=[1.5, 2048]), [WO_A, "shape"]),
    "shape-long": (entry(WO_A, shape=[1] * 100), [WO_A, "100"]),
    "dtype-needed": (entry(WO_A, dtype="F8_E9"), [WO_A, "F8_E9"]),
    "dtype-of-scale": (entry(SCALE, dtype="E8"), [SCALE, "E8"]),
    "dtype-number": (entry(WO_A, dtype=8), [WO_A, "dtype"]),
    "cut-1": (cut(1), ["data_offsets"]),
    "cut-4096": (cut(4096), ["data_offsets"]),
    "cut-to-8": (lambda f: f.image()[:8], ["header"]),
    "cut-to-7": (lambda f: f.image()[:7], ["7 bytes"]),
    "empty": (lambda f: b"", ["0 bytes"]),
    "one-more": (lambda f: f.image() + b"\0", ["file has"]),
}


def fifo(path):
    path.unlink()
    os.mkfifo(path)


def directory(path):
    path.unlink()
    path.mkdir()


def listed(edit):
    """The checkpoint with an index whose map went through `edit`."""
    def change(folder):
        names = dict.fromkeys(File(folder / TENSORS).header, TENSORS)
        names.pop("__metadata__", None)
        edit(names)
        (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    return change


# name: (what is done to the folder, words of the sentence)
FOLDERS = {
    "index-missing-file": (listed(lambda m: m.update({WO_A: "gone.safetensors"})),
                           ["gone.safetensors"]),
    "index-missing-entry": (listed(lambda m: m.pop(WO_B)), [INDEX, WO_B, TENSORS]),
    "index-spare-entry": (listed(lambda m: m.update({"layers.1.attn.wo_a.weight": TENSORS})),
                          [INDEX, "layers.1.attn.wo_a.weight", TENSORS]),
    "index-outside": (listed(lambda m: m.update({WO_A: "../x.safetensors"})),
                      [INDEX, "../x.safetensors"]),
    "index-absolute": (listed(lambda m: m.update({WO_A: "/etc/passwd"})), [INDEX, "/etc/passwd"]),
    "index-nested": (lambda d: (d / INDEX).write_text('{"weight_map":' + "[" * 100_000),
                     [INDEX, "JSON"]),
    "index-directory": (lambda d: (d / INDEX).mkdir(), [INDEX, "regular"]),
    "directory": (lambda d: directory(d / TENSORS), [TENSORS, "regular"]),
    "fifo": (lambda d: fifo(d / TENSORS), [TENSORS, "regular"]),
    "config-directory": (lambda d: directory(d / "config.json"), ["config.json", "regular"]),
    "config-fifo": (lambda d: fifo(d / "config.json"), ["config.json", "regular"]),
    "config-nested": (lambda d: (d / "config.json").write_text("[" * 100_000),
                      ["config.json", "JSON"]),
}


def add_spare(path):
    """A tensor between the others that no layer needs, of a dtype that nobody knows."""
    f = File(path)
    middle = f.header[WO_B]["data_offsets"][0]
    for name, value in f.header.items():
        if name != "__metadata__" and value["data_offsets"][0] >= middle:
            value["data_offsets"] = [offset + 6 for offset in value["data_offsets"]]
    f.header["spare"] = {"dtype": "X12", "shape": [4], "data_offsets": [middle, middle + 6]}
    f.data = f.data[:middle] + b"spare!" + f.data[middle:]
    path.write_bytes(f.image())


def execute(command):
    """Return code, stderr, seconds at work and peak megabytes of a command.  (Seconds by the clock
    are the machine's too, which has other work.)

    A small interpreter starts it: its own children's peak is that command's."""
    script = ("import resource, subprocess, sys; "
              "code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL); "
              "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
              "print(code, used.ru_utime + used.ru_stime, used.ru_maxrss)")
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script, *map(str, command)],
                          capture_output=True, text=True, errors="surrogateescape", timeout=20)
    code, seconds, kilobytes = done.stdout.split()
    return int(code), done.stderr, float(seconds), int(kilobytes) / 1024


def expect_refused(options, folder, words):
    told = ""
    for arguments in (["inspect", folder], ["run", folder, "--tokens", 1]):
        code, stderr, seconds, megabytes = execute([options.oproj, *arguments])
        lines = own_lines(stderr)
        expect(code == REFUSED, f"{arguments[0]}: exit {code}, not {REFUSED}: {lines}")
        expect(len(lines) == 1, f"{arguments[0]}: {len(lines)} lines: {lines}")
        for word in words:
            expect(word in lines[0], f"the sentence does not name {word}: {lines[0]}")
        if not options.sanitized:
            expect(seconds < SECONDS, f"{arguments[0]} took {seconds:.2f} s")
            expect(megabytes < MEGABYTES, f"{arguments[0]} took {megabytes:.0f} MB")
        told = re.sub(r"\S*/", "", lines[0])
    return f"{told} ({seconds:.2f} s, {megabytes:.0f} MB)"


def fresh_copy(options):
    folder = options.workdir / "hostile"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(options.workdir / "whole", folder)
    return folder


def file_case(options, make, words):
    folder = fresh_copy(options)
    image = make(File(folder / TENSORS))
    (folder / TENSORS).write_bytes(image)
    return expect_refused(options, folder, [TENSORS, *words])


def folder_case(options, change, words):
    folder = fresh_copy(options)
    change(folder)
    return expect_refused(options, folder, words)


def fine_case(options):
    """What all cases are made from: an unknown dtype that nobody needs is no reason to refuse."""
    code, stderr, *_ = execute([options.oproj, "run", options.workdir / "whole", "--tokens", 1])
    expect(code == OK, f"exit {code}: {stderr}")
    return "runs"


def main():
    parser = argparse.ArgumentParser(description="files that mean harm")
    parser.add_argument("--oproj", required=True, type=lambda p: str(Path(p).resolve()))
    parser.add_argument("--workdir", required=True, type=lambda p: Path(p).resolve())
    parser.add_argument("--sanitized", action="store_true")
    options = parser.parse_args()
    whole = options.workdir / "whole"
    shutil.rmtree(options.workdir, ignore_errors=True)
    options.workdir.mkdir(parents=True)
    subprocess.run([options.oproj, "synth", "--model", "tiny", "--layers", "1", "--mtp", "0",
                    "--out", whole], check=True, stdout=subprocess.DEVNULL)
    add_spare(whole / TENSORS)
    cases = {"fine": lambda: fine_case(options)}
    cases |= {n: lambda c=c: file_case(options, *c) for n, c in FILES.items()}
    cases |= {n: lambda c=c: folder_case(options, *c) for n, c in FOLDERS.items()}
    failed = 0
    for name, case in cases.items():
        try:
            print(f"ok   {name}: {case()}", flush=True)
        except (CaseFailure, OSError, ValueError, subprocess.SubprocessError) as failure:
            failed += 1
            print(f"FAIL {name}: {failure}", flush=True)
    print(f"{len(cases) - failed} of {len(cases)} passed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
