"""Owns an evaluation of the output projection that shares no code with oproj.

It is written from the formulae alone (safetensors, e4m3, ue8m0, bf16, rope tables, inverse
rotation, block quantisation, WO-A, WO-B, the sum over ranks), so that a mistake shared by oproj's
own backends and checks shows up here.

Symbols: T tokens, H heads, G groups, D = (H/G) * head_dim, r = lora rank, N = hidden size.
Every dot product is taken in float64 on the exact values of codes and scales; the roundings that
the layer is defined with (FP32 rotation, block codes, BF16 z, BF16 partial sums) are applied where
they belong and nowhere else.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# ---- safetensors ------------------------------------------------------------------------------

DTYPE_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
              "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
              "U64": 64, "I64": 64, "F64": 64}

NUMPY_DTYPE = {"U8": "<u1", "F8_E4M3": "<u1", "F8_E8M0": "<u1", "BF16": "<u2", "I32": "<i4",
               "F32": "<f4", "I64": "<i8", "F64": "<f8"}


@dataclass(frozen=True)
class Tensor:
    """A tensor as stored: safetensors dtype name, shape, little-endian bytes."""
    dtype: str
    shape: tuple
    data: bytes

    def bits(self):
        """The stored elements; codes and BF16 as unsigned integers."""
        return np.frombuffer(self.data, NUMPY_DTYPE[self.dtype]).reshape(self.shape)


def tensor(dtype, array):
    """A Tensor of `array`, whose elements are already the stored bit patterns or numbers."""
    stored = np.ascontiguousarray(array, dtype=NUMPY_DTYPE[dtype])
    return Tensor(dtype, tuple(stored.shape), stored.tobytes())


def tensor_bytes(dtype, shape):
    return (DTYPE_BITS[dtype] * math.prod(shape) + 7) // 8


def read_safetensors(path):
    """All tensors of a file, by name."""
    raw = Path(path).read_bytes()
    (header_bytes,) = struct.unpack_from("<Q", raw, 0)
    header = json.loads(raw[8:8 + header_bytes])
    data = raw[8 + header_bytes:]
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if end - begin != tensor_bytes(entry["dtype"], shape) or end > len(data):
            raise ValueError(f"{path}: {name} has offsets that do not fit its shape")
        tensors[name] = Tensor(entry["dtype"], shape, data[begin:end])
    return tensors


def write_safetensors(path, tensors, header_order=None, metadata=None, data_offset_parity=None):
    """Writes `tensors` with data in dict order and header entries in `header_order`.

    data_offset_parity 1 pads the header with spaces until the data begin at an odd file offset."""
    offsets, at = {}, 0
    for name, item in tensors.items():
        offsets[name] = [at, at + len(item.data)]
        at += len(item.data)
    header = {"__metadata__": metadata} if metadata else {}
    for name in header_order or tensors:
        item = tensors[name]
        header[name] = {"dtype": item.dtype, "shape": list(item.shape),
                        "data_offsets": offsets[name]}
    text = json.dumps(header).encode()
    while data_offset_parity is not None and len(text) % 2 != data_offset_parity:
        text += b" "
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for item in tensors.values():
            file.write(item.data)


# ---- number formats ---------------------------------------------------------------------------

def e4m3_decode_one(code):
    """OCP e4m3: 1 sign, 4 exponent (bias 7), 3 mantissa bits; S.1111.111 is NaN, no infinities."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** -9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3_VALUES = np.array([e4m3_decode_one(code) for code in range(256)])
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
E4M3_MIDPOINTS = (E4M3_VALUES[:126] + E4M3_VALUES[1:127]) / 2  # between codes i and i + 1


def e4m3_encode(values):
    """Nearest code, ties to the even one; |values| <= 448.  Signs of zeros are kept."""
    magnitude = np.abs(np.asarray(values, dtype=np.float64))
    below = np.searchsorted(E4M3_MIDPOINTS, magnitude, side="left")
    above = np.searchsorted(E4M3_MIDPOINTS, magnitude, side="right")
    code = np.where(below % 2 == 0, below, above)  # they differ on a tie only
    code = np.where(np.isnan(magnitude), E4M3_NAN, code)
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def e4m3_decode(codes):
    return E4M3_VALUES[codes]


UE8M0_VALUES = np.array([2.0 ** (byte - 127) for byte in range(255)] + [math.nan])


def ue8m0_ceil(raw):
    """Byte of the smallest power of two >= raw (a normal, positive FP32), by exponent bits."""
    bits = np.asarray(raw, dtype=np.float32).view(np.uint32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).astype(np.uint8)


