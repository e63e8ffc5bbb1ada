#!/usr/bin/env python3
"""How the hot kernels in a build access memory: tests/cli/cuda_accesses.py BUILD.

A kernel that waits for memory reaches its pace only if its threads move 16 bytes at a time. Whether they do is
decided by the compiler: this reads the PTX that it made (BUILD/kernels/cuda/*.cu.ptx), in which an access of 16
bytes is one instruction (ld.global.v4.f32), and which ptxas translates one to one. ptxas itself says which kernels
have local memory (BUILD/kernels/cuda/*.cu.res). A TAP line a check."""
import re
import sys
from collections import Counter, namedtuple
from pathlib import Path

from cuda_resources import check, measured, short

# Kernels named so, with arguments of the template that match `of` from their beginning on:
# loads, stores: accesses of the device's memory by 16 bytes, at least; shared: loads of shared memory by 16, at least
# other: narrower accesses of the device's memory, at most; None: those of tails and of rare cases aren't counted
# stack: bytes of local memory, at most
Hot = namedtuple("Hot", "kernel of loads stores other shared stack", defaults=(None, 0, 0))
FLOATS = r"(float|kn_bf16|kn_f16)"
HALVES = r"(kn_bf16|kn_f16)"
HOT = [
    # Elementwise; besides, an element that is broadcast along the last dim is loaded once an array.
    # sin, cos, tan of large numbers, and the reflection of digamma, read the digits of 2 / pi.
    Hot("each_kernel", r"2, (4|8), unary_op<", 1, 1, 5, stack=32),
    Hot("each_kernel", r"3, (4|8), unary_grad_op<", 2, 1, 8, stack=32),
    Hot("each_kernel", r"3, (4|8), binary_op<", 2, 1, 3),  # results may be bools
    Hot("each_kernel", r"4, (4|8), where_op<", 2, 1, 4),
    Hot("each_kernel", r"2, (2|4|8|16), move_op<", 1, 1, 1),
    Hot("each_kernel", rf"2, 8, convert_op<{HALVES}, float", 2, 1, 1),
    Hot("each_kernel", rf"2, 8, convert_op<float, {HALVES}", 1, 2, 1),
    Hot("each_kernel", r"1, (2|4|8|16), fill_op<", 0, 1, 0),
    Hot("each_kernel", r"2, (4|8), dropout_op<", 1, 1, 2),  # the seed
    Hot("each_kernel", r"3, (2|4|8), rope_op<", 4, 2, 2),
    Hot("select_kernel", r"unsigned (char, 16|short, 8|int, 4|long, 2)", 1, 1),
    Hot("add_kernel", r"float, float, 4", 9, 1),
    Hot("add_kernel", rf"float, {HALVES}, 4", 1, 1),  # 8 bytes of src
    Hot("add_kernel", rf"{HALVES}, {HALVES}, 8", 9, 1),
    # Sums of up to seven arrays and what was there; of mixed dtypes the wider one moves by 16 bytes.
    Hot("sum_kernel", r"4, sum_op<float, float,", 8, 1),
    Hot("sum_kernel", rf"4, sum_op<float, {HALVES},", 1, 1),
    Hot("sum_kernel", rf"4, sum_op<{HALVES}, float,", 7, 0),
    Hot("sum_kernel", rf"8, sum_op<{HALVES}, {HALVES},", 8, 1),
    Hot("sum_kernel", r"2, sum_op<double, double,", 8, 1),
    Hot("sum_kernel", r"2, sum_op<double, (float|kn)", 1, 1),
    Hot("sum_kernel", rf"2, sum_op<{FLOATS}, double,", 7, 0),
    # Optimizers: master, moments and a gradient of their dtype; the rest are tails and other dtypes.
    Hot("pieces_kernel", r"float, adamw_step", 5, 3),
    Hot("pieces_kernel", r"float, (lion|sgd)_step", 4, 2),
    Hot("pieces_kernel", r"double, adamw_step", 4, 3),
    Hot("pieces_kernel", r"double, (lion|sgd)_step", 3, 2),
    Hot("pieces_kernel", rf"{HALVES}, adamw_step", 4, 3),
    Hot("pieces_kernel", rf"{HALVES}, (lion|sgd)_step", 3, 2),
    Hot("absmax_kernel", r"", 4, 0),
    Hot("fixed_sum_kernel", r"", 4, 0),
    # Rows. Four loads of a pass are on their way at once.
    Hot("softmax_kernel", rf"{FLOATS}, true", 6, 1, 0),
    Hot("softmax_grad_kernel", rf"{FLOATS}, true", 6, 1, 0),
    Hot("cross_entropy_kernel", rf"{FLOATS}, true", 8, 4, stack=16),  # spilled between the passes
    Hot("cross_entropy_grad_kernel", rf"{FLOATS}, true", 4, 4),
    Hot("norm_kernel", rf"{FLOATS}, true", 8, 1, 2),  # a row's mean and rstd
    Hot("norm_sum_kernel", rf"{FLOATS}, true", 8, 3, 2),
    Hot("norm_grad_kernel", rf"{FLOATS}, true", 11, 1, 2),
    Hot("norm_grad_fused_kernel", rf"{FLOATS}, true", 11, 1, 18),  # a block's sums for dw and db
    Hot("reduce_rows_kernel", rf"(sum_floats|greatest<float>), {FLOATS}", 2, 0, stack=16),
    Hot("reduce_columns_kernel", rf"(sum_floats|greatest<float>), {FLOATS}", 2, 0, stack=16),
    # Images, channels last.
    Hot("each_kernel", r"6, (2|4|8), batch_norm_op<", 2, 1),
    Hot("each_kernel", r"4, (2|4|8), batch_norm_mask_op<", 2, 1),
    Hot("each_kernel", r"7, (2|4|8), batch_norm_grad_op<", 3, 1),
    Hot("channel_kernel", r"(float, 4|kn_bf16, 8|kn_f16, 8), 2", 4, 0),
    Hot("pool_kernel", r"(float, 4|kn_bf16, 8|kn_f16, 8)", 2, 2, 0),
    Hot("pool_kernel", r"double, 2", 2, 1),
    Hot("pool_grad_kernel", r"(float, 4|kn_bf16, 8|kn_f16, 8)", 2, 1, 0),
    Hot("pool_grad_kernel", r"double, 2", 1, 1),
    # Draws: a block of Philox is four elements, which are 8 bytes of bf16.
    Hot("random_kernel", r"(float|double)", 0, 1),
    # Products on ordinary cores: by 16 bytes from shared memory, into which any strides are loaded.
    Hot("attention_kernel", r"float, 16", 0, 0, shared=4),
    Hot("attention_keys_kernel", r"float, 16", 0, 0, shared=4),
    Hot("attention_queries_kernel", r"float, 16", 0, 0, shared=4),
]
ACCESS = re.compile(r"^\s*(?:@!?%p\d+\s+)?(ld|st)((?:\.\w+(?:::\w+)*)+)\s", re.M)


