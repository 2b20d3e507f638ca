"""Every kernel of ``cuda/``: its source, specialisations, parameters, and the compile gate's limits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from executor_svc.kernels.signature import Parameter, parse_parameter

HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_GROUP = 16  # query heads of one KV head; also the packed rows of a decode or float32 item
EXPERT_TILES = (16, 64, 128)  # rows of a tile of one expert
HALF_TYPES = ("bf16", "f16")
TYPES = (*HALF_TYPES, "f32")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One specialisation, named as in C++: ``paged_decode<bf16, 128>``."""

    name: str
    source: str  # file in cuda/
    parameters: tuple[Parameter, ...]
    threads: int  # of a block
    max_smem: int  # bytes of dynamic shared memory
    max_registers: int  # of a thread, on every architecture of the gate
    opcodes: tuple[str, ...]  # SASS instructions that must be there


@dataclass(frozen=True, slots=True)
class _Template:
    source: str
    parameters: str
    threads: int
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)  # template parameter -> its values
    smem: Callable[[int, int], int] = lambda size, element_bytes: 0  # (head size or tile rows, ...) -> bytes
    registers: Callable[[int], int] = lambda size: 64
    opcodes: tuple[str, ...] = ()


def _tile_bytes(rows: int, head_dim: int, element_bytes: int, pad: int = 16) -> int:
    """A tile in shared memory: ``pad`` bytes after each run of rows that fills whole 128-byte lines (paged_kv.cuh)."""
    line_rows = 128 // math.gcd(head_dim * element_bytes, 128)
    return rows * head_dim * element_bytes + rows // line_rows * pad


def decode_smem(head_dim: int, element_bytes: int) -> int:
    """paged_decode: a tile of queries and four pipelines, or the merge of the four warps in the same memory."""
    stages = 2 if head_dim > 128 else 3
    pipelines = _tile_bytes(16 + 4 * stages * 2 * 16, head_dim, element_bytes)
    merge = _tile_bytes(4 * 16, head_dim, 4, 32) + 4 * 16 * 2 * 4
    return max(pipelines, merge)


def prefill_rows(head_dim: int) -> int:
    """Packed rows of one paged_prefill block."""
    return 64 if head_dim > 128 else 128


def prefill_smem(head_dim: int, element_bytes: int) -> int:
    """paged_prefill: the queries, a tile of keys, a tile of values."""
    tile = 32 if head_dim in (96, 128) else 64
    return _tile_bytes(prefill_rows(head_dim) + 2 * tile, head_dim, element_bytes)


def f32_smem(head_dim: int, element_bytes: int) -> int:
    """paged_attention_f32: queries, weights, two stages of keys and values."""
    return _tile_bytes(16 + 2 * 2 * 32, head_dim, element_bytes) + 16 * 32 * element_bytes


def expert_columns(tile_rows: int) -> int:
    """expert_gate_up and expert_down: rows of a matrix that a block multiplies; ``tile_rows`` 0: the float32 ones."""
    return 64 if tile_rows in (0, 16) else 128


def expert_smem(tile_rows: int, element_bytes: int) -> int:
    """expert_gate_up and expert_down: stages of the tile's rows and the matrix's, a part of the depth each."""
    depth, stages = {0: (32, 2), 16: (128, 4)}.get(tile_rows, (64, 3))
    return stages * ((tile_rows or 16) + expert_columns(tile_rows)) * depth * element_bytes


_ATTENTION_VALUES = (
    "const i32* block_tables, const i32* items, i32 table_stride, i32 block_size, i32 group, i32 q_stride, i32 window,"
    " f32 scale, f32 softcap"
)
_EXPERT_ROWS = tuple(str(rows) for rows in EXPERT_TILES)
_HEADS = tuple(str(head_dim) for head_dim in HEAD_DIMS)

