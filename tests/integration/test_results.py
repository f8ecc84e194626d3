"""Owns the proof that results of `oproj run` are the same however they are come by.

    python3 tests/integration/test_results.py --oproj PATH/oproj --oproj-run PATH/oproj-run
                                              --workdir DIR [--only NAME]

What y is worth is test_foreign.py's matter; here two results are equal or they are not.

NAME is a case or a group: result.
"""

import itertools
import json
import math
import sys

import numpy as np

import evaluate as ev
from program import (CHECK_FAILED, MAX_POSITION, OK, TINY, WO_B, bound, expect, fresh,
                     positions_with, set_tensor, run_cases)


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


def far_positions_case(bench):
    """Tables have rows for the positions in use, not for all below them."""
    peaks = []
    for position in (1, MAX_POSITION - 1):
        path = bench.input(edit=positions_with(position))
        peaks.append(peak_bytes(bench, ["run", bench.synth("random"), "--input", path, "--check"]))
    near, far = (peak / 2**20 for peak in peaks)
    expect(far <= near + 64, f"{far:.0f} MB at far positions, {near:.0f} MB at near ones")
    return f"{near:.0f} MB near, {far:.0f} MB far"


def exact_case(bench):
    """The same file at any number of ranks, from any form of the checkpoint, however reduced."""
    whole = bench.exact()
    wanted = bench.project(whole, "--check")
    halves, quarters = bench.split("parts2", whole, 2), bench.split("parts4", whole, 4)
    thirds = bench.split("parts3", whole, 3, "--uneven")
    ways = [(whole, n, ()) for n in (1, 2, 4)]
    ways += [(whole, 3, ("--uneven",)), (halves, 2, ()), (quarters, 4, ("--check",)),
             (thirds, 3, ()), (whole, 2, ("--reduce", "scatter")),
             (whole, 3, ("--uneven", "--reduce", "scatter")), (whole, 4, ("--reduce", "vendor")),
             (whole, 4, ("--chunk", "3", "--check")), (whole, 2, ("--chunk", "1000")),
             (whole, 3, ("--uneven", "--reduce", "scatter", "--chunk", "4"))]
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
    expect(bench.project(folder, "--chunk", 2, ranks=4) == first, "chunks differ")
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


def written(bench, folder, tokens, *flags, ranks=0):
    bench.project(folder, "--layers", 1, *flags, ranks=ranks, tokens=tokens)
    return bench.workdir / "y.safetensors"


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


# ---- the list ----------------------------------------------------------------------------------


def all_cases():
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


if __name__ == "__main__":
    run_cases(__doc__, all_cases())