def accesses(body):
    """{(ld or st, space, bytes): how many} of a kernel's PTX; an address that may be of any space is "any"."""
    found = Counter()
    for match in ACCESS.finditer(body):
        words = match.group(2).split(".")[1:]
        space = next((w.split("::")[0] for w in words if w.split("::")[0] in ("global", "shared", "local", "param",
                                                                           "const")), "any")
        bits = next(int(w[1:]) for w in words if re.fullmatch(r"[busf]\d+", w))
        many = next((int(w[1:]) for w in words if re.fullmatch(r"v\d", w)), 1)
        found[(match.group(1), space, bits // 8 * many)] += 1
    return found


def kernels_in(path):
    """(name, arguments of the template, accesses) of each kernel in a file of PTX."""
    parts = re.split(r"^(?:\.visible |\.weak )?\.entry (\w+)\(", path.read_text(), flags=re.M)
    for (name, arguments), body in zip(short(parts[1::2]), parts[2::2]):
        yield name, arguments, accesses(body.split("\n}\n")[0])


def lost(row, found, stack):
    """What a kernel lacks of its row's."""
    wide = {op: found[(op, "global", 16)] for op in ("ld", "st")}
    other = sum(n for (op, space, size), n in found.items() if space == "global" and size < 16)
    shared = found[("ld", "shared", 16)]
    anywhere = sum(n for (op, space, size), n in found.items() if space == "any")
    if wide["ld"] < row.loads:
        yield f"{wide['ld']} loads of 16 bytes, {row.loads} expected"
    if wide["st"] < row.stores:
        yield f"{wide['st']} stores of 16 bytes, {row.stores} expected"
    if shared < row.shared:
        yield f"{shared} loads of 16 bytes from shared memory, {row.shared} expected"
    if row.other is not None and other > row.other:
        yield f"{other} narrower accesses, {row.other} expected"
    if anywhere and (row.loads or row.stores):
        yield f"{anywhere} accesses whose memory the compiler doesn't know (kn_global)"
    if stack > row.stack:
        yield f"{stack} bytes of local memory, {row.stack} expected"


def main():
    files = sorted(Path(sys.argv[1]).glob("**/*.cu.ptx"))
    if not files:
        print("no kernels of CUDA in this build: no nvcc")
        sys.exit(77)
    used, narrow, without, count = set(), [], [], 0
    for path in files:
        stacks = Counter()
        resources = measured(path.with_suffix(".res"))
        for (name, arguments), e in zip(short([e["symbol"] for e in resources]), resources):
            stacks[(name, arguments)] = max(stacks[(name, arguments)], e["stack"])
        for name, arguments, found in kernels_in(path):
            where = f"{name}<{arguments}> ({path.name[:-4]})"
            rows = [r for r in HOT if r.kernel == name and re.match(r.of, arguments)]
            used.update(rows)
            for row in rows:
                count += 1
                narrow += [f"{where}: {what}" for what in lost(row, found, stacks[(name, arguments)])]
            if not rows and found[("st", "global", 16)]:
                without.append(f"{where}: stores 16 bytes at a time, and has no row in HOT of {Path(__file__).name}")
    without += [f"{r.kernel}<{r.of}: no kernel fits this row" for r in HOT if r not in used]
    bad = check(5, f"{count} hot kernels access memory by 16 bytes", narrow)
    bad |= check(6, f"each kernel that does has a row among {len(HOT)}, each row a kernel", without)
    sys.exit(bad)


if __name__ == "__main__":
    main()