_TEMPLATES = {
    "paged_decode": _Template(
        "paged_decode.cu",
        "T* out, f32* part_out, f32* part_lse, const T* q, const T* key_cache, const T* value_cache, "
        + _ATTENTION_VALUES,
        128,
        {"T": HALF_TYPES, "D": _HEADS},
        decode_smem,
        lambda head_dim: {64: 96, 80: 128, 96: 144, 128: 144, 256: 255}[head_dim],
        ("HMMA", "LDGSTS", "LDSM"),
    ),
    "paged_prefill": _Template(
        "paged_prefill.cu",
        "T* out, const T* q, const T* key_cache, const T* value_cache, " + _ATTENTION_VALUES,
        128,
        {"T": HALF_TYPES, "D": _HEADS},
        prefill_smem,
        lambda head_dim: 255,
        ("HMMA", "LDGSTS", "LDSM"),
    ),
    "paged_attention_f32": _Template(
        "paged_attention_f32.cu",
        "f32* out, f32* part_out, f32* part_lse, const f32* q, const f32* key_cache, const f32* value_cache, "
        + _ATTENTION_VALUES,
        128,
        {"D": _HEADS},
        f32_smem,
        lambda head_dim: 128,
        ("FFMA", "LDGSTS", "LDS.128"),
    ),
    "paged_merge": _Template(
        "paged_merge.cu",
        "T* out, const f32* part_out, const f32* part_lse, const i32* merges, i32 group, i32 head_dim",
        128,
        {"T": TYPES},
        registers=lambda head_dim: 128,
    ),
    "rope_kv_write": _Template(
        "rope_kv_write.cu",
        "T* qkv, T* key_cache, T* value_cache, const f32* rope, const i64* positions, const i64* kv_slots,"
        " const T*? q_norm, const T*? k_norm, i32 q_heads, i32 kv_heads, i32 head_dim, i32 rotary_dim, i32 block_size,"
        " f32 eps, f32 weight_offset",
        128,
        {"T": TYPES},
    ),
    "add_rms_norm": _Template(
        "rms_norm.cu",
        "T* out, T* residual, const T*? delta, const T* weight, f32 eps, f32 weight_offset, i32 hidden",
        256,
        {"T": TYPES},
        opcodes=("LDG.E.128", "STG.E.128"),
    ),
    "silu_mul": _Template(
        "silu_mul.cu", "T* out, const T* gate_up, i32 width", 256, {"T": TYPES}, opcodes=("LDG.E.128", "STG.E.128")
    ),
    "gather_ids": _Template(
        "gather_ids.cu", "i64* input_ids, const i64* last_tokens, const i32* token_slots, i32 tokens", 128
    ),
    "router_logits": _Template(
        "router_logits.cu",
        "f32* logits, const T* x, const f32* router, i32 tokens, i32 experts, i32 hidden",
        128,
        {"T": TYPES},
        registers=lambda size: 128,
        opcodes=("FFMA", "LDG.E.128"),
    ),
    "choose_experts": _Template(
        "route_experts.cu",
        "i32* ids, f32* weights, const f32* logits, const i64*? kv_slots, i32 tokens, i32 experts, i32 per_token,"
        " i32 normalize",
        256,
    ),
    "sort_pairs": _Template(
        "route_experts.cu",
        "i32* tiles, i32* pairs, i32* ids, f32* weights, const f32*? logits, const i64*? kv_slots, i32 tokens,"
        " i32 experts, i32 per_token, i32 normalize, i32 tile_rows, i32 max_tiles",
        1024,
        opcodes=("ATOMS", "STG.E.128"),
    ),
    "expert_gate_up": _Template(
        "expert_products.cu",
        "T* hidden, const T* x, const T* gate_up, const i32* tiles, const i32* pairs, i32 per_token, i32 width,"
        " i32 depth",
        128,
        {"T": HALF_TYPES, "M": _EXPERT_ROWS},
        expert_smem,
        lambda rows: {16: 128, 64: 168, 128: 255}[rows],
        ("HMMA", "LDGSTS.E.BYPASS.128", "LDSM"),
    ),
    "expert_down": _Template(
        "expert_products.cu",
        "T* parts, const T* hidden, const T* down, const i32* tiles, const i32* pairs, i32 width, i32 depth",
        128,
        {"T": HALF_TYPES, "M": _EXPERT_ROWS},
        expert_smem,
        lambda rows: {16: 128, 64: 168, 128: 255}[rows],
        ("HMMA", "LDGSTS.E.BYPASS.128", "LDSM"),
    ),
    "expert_gate_up_f32": _Template(
        "expert_products_f32.cu",
        "f32* hidden, const f32* x, const f32* gate_up, const i32* tiles, const i32* pairs, i32 per_token, i32 width,"
        " i32 depth",
        128,
        smem=expert_smem,
        registers=lambda size: 112,
        opcodes=("FFMA", "LDGSTS", "LDS.128"),
    ),
    "expert_down_f32": _Template(
        "expert_products_f32.cu",
        "f32* parts, const f32* hidden, const f32* down, const i32* tiles, const i32* pairs, i32 width, i32 depth",
        128,
        smem=expert_smem,
        registers=lambda size: 112,
        opcodes=("FFMA", "LDGSTS", "LDS.128"),
    ),
    "combine_experts": _Template(
        "combine_experts.cu",
        "T* out, const T* parts, const f32* weights, const i32* ids, i32 per_token, i32 width",
        256,
        {"T": TYPES},
        opcodes=("LDG.E.128", "STG.E.128"),
    ),
    "adjust_logits": _Template(
        "adjust_logits.cu",
        "f32* adjusted, i64* argmax, f32* top, i32* status, const f32* logits, const i32* bias_starts,"
        " const i32* bias_ids, const f32* bias_values, const i32* history_starts, const i32* history_ids,"
        " const i32* history_counts, const f32* penalties, const i32*? grammar_mask, const i32*? grammar_rows,"
        " i32 vocab",
        512,
    ),
    "sample_rows": _Template(
        "sample_rows.cu",
        "i64* tokens, i64* last_tokens, const f32* adjusted, const i64* argmax, const f32* top, const i32* status,"
        " const i32* slots, const f64* factor, const i64* least, const i32* top_k, const f64* top_p, const u64* bits,"
        " const f64* exp2_table, i32 vocab",
        512,
    ),
    "logprobs": _Template(
        "logprobs.cu",
        "f32* chosen, i32* ranks, i64* top_ids, f32* top_logprobs, const f32* logits, const i64* tokens,"
        " const i32* num_top, i32 max_top, i32 vocab",
        512,
    ),
}


