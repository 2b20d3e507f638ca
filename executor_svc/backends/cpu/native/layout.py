"""The tables through which Python hands addresses and sizes to the compiled forward: one int64 array each.

Indices are plain integers so that compiled code can use them as constants.
"""

from __future__ import annotations

# Model table: what does not change between steps.
NUM_LAYERS, HIDDEN, Q_SIZE, KV_SIZE, INTERMEDIATE, HEAD_DIM, KV_HEADS, GROUP, VOCAB_PANELS, BLOCK_SIZE = range(10)
FINAL_NORM, HEAD, LAYERS, FLOATS, ROTARY_DIM = range(10, 15)
# Experts: counts, and the bytes from one expert's packed matrix to the next one's.
NUM_EXPERTS, EXPERTS_PER_TOKEN, EXPERT_INTERMEDIATE, NORMALIZE_EXPERTS = range(15, 19)
EXPERT_GATE_UP_BYTES, EXPERT_DOWN_BYTES = range(19, 21)
MODEL_SIZE = 21

# Layer table: LAYER_SIZE entries for each layer: addresses, 0 for what the layer has not, and the window in tokens.
INPUT_NORM, QKV, OUTPUT, POST_NORM, GATE_UP, DOWN, KEYS, VALUES, ROPE, WINDOW = range(10)
QKV_BIAS, OUTPUT_BIAS, GATE_UP_BIAS, DOWN_BIAS, Q_NORM, K_NORM, ATTENTION_OUT_NORM, MLP_OUT_NORM = range(10, 18)
ROUTER = 18  # with a router, GATE_UP and DOWN hold every expert's matrices, one expert after another
LAYER_SIZE = 19

# Float table: float32. SOFTMAX_FACTOR: log2(e) times what multiplies the scores, or times 1 where they are capped.
# GATE_LINEAR, GATE_CUBIC: the activation (``gate_mul_row``).
EPSILON, INVERSE_HIDDEN, INVERSE_HEAD, SOFTMAX_FACTOR, BEFORE_SCORE_CAP, SCORE_CAP = range(6)
BEFORE_LOGIT_CAP, LOGIT_CAP, GATE_LINEAR, GATE_CUBIC = range(6, 10)
FLOATS_SIZE = 10

# Step table: sizes, then addresses.
TOKENS, WANTED, NUM_ITEMS, MAX_BLOCKS = range(4)
X, NORMED, DELTA, QKV_OUT, ATTENDED, GATE_UP_OUT, ACTIVATED, LOGITS = range(4, 12)
POSITIONS, KV_SLOTS, WANTED_INDICES, BLOCK_TABLES, ITEMS, COUNTERS, SCRATCH, SCRATCH_BYTES, MODEL = range(12, 21)
X_WANTED, ATTENDED_WANTED, QUANTIZED = range(21, 24)  # the last: [rows, 3 of the widest input] bytes, int8 only
# Experts: [rows, experts per token] each; then [experts], the blocks' table, and rows in the experts' order.
EXPERT_IDS, EXPERT_WEIGHTS, PLACES, SOURCES, EXPERT_COUNTS, EXPERT_BLOCKS, EXPERT_IN, EXPERT_OUT = range(24, 32)
STEP_SIZE = 32

# The blocks' table has BLOCK_ENTRY entries for each block: expert, first row, rows (0 to ROW_BLOCK).
BLOCK_ENTRY = 3
ROW_BLOCK = 96  # rows of one product item: their inputs stay in the second-level cache

# One attention item: ITEM_SIZE entries.
ITEM_ROW, ITEM_TOKEN, ITEM_COUNT, ITEM_POSITION = range(4)
ITEM_SIZE = 4

# A phase's counters: the next ticket, and on another cache line the number of finished items and the time of the end.
# The address of sched_yield is there too: machine code loaded from a file should refer to nothing outside itself.
# A phase may have a prelude, with the same counters after its own.
COUNTER_BYTES, PRELUDE_OFFSET, DONE_OFFSET, CYCLES_OFFSET, YIELD_OFFSET = 256, 128, 64, 72, 80
ATTENTION_PHASES = ("norm", "linear", "rotary", "attention", "linear", "norm")  # of a layer, in order
MLP_PHASES, EXPERT_PHASES = ("linear",) * 2, ("route", "route", "route", "linear", "linear", "route")
LAST_PHASES = ("norm", "head", "softcap")  # after the last layer, in which "gather" follows "attention"
QUERY_ROWS = 48  # queries x heads of one attention item
