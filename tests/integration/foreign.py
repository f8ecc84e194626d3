"""Owns checkpoints that oproj's own synth did not make, as other tools write them.

Each Recipe varies what real files vary: the names of tensors, the dtype of scales, the number of
files, block sizes, BF16 layers and draft layers, flat or nested config, rope values.  Every file is
valid safetensors with the awkward parts that the format allows: data at odd byte offsets, tensors
out of order, unrelated tensors of other dtypes, empty tensors, scalars, escapes in names, an index
that promises a scale which no file holds.

    python3 tests/integration/foreign.py NAME DIR      writes one checkpoint and input.safetensors
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import evaluate as ev

HEAD_DIM = 512
ROPE_DIM = 64

# What one layer is made of: (weight dtype, scale dtype) of WO-A and of WO-B.
FP8_E8M0 = ("F8_E4M3", "F8_E8M0")
FP8_U8 = ("F8_E4M3", "U8")
FP8_F32 = ("F8_E4M3", "F32")  # scales that are not powers of two
BF16 = ("BF16", "")


@dataclass(frozen=True)
class Recipe:
    """One checkpoint and the input that goes with it."""
    model_type: str             # "deepseek_v4" or "deepseek_v41"
    names: str                  # "release", "hf" or "runtime"
    compress_ratios: tuple      # one entry per layer
    layers: tuple               # per layer (WO-A, WO-B)
    draft: tuple = ()           # per draft layer (WO-A, WO-B)
    hidden: int = 640
    heads: int = 24
    groups: int = 6
    lora_rank: int = 384
    files: int = 1
    nested_rope: bool = False   # rope_parameters {main, compress} instead of the flat fields
    nested_quantization: bool = False  # V4.1: quantization_config inside text_config
    rope_type_key: str = "type"
    theta: float = 10000
    compress_theta: float = 160000
    yarn: dict = field(default_factory=lambda: {
        "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536})
    max_position: int = 1048576
    positions: tuple = (0, 1, 17, 4095, 20011, 33333, 50021)
    nan_token: int = -1         # this token's input holds one NaN
    seed: int = 1

    @property
    def block(self):
        return 32 if self.model_type == "deepseek_v41" else 128

    @property
    def depth(self):
        return self.heads // self.groups * HEAD_DIM


RECIPES = {
    "v4-release": Recipe(
        "deepseek_v4", "release", (0, 4, 128), ((FP8_E8M0, FP8_E8M0),) * 3,
        draft=((BF16, FP8_E8M0),), seed=11),
    "v4-hf-f32": Recipe(
        "deepseek_v4", "hf", (128, 1, 4), ((FP8_F32, FP8_F32), (BF16, BF16), (FP8_F32, BF16)),
        hidden=576, files=3, nested_rope=True, theta=12000, compress_theta=40000,
        yarn={"factor": 4, "beta_fast": 32, "beta_slow": 1,
              "original_max_position_embeddings": 8192},
        max_position=32768, positions=(32767, 0, 8191, 8192, 129, 30000), seed=12),
    "v4-runtime-u8": Recipe(
        "deepseek_v4", "runtime", (4, 0), ((FP8_U8, FP8_U8), (FP8_U8, FP8_F32)),
        heads=12, lora_rank=256, files=2, rope_type_key="rope_type",
        positions=(5, 40000, 39999, 2, 65536, 65537, 7), nan_token=3, seed=13),
    "v41-release": Recipe(
        "deepseek_v41", "release", (0, 1, 2), ((FP8_E8M0, FP8_E8M0), (FP8_E8M0, FP8_F32),
                                               (FP8_E8M0, BF16)),
        draft=((BF16, FP8_E8M0), (FP8_E8M0, FP8_E8M0)), hidden=600, files=4, seed=14),
    "v41-runtime-u8": Recipe(
        "deepseek_v41", "runtime", (2, 0), ((FP8_U8, FP8_U8), (BF16, FP8_U8)),
        hidden=320, heads=12, lora_rank=96, nested_rope=True, nested_quantization=True,
        positions=(11, 22222, 4, 49999, 8, 65535), seed=15),
}

# ---- tensors ----------------------------------------------------------------------------------


def random_codes(rng, rows, cols):
    """e4m3 codes of normal values; every finite code occurs somewhere."""
    pool = ev.e4m3_encode(np.clip(rng.normal(scale=100, size=1 << 15), -448, 448))
    codes = pool[rng.integers(0, len(pool), size=(rows, cols))]
    finite = np.flatnonzero(np.isfinite(ev.E4M3_VALUES)).astype(np.uint8)
    codes.reshape(-1)[rng.choice(rows * cols, len(finite), replace=False)] = finite
    return codes


def run_exponents(length, block):
    """How far the activations of each run of `block` columns lie below their neighbours, as a
    power of two that the weights make up for.

    Every run then adds as much to the result as any other, and a quantiser whose block is not the
    run loses the small ones; with even magnitudes e4m3 hardly notices a wrong block."""
    runs = np.arange(-(-length // block))
    return np.where(runs % 3 == 1, 14, 0)


def random_scale(rng, dtype, exponents):
    """A scale of its own for every block, over a range of 2^6 around its exponent."""
    exponents = exponents + rng.integers(-16, -10, size=exponents.shape)
    if dtype == "F32":
        return ev.tensor("F32", np.ldexp(rng.uniform(1.05, 1.95, exponents.shape), exponents))
    return ev.tensor(dtype, exponents + 127)


def matrix_tensors(rng, base, suffix, kind, exponents, shape, block):
    """Named tensors of one weight: its values, and its scale where it has one.

    exponents [row blocks, column blocks] is the log2 of each block's magnitude."""
    dtype, scale_dtype = kind
    rows, cols = shape
    if dtype == "BF16":
        gain = exponents.repeat(block, axis=0)[:rows].repeat(block, axis=1)[:, :cols]
        values = np.ldexp(rng.normal(scale=0.02, size=shape), gain).astype(np.float32)
        return {base + ".weight": ev.tensor("BF16", values.view(np.uint32) >> 16)}
    return {base + ".weight": ev.tensor("F8_E4M3", random_codes(rng, rows, cols)),
            base + suffix: random_scale(rng, scale_dtype, exponents)}