def _combinations(values: dict[str, tuple[str, ...]]) -> list[dict[str, str]]:
    chosen: list[dict[str, str]] = [{}]
    for name, options in values.items():
        chosen = [{**before, name: option} for before in chosen for option in options]
    return chosen


def all_kernels() -> list[str]:
    """The name of every specialisation."""
    names = []
    for base, template in _TEMPLATES.items():
        for chosen in _combinations(template.values):
            names.append(f"{base}<{', '.join(chosen.values())}>" if chosen else base)
    return names


@cache
def find_kernel(name: str) -> Kernel:
    """``KeyError`` for a name or a specialisation that the table does not have."""
    match = re.fullmatch(r"(\w+)(?:<(.+)>)?", name)
    template = _TEMPLATES.get(match[1]) if match else None
    if match is None or template is None:
        raise KeyError(f"no kernel {name!r}")
    given = match[2].split(", ") if match[2] else []
    if len(given) != len(template.values) or any(
        value not in options for value, options in zip(given, template.values.values(), strict=False)
    ):
        raise KeyError(f"kernel {name!r}: the specialisations are {template.values}")
    chosen = dict(zip(template.values, given, strict=True))
    element = chosen.get("T", "f32")
    size = int(chosen.get("D") or chosen.get("M") or 0)
    parameters = tuple(
        parse_parameter(text.strip().rpartition(" ")[0], {"T": element}) for text in template.parameters.split(",")
    )
    return Kernel(
        name,
        template.source,
        parameters,
        template.threads,
        template.smem(size, 4 if element == "f32" else 2),
        template.registers(size),
        template.opcodes,
    )
