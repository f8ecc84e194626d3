"""Owns the proof that `oproj` refuses what it cannot compute: options that a checkpoint does not
allow, and checkpoints, inputs and split sets that are broken.

    python3 tests/integration/test_refusals.py --oproj PATH/oproj --oproj-run PATH/oproj-run
                                               --workdir DIR [--only NAME]

NAME is a case or a group: refuse, checkpoint, input or tampered.
"""

import json
import shutil
from pathlib import Path

import numpy as np

import evaluate as ev
from program import (INDEX, MAX_POSITION, WO_A, WO_B, Bench, bound, drop, expect_refusal, on_ranks,
                     option_case, positions_with, run_on, set_tensor, run_cases)


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


def checkpoint_case(bench, words, build, ranks):
    folder = build(bench)
    watched = [folder] if folder.exists() else []
    return expect_refusal(bench, run_on(folder), words, ranks, watched=watched)


# ---- inputs ------------------------------------------------------------------------------------


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


# ---- options -----------------------------------------------------------------------------------


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


# ---- tampered split sets -----------------------------------------------------------------------


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


# ---- the list ----------------------------------------------------------------------------------


def all_cases():
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
    for name, build in TAMPERED.items():
        yield f"tampered-{name}", "tampered", bound(tampered_case, build)


if __name__ == "__main__":
    run_cases(__doc__, all_cases())
