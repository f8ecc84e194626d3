"""Owns the proof of evaluate.py: its stages against vectors made by public GPU kernels.

    python3 tests/integration/test_golden_python.py DATA_DIR

DATA_DIR holds edges.safetensors and largepos_full.safetensors.  Codes, scales and the BF16 output
must match byte for byte.  z and y come from tensor cores: each value must lie within one BF16 ulp
of the float64 one (see check_near for sums that cancel) and the relative error must be that of
BF16 rounding.  Exit status 0 = all equal, 1 = a difference.
"""

import hashlib
import sys
from pathlib import Path

import numpy as np

import evaluate as ev

GROUPS = 2
BLOCK = 128
WEIGHT_SHA256 = {
    1000: "5345ca84b595117d3aaea5f75c3b2048c845691ee28643ae6e316cccd9024e13",
    2000: "773bc2395bc9983243757a3ebf2ac4009b2a90286b92e3bfc491c6ffffa89a61",
}
failures = []


def report(name, ok, detail=""):
    print(f"{'ok  ' if ok else 'FAIL'} {name} {detail}".rstrip())
    if not ok:
        failures.append(name)


def report_bytes(name, value, stored):
    """`value` must have the bytes of the stored tensor."""
    same = np.ascontiguousarray(value).tobytes() == stored.data
    different = int((value.reshape(-1) != stored.bits().reshape(-1)).sum()) if not same else 0
    report(name, same, f"{different} of {value.size} differ" if different else "")