def bf16_decode(bits):
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def bf16_round(values):
    """float64 to the nearest BF16, ties to even, in one rounding; the result as FP32."""
    values = np.asarray(values, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        _, exponent = np.frexp(values)
        quantum = np.ldexp(1.0, np.maximum(exponent - 8, -133))
        rounded = np.rint(values / quantum) * quantum
        rounded = np.where(np.abs(rounded) >= 2.0 ** 128, np.copysign(np.inf, values), rounded)
        return np.copysign(rounded, values).astype(np.float32)


def bf16_encode(values):
    return (bf16_round(values).view(np.uint32) >> 16).astype(np.uint16)


def bf16_ulp(values):
    """Distance of neighbouring BF16 numbers at |values|."""
    _, exponent = np.frexp(np.abs(np.asarray(values, dtype=np.float64)))
    return np.ldexp(1.0, np.maximum(exponent - 8, -133))


# ---- rope -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Rope:
    """One kind of layer's angles; factor <= 1 means plain."""
    theta: float
    factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position: int = 65536


def yarn_boundary(rope, rope_dim, beta):
    """d(b): the (real) pair index whose wave turns b times within the original context."""
    turns = rope.original_max_position / (2 * math.pi * beta)
    return rope_dim * math.log(turns) / (2 * math.log(rope.theta))


def inverse_frequencies(rope, rope_dim):
    """FP32 [rope_dim/2]: evaluated in double, YaRN blend included, rounded once."""
    plain = [rope.theta ** (-2.0 * i / rope_dim) for i in range(rope_dim // 2)]
    if rope.factor <= 1:
        return np.array(plain).astype(np.float32)
    low = math.floor(yarn_boundary(rope, rope_dim, rope.beta_fast))
    high = math.ceil(yarn_boundary(rope, rope_dim, rope.beta_slow))
    blended = []
    for i, f in enumerate(plain):
        keep = 1 - min(max((i - low) / (high - low), 0.0), 1.0)
        blended.append(f / rope.factor * (1 - keep) + f * keep)
    return np.array(blended).astype(np.float32)


def cos_sin_rows(rope, rope_dim, positions):
    """FP32 cos and sin [T, rope_dim/2] of the positions' rows of the table."""
    angles = positions.astype(np.float32)[:, None] * inverse_frequencies(rope, rope_dim)
    cos = np.array([[math.cos(a) for a in row] for row in angles.astype(np.float64)])
    sin = np.array([[math.sin(a) for a in row] for row in angles.astype(np.float64)])
    return cos.astype(np.float32), sin.astype(np.float32)


def inverse_rope(heads, cos, sin):
    """FP32 [T, H, head_dim] rotated back: two rounded products and one rounded sum per value."""
    rotated = heads.copy()
    nope = heads.shape[-1] - 2 * cos.shape[-1]
    x0, x1 = heads[..., nope::2], heads[..., nope + 1::2]
    cos, sin = cos[:, None, :], sin[:, None, :]
    with np.errstate(over="ignore", invalid="ignore"):
        rotated[..., nope::2] = x0 * cos + x1 * sin
        rotated[..., nope + 1::2] = x1 * cos - x0 * sin
    return rotated


def group_major(x, groups):
    """[T, H, head_dim] as [G, T, D]: what each group's WO-A multiplies."""
    tokens = x.shape[0]
    return np.ascontiguousarray(x.reshape(tokens, groups, -1).transpose(1, 0, 2))


# ---- activation quantisation ------------------------------------------------------------------

def quantize(x, block):
    """FP32 [..., K] to e4m3 codes [..., K] and ue8m0 bytes [..., K/block]."""
    blocks = x.reshape(*x.shape[:-1], -1, block)
    amax = np.maximum(np.abs(blocks).max(axis=-1), np.float32(1e-10))
    exponent = ue8m0_ceil(amax * np.float32(1 / 448))
    scaled = blocks.astype(np.float64) / UE8M0_VALUES[exponent][..., None]
    codes = e4m3_encode(np.clip(scaled, -E4M3_MAX, E4M3_MAX))
    return codes.reshape(x.shape), exponent


def dequantize(codes, exponent):
    """float64 values of codes [..., K] under ue8m0 bytes [..., K/block]."""
    blocks = e4m3_decode(codes).reshape(*exponent.shape, -1)
    return (blocks * UE8M0_VALUES[exponent][..., None]).reshape(codes.shape)


def aligned_tokens(tokens):
    return (tokens + 3) // 4 * 4


def scales_f32_storage(exponent):
    """ue8m0 bytes [G, T, S] as FP32 [G, S, Tal], padding tokens zero."""
    groups, tokens, columns = exponent.shape
    stored = np.zeros((groups, columns, aligned_tokens(tokens)), dtype=np.float32)
    stored[:, :, :tokens] = UE8M0_VALUES[exponent].transpose(0, 2, 1)
    return stored


def scales_packed_storage(exponent):
    """ue8m0 bytes [G, T, S] as int32 [G, S/4, Tal]: byte b of word i belongs to block 4i + b."""
    groups, tokens, columns = exponent.shape
    stored = np.zeros((groups, columns // 4, aligned_tokens(tokens), 4), dtype=np.uint8)
    stored[:, :, :tokens, :] = exponent.reshape(groups, tokens, -1, 4).transpose(0, 2, 1, 3)
    return stored.view("<i4")[..., 0]


# ---- weights ----------------------------------------------------------------------------------

@dataclass(frozen=True)
class Weight:
    """A matrix's exact values, and whether its activation is quantised (FP8) or not (BF16)."""
    values: np.ndarray  # float64 [rows, cols]
    is_fp8: bool


def scale_values(scale):
    """float64 values of a scale tensor in any of its stored forms; FP32 ones stay exact."""
    if scale.dtype in ("F8_E8M0", "U8"):
        return UE8M0_VALUES[scale.bits()]
    if scale.dtype == "F32":
        return scale.bits().astype(np.float64)
    raise ValueError(f"scales of dtype {scale.dtype} are not in use")


def make_weight(weight, scale, block):
    if weight.dtype == "BF16":
        return Weight(bf16_decode(weight.bits()).astype(np.float64), False)
    if weight.dtype != "F8_E4M3" or scale is None:
        raise ValueError(f"a weight of dtype {weight.dtype} needs F8_E4M3 and a scale")
    rows, cols = weight.shape
    per_block = scale_values(scale)
    if per_block.shape != (-(-rows // block), -(-cols // block)):
        raise ValueError(f"scale shape {per_block.shape} does not fit weight {weight.shape}")
    per_value = per_block.repeat(block, axis=0)[:rows].repeat(block, axis=1)[:, :cols]
    return Weight(e4m3_decode(weight.bits()) * per_value, True)


# ---- the layer --------------------------------------------------------------------------------

def wo_a_input(x, is_fp8, block):
    """The float64 values that WO-A multiplies, from FP32 rotated x [G, T, D]."""
    if not is_fp8:
        return bf16_round(x).astype(np.float64)
    return dequantize(*quantize(x, block))


def project_groups(x, wo_a):
    """z float64 [T, G*r], column group*r + i, from x [G, T, D] and WO-A [G*r, D]."""
    groups, tokens, depth = x.shape
    per_group = np.einsum("gtd,grd->tgr", x, wo_a.reshape(groups, -1, depth), optimize=True)
    return per_group.reshape(tokens, -1)


def wo_b_input(z, is_fp8, block):
    """The float64 values that WO-B multiplies, from z [T, G*r]: BF16, then quantised for FP8."""
    z = bf16_round(z)
    if not is_fp8:
        return z.astype(np.float64)
    return dequantize(*quantize(z, block))


def rank_groups(groups, ranks):
    """[begin, end) groups of every rank: as even as it goes, larger shares first."""
    share, larger = divmod(groups, ranks)
    ends = np.cumsum([share + (rank < larger) for rank in range(ranks)])
    return [(int(end) - share - (rank < larger), int(end)) for rank, end in enumerate(ends)]


@dataclass(frozen=True)
class LayerResult:
    """What one layer makes of an input, before any choice of the number of ranks."""
    z: np.ndarray          # float64 [T, G*r], exact dot products
    z_used: np.ndarray     # float64 [T, G*r], what WO-B multiplies
    y: np.ndarray          # float64 [T, N], no rounding after z_used
    wo_b: np.ndarray       # float64 [N, G*r]
    groups: int
    finite: np.ndarray     # bool [T]; the other tokens' y is NaN

    def partials(self, ranks):
        """FP32 values [ranks, T, N] of the BF16 partial sums."""
        r = self.z.shape[1] // self.groups
        return np.stack([bf16_round(self.z_used[:, b * r:e * r] @ self.wo_b[:, b * r:e * r].T)
                         for b, e in rank_groups(self.groups, ranks)])

    def reduced(self, ranks):
        """BF16 partials summed in FP32 in rank order and rounded once; as FP32 [T, N]."""
        partials = self.partials(ranks)
        total = partials[0]
        for partial in partials[1:]:
            total = total + partial
        total = bf16_round(total)
        total[~self.finite] = np.nan
        return total


def evaluate_layer(attn_out, positions, rope, rope_dim, groups, block, wo_a, wo_b):
    """attn_out FP32 [T, H, head_dim] through one layer.  A token that is not finite gets NaN."""
    rotated = inverse_rope(attn_out, *cos_sin_rows(rope, rope_dim, positions))
    finite = np.isfinite(rotated).all(axis=(1, 2))
    rotated[~finite] = 0
    x = wo_a_input(group_major(rotated, groups), wo_a.is_fp8, block)
    z = project_groups(x, wo_a.values)
    z_used = wo_b_input(z, wo_b.is_fp8, block)
    y = z_used @ wo_b.values.T
    y[~finite] = np.nan
    return LayerResult(z, z_used, y, wo_b.values, groups, finite)


def unquantized_layer(attn_out, positions, rope, rope_dim, groups, wo_a, wo_b):
    """The formula alone: no rounding of any activation.  float64 [T, N]."""
    cos, sin = cos_sin_rows(rope, rope_dim, positions)
    rotated = inverse_rope(attn_out.astype(np.float64), cos, sin)
    return project_groups(group_major(rotated, groups), wo_a.values) @ wo_b.values.T


# ---- checkpoints ------------------------------------------------------------------------------

LAYER_NAMES = (("layers.{}.attn.wo_a", "layers.{}.attn.wo_b"),
               ("model.layers.{}.self_attn.o_a_proj", "model.layers.{}.self_attn.o_b_proj"),
               ("model.layers.{}.attn.wo_a", "model.layers.{}.attn.wo_b"))
DRAFT_NAMES = (("mtp.{}.attn.wo_a", "mtp.{}.attn.wo_b"),)
SCALE_SUFFIXES = (".scale", ".weight_scale_inv", ".weight_scale")


def read_all_tensors(directory):
    """Every tensor of every safetensors file of a folder."""
    tensors = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        tensors.update(read_safetensors(path))
    return tensors


def only_match(tensors, names):
    """The one tensor of these names, or None; two matches are an error."""
    found = [name for name in names if name in tensors]
    if len(found) > 1:
        raise ValueError(f"two tensors for one: {found}")
    return tensors[found[0]] if found else None


def read_ropes(config):
    """(plain, compressed) from the flat fields with rope_scaling, or the nested rope_parameters."""
    nested = config.get("rope_parameters") or {}
    if "main" in nested:
        plain_theta, compressed = nested["main"]["rope_theta"], nested["compress"]
        compressed_theta = compressed["rope_theta"]
    else:
        plain_theta, compressed = config["rope_theta"], config["rope_scaling"]
        compressed_theta = config["compress_rope_theta"]
    return Rope(plain_theta), Rope(compressed_theta, compressed["factor"], compressed["beta_fast"],
                                   compressed["beta_slow"],
                                   compressed["original_max_position_embeddings"])


class Checkpoint:
    """A folder's config and tensors, with the layers' weights by the label of their results."""

    def __init__(self, directory):
        root = json.loads((Path(directory) / "config.json").read_text())
        config = root.get("text_config", root)
        quantization = root.get("quantization_config") or config["quantization_config"]
        self.block = quantization["weight_block_size"][0]
        self.groups = config["o_groups"]
        self.rope_dim = config["qk_rope_head_dim"]
        self.plain, self.compressed = read_ropes(config)
        self.tensors = read_all_tensors(directory)
        self._layers = config["num_hidden_layers"]
        self._ratios = config["compress_ratios"]
        self._first_compressed_ratio = 1 if root["model_type"] == "deepseek_v41" else 2

    def labels(self):
        """("layers.0", rope, name patterns, number) of every layer, draft layers last."""
        rows = []
        for layer in range(self._layers):
            compressed = self._ratios[layer] >= self._first_compressed_ratio
            rope = self.compressed if compressed else self.plain
            rows.append((f"layers.{layer}", rope, LAYER_NAMES, layer))
        draft = 0
        while any(f"{a.format(draft)}.weight" in self.tensors for a, _ in DRAFT_NAMES):
            rows.append((f"mtp.{draft}", self.plain, DRAFT_NAMES, draft))
            draft += 1
        return rows

    def weight(self, patterns, number, which):
        """WO-A (which = 0) or WO-B (1) of a layer."""
        bases = [pattern[which].format(number) for pattern in patterns]
        weight = only_match(self.tensors, [base + ".weight" for base in bases])
        scale = only_match(self.tensors, [base + s for base in bases for s in SCALE_SUFFIXES])
        return make_weight(weight, scale, self.block)

    def layers(self):
        """(label, rope, WO-A, WO-B) of every layer, one at a time."""
        for label, rope, patterns, number in self.labels():
            yield label, rope, self.weight(patterns, number, 0), self.weight(patterns, number, 1)

    def evaluate(self, attn_out, positions):
        """Label to LayerResult for every layer."""
        return {label: evaluate_layer(attn_out, positions, rope, self.rope_dim, self.groups,
                                      self.block, wo_a, wo_b)
                for label, rope, wo_a, wo_b in self.layers()}


def read_input(path):
    """attn_out FP32 [T, H, head_dim] and positions int64 [T] of an input file."""
    tensors = read_safetensors(path)
    return bf16_decode(tensors["attn_out"].bits()), tensors["positions"].bits()


def relative_error(value, reference):
    """Frobenius norm of the difference over that of the reference."""
    return float(np.linalg.norm(value - reference) / np.linalg.norm(reference))