def layer_names(recipe, layer):
    """(WO-A, WO-B, scale suffix) of a layer in the recipe's form of names."""
    if recipe.names == "release":
        return f"layers.{layer}.attn.wo_a", f"layers.{layer}.attn.wo_b", ".scale"
    if recipe.names == "hf":
        base = f"model.layers.{layer}.self_attn"
        return f"{base}.o_a_proj", f"{base}.o_b_proj", ".weight_scale_inv"
    base = f"model.layers.{layer}.attn"
    suffix = ".weight_scale" if recipe.model_type == "deepseek_v41" else ".weight_scale_inv"
    return f"{base}.wo_a", f"{base}.wo_b", suffix


def projection_tensors(recipe, rng):
    """WO-A and WO-B of every layer and draft layer, by name."""
    tensors = {}
    block, z_width = recipe.block, recipe.groups * recipe.lora_rank
    x_runs, z_runs = run_exponents(recipe.depth, block), run_exponents(z_width, block)
    exponents_a = x_runs[None, :] - z_runs[:, None]
    exponents_b = np.tile(z_runs, (-(-recipe.hidden // block), 1))
    named = [(layer_names(recipe, i), kinds) for i, kinds in enumerate(recipe.layers)]
    named += [((f"mtp.{k}.attn.wo_a", f"mtp.{k}.attn.wo_b", ".scale"), kinds)
              for k, kinds in enumerate(recipe.draft)]
    for (wo_a, wo_b, suffix), (kind_a, kind_b) in named:
        tensors |= matrix_tensors(rng, wo_a, suffix, kind_a, exponents_a,
                                  (z_width, recipe.depth), block)
        tensors |= matrix_tensors(rng, wo_b, suffix, kind_b, exponents_b,
                                  (recipe.hidden, z_width), block)
    return tensors


def unrelated_tensors(rng):
    """Tensors of a whole model that the projection must step over; names that resemble its own."""
    shapes = {
        "layers.0.attn.wo_a.bias_of_nothing": ("F16", (3, 5)),
        "layers.0.attn.wo_b.weight_old": ("I8", (7,)),
        "layers.10.attn.wq_a.weight": ("F8_E5M2", (9, 3)),
        "layers.0.ffn.experts.0.w1.weight": ("F4", (3, 6)),
        "layers.0.ffn.gate.tid2eid": ("I64", (5,)),
        "layers.1.attn.attn_sink": ("F32", (3,)),
        "vision.blocks.0.attn.wo_a.weight": ("BF16", (3, 3)),
        "mask \"quoted\" \\ \u00e9": ("BOOL", (5,)),
        "empty": ("F32", (0, 3)),
        "scalar": ("F64", ()),
    }
    return {name: ev.Tensor(dtype, shape, rng.bytes(ev.tensor_bytes(dtype, shape)))
            for name, (dtype, shape) in shapes.items()}


def shuffled(rng, names):
    names = list(names)
    rng.shuffle(names)
    return names


def write_files(directory, recipe, tensors, rng):
    """Deals the tensors to files in random order; more than one file gets an index."""
    order = shuffled(rng, tensors)
    weight_map = {}
    for number in range(recipe.files):
        held = {name: tensors[name] for name in order[number::recipe.files]}
        file = f"model-{number + 1:05}-of-{recipe.files:05}.safetensors"
        file = file if recipe.files > 1 else "model.safetensors"
        ev.write_safetensors(directory / file, held, shuffled(rng, held),
                             {"format": "pt", "note": "tab\t \u00fc \"x\""}, data_offset_parity=1)
        weight_map |= dict.fromkeys(held, file)
    if recipe.files > 1:
        promise_missing_scales(recipe, weight_map)
        total = sum(len(item.data) for item in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def promise_missing_scales(recipe, weight_map):
    """Lists a scale in the file of every BF16 weight, where there is none."""
    for layer, (kind_a, _) in enumerate(recipe.layers):
        wo_a, _, suffix = layer_names(recipe, layer)
        if kind_a == BF16:
            weight_map[wo_a + suffix] = weight_map[wo_a + ".weight"]

# ---- config -----------------------------------------------------------------------------------


def rope_fields(recipe):
    yarn = {recipe.rope_type_key: "yarn"} | recipe.yarn
    if not recipe.nested_rope:
        return {"rope_theta": recipe.theta, "compress_rope_theta": recipe.compress_theta,
                "rope_scaling": yarn}
    share = {"partial_rotary_factor": ROPE_DIM / HEAD_DIM}
    compress = {"rope_type": "yarn", "rope_theta": recipe.compress_theta, "attention_factor": 1.0}
    return {"rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": recipe.theta} | share,
        "compress": compress | recipe.yarn | share}}


def config(recipe):
    """config.json with the fields around it that a released one has."""
    text = {
        "attention_bias": False, "bos_token_id": 0, "rms_norm_eps": 1e-06, "vocab_size": 129280,
        "hidden_size": recipe.hidden, "num_attention_heads": recipe.heads,
        "num_key_value_heads": 1, "head_dim": HEAD_DIM, "qk_rope_head_dim": ROPE_DIM,
        "o_groups": recipe.groups, "o_lora_rank": recipe.lora_rank, "q_lora_rank": 1024,
        "num_hidden_layers": len(recipe.layers), "num_nextn_predict_layers": len(recipe.draft),
        "max_position_embeddings": recipe.max_position, "sliding_window": None,
        "compress_ratios": list(recipe.compress_ratios) + [0] * len(recipe.draft),
    } | rope_fields(recipe)
    quantization = {"quantization_config": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
        "scale_fmt": "ue8m0", "weight_block_size": [recipe.block, recipe.block]}}
    if recipe.model_type == "deepseek_v4":
        return {"architectures": ["DeepseekV4ForCausalLM"], "model_type": recipe.model_type,
                "torch_dtype": "bfloat16"} | text | quantization
    vision = {"model_type": "deepseek_v41_vision", "hidden_size": 96, "num_attention_heads": 3,
              "num_hidden_layers": 27, "rope_theta": 77.0, "max_position_embeddings": 5}
    text = {"model_type": "deepseek_v41_text"} | text
    outer = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": recipe.model_type}
    if recipe.nested_quantization:
        return outer | {"vision_config": vision, "text_config": text | quantization}
    return outer | quantization | {"vision_config": vision, "text_config": text}

# ---- input and whole folders ------------------------------------------------------------------


def random_attn_out(recipe, rng):
    """BF16 bits [T, H, 512]: normal values, one in a thousand of them 100 times as large, each run
    of columns as far down as run_exponents says."""
    tokens = len(recipe.positions)
    shape = (tokens, recipe.groups, recipe.depth)
    values = rng.normal(size=shape) * np.where(rng.random(shape) < 1e-3, 100, 1)
    runs = run_exponents(recipe.depth, recipe.block)
    values = np.ldexp(values, -runs.repeat(recipe.block))
    values = values.reshape(tokens, recipe.heads, HEAD_DIM)
    if recipe.nan_token >= 0:
        values[recipe.nan_token, -1, 3] = np.nan
    return ev.bf16_encode(values)


def write_input(path, attn_out, positions):
    ev.write_safetensors(path, {"positions": ev.tensor("I64", np.array(positions)),
                                "attn_out": ev.tensor("BF16", attn_out)})


def build(recipe, directory, edit=None):
    """Writes the checkpoint into `directory` and the input beside it, as NAME.input.safetensors.

    `edit` may change the dict of projection tensors first, to make files that must be refused.
    Returns the input's path."""
    rng = np.random.default_rng(recipe.seed)
    directory.mkdir(parents=True)
    tensors = projection_tensors(recipe, rng)
    if edit:
        edit(tensors)
    write_files(directory, recipe, tensors | unrelated_tensors(rng), rng)
    (directory / "config.json").write_text(json.dumps(config(recipe), indent=2))
    input_path = directory.with_name(directory.name + ".input.safetensors")
    write_input(input_path, random_attn_out(recipe, rng), recipe.positions)
    return input_path


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in RECIPES:
        sys.exit(f"usage: foreign.py NAME DIR, where NAME is one of {', '.join(RECIPES)}")
    print(build(RECIPES[sys.argv[1]], Path(sys.argv[2])))


if __name__ == "__main__":
    main()