def hashed_codes(seed, count):
    """e4m3 codes of moderate exponents from a 64-bit mixing hash of the index."""
    with np.errstate(over="ignore"):
        mixed = (np.arange(count, dtype=np.uint64) + np.uint64(seed + 1)) * np.uint64(
            0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(30)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(27)
        mixed *= np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    low = (mixed & np.uint64(63)).astype(np.uint8)
    return ((low >> 5) & 1) << 7 | (4 + ((low >> 3) & 3)) << 3 | low & 7


def check_input_stage(name, tensors, cos, sin):
    """Rotation and quantisation; returns the values that WO-A multiplies."""
    heads = ev.bf16_decode(tensors["o"].bits())
    x = ev.group_major(ev.inverse_rope(heads, cos, sin), GROUPS)
    codes, exponent = ev.quantize(x, BLOCK)
    report_bytes(f"{name} o_fp8_gtd", codes, tensors["o_fp8_gtd"])
    report_bytes(f"{name} o_rot_bf16_gtd", ev.bf16_encode(x), tensors["o_rot_bf16_gtd"])
    report_bytes(f"{name} o_scale_f32_storage", ev.scales_f32_storage(exponent),
                 tensors["o_scale_f32_storage"])
    report_bytes(f"{name} o_scale_ue8m0_storage", ev.scales_packed_storage(exponent),
                 tensors["o_scale_ue8m0_storage"])
    return ev.dequantize(codes, exponent)


def check_near(name, exact, stored, exact_stored):
    """A float64 result against the recorded one, and the kernel's BF16 against both.

    The kernel's accumulator is short: its error is a fraction of the typical sum, not of the
    value, and where a sum cancels to near zero that is many ulps (1 % of the elements).  So a value
    may be one BF16 ulp off, of the larger of the two binades, plus 2^-10 of the rms value."""
    recorded = exact_stored.bits().reshape(exact.shape)
    report(f"{name} float64", ev.relative_error(exact, recorded) < 1e-12)
    kernel = ev.bf16_decode(stored.bits()).reshape(exact.shape).astype(np.float64)
    expected = ev.bf16_round(exact).astype(np.float64)
    short_sum = 2.0 ** -10 * np.sqrt((exact ** 2).mean())
    ulp = ev.bf16_ulp(np.maximum(np.abs(kernel), np.abs(expected)))
    difference = np.abs(kernel - expected)
    report(f"{name} within one ulp", bool((difference <= ulp + short_sum).all()))
    one_ulp = float((difference <= ulp).mean())
    report(f"{name} mostly within one ulp", one_ulp >= 0.98, f"{one_ulp:.3f}")
    equal = float((difference == 0).mean())
    report(f"{name} mostly equal", equal >= 0.93, f"{equal:.3f}")
    error = ev.relative_error(kernel, exact)
    report(f"{name} relative error", error <= 2e-3, f"{error:.2e}")


def check_rope_rows(name, tensors_rows, rope, positions, tolerance):
    """The table of the vectors was made in FP32 on a device, so it is near ours, not equal."""
    cos, sin = ev.cos_sin_rows(rope, 64, positions)
    worst = float(np.abs(np.concatenate([cos, sin], axis=1) - tensors_rows).max())
    report(f"{name} table near", worst <= tolerance, f"{worst:.1e}")


def check_yarn():
    """The compressed layers' blend at the released values runs from pair 15 to pair 25."""
    yarn = ev.Rope(160000.0, factor=16.0)
    ratio = (ev.inverse_frequencies(ev.Rope(160000.0), 64).astype(np.float64)
             / ev.inverse_frequencies(yarn, 64))
    report("yarn keeps pairs 0..15", bool((ratio[:16] == 1).all()))
    report("yarn blends pairs 16..24", bool(((ratio[16:25] > 1) & (ratio[16:25] < 16)).all()))
    report("yarn slows pairs 25..31", bool((np.abs(ratio[25:] / 16 - 1) < 1e-6).all()))


def check_edges(path):
    tensors = ev.read_safetensors(path)
    positions = tensors["positions"].bits()
    table = tensors["cos_sin_cache"].bits()
    check_rope_rows("edges", table, ev.Rope(10000.0), np.arange(len(table)), 2e-4)
    check_input_stage("edges", tensors, table[positions, :32], table[positions, 32:])


def check_full_chain(path):
    tensors = ev.read_safetensors(path)
    rows = tensors["cos_sin_rows"].bits()
    positions = tensors["positions"].bits()
    check_rope_rows("full", rows, ev.Rope(10000.0), positions, 0.2)
    x = check_input_stage("full", tensors, rows[:, :32], rows[:, 32:])

    wo_a = hashed_codes(1000, 2 * 256 * 4096)
    wo_b = tensors["wo_b"].bits()
    for seed, codes in ((1000, wo_a), (2000, wo_b)):
        digest = hashlib.sha256(codes.tobytes()).hexdigest()
        report(f"full weight bytes {seed}", digest == WEIGHT_SHA256[seed])
    report("full wo_b hash", bool((hashed_codes(2000, wo_b.size) == wo_b.reshape(-1)).all()))

    scale_a = tensors["wo_a_scale"]
    scale_a = ev.Tensor("F32", (4, 32), scale_a.data)
    weight_a = ev.make_weight(ev.tensor("F8_E4M3", wo_a.reshape(512, 4096)), scale_a, BLOCK)
    weight_b = ev.make_weight(tensors["wo_b"], tensors["wo_b_scale"], BLOCK)
    z = ev.project_groups(x, weight_a.values)
    check_near("full z", z, tensors["z"], tensors["z_ref_f64"])

    kernel_z = ev.bf16_decode(tensors["z"].bits()).reshape(5, 512)
    codes, exponent = ev.quantize(kernel_z, BLOCK)
    report_bytes("full zq", codes, tensors["zq"])
    report_bytes("full zs_storage", ev.scales_f32_storage(exponent[None]), tensors["zs_storage"])
    y = ev.dequantize(codes, exponent) @ weight_b.values.T
    check_near("full y", y, tensors["y"], tensors["y_ref_f64"])


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: test_golden_python.py DATA_DIR")
    check_yarn()
    check_edges(Path(sys.argv[1]) / "edges.safetensors")
    check_full_chain(Path(sys.argv[1]) / "largepos_full.safetensors")
    print(f"{len(failures)} failed")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
