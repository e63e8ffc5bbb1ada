#!/usr/bin/env python3
"""What the kernels in a build take of a GPU: tests/cli/cuda_resources.py BUILD [--table].

Reads what ptxas said about each kernel (BUILD/kernels/cuda/*.cu.res) and the bound of its blocks in the
sources (KN_KERNEL). A TAP line a check. --table: instead a line a kernel, with registers, bytes spilled and
static shared memory on each GPU; registers and shared memory are those that cuobjdump reads from the code
itself ($CUOBJDUMP names it where PATH has none), and must be what ptxas said."""
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "kernels" / "cuda" / "kernels"
REGISTERS = 65536  # of a block, on every GPU that we compile for
SHARED = 48 << 10  # bytes of a block, unless a kernel asks for more
BESIDE = 1024      # of them what kernels with dynamic shared memory may have besides it (ROW_CACHE_BYTES)
# Bytes that a thread may spill, at most.
SPILLS = {
    # bf16: two blocks of rows share a multiprocessor, which hides more than the few values that a row's numbers
    # and one element of a unit take out of the L1 cache
    "cross_entropy_kernel": 88,
    "each_kernel": 16,  # gradients of functions of f16 on sm_120, once each 8 elements
}


def constants(text):
    """Numbers that sources name: enumerators and macros."""
    found = {}
    for name, value in re.findall(r"#define\s+(\w+)\s+(\d+)\b", text):
        found[name] = int(value)
    for body in re.findall(r"enum\s*\{([^}]*)\}", text):
        for name, value in re.findall(r"(\w+)\s*=\s*(\d+)\b", body):
            found[name] = int(value)
    return found


def without_comments(text):
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S)


def kernels_in(path, shared):
    """{name: (threads, has dynamic shared memory)} of one source."""
    text = without_comments(path.read_text())
    known = dict(shared, **constants(text))
    found = {}
    pattern = r"KN_KERNEL(_RESIDENT)?\(\s*(.*)"
    for match in re.finditer(pattern, text):
        if text[:match.start()].rstrip().endswith("#define"):
            continue
        rest = text[match.start(2):]
        argument, depth = "", 0
        for c in rest:  # the first argument, up to its comma
            if c == "," and depth == 0:
                break
            depth += {"(": 1, ")": -1}.get(c, 0)
            argument += c
        after = rest[len(argument) + 1:]
        name = re.search(r"\b(\w+_kernel)\s*,", after).group(1)
        # Templates' own numbers: a square of threads, at most 16 on a side (attention.cuh).
        threads = int(eval(argument.replace("G *G", "256"), {"__builtins__": {}}, known))
        body = re.search(r"\n\{\n(.*?)\n\}", after, flags=re.S)
        found[name] = (threads, bool(body and "KN_DYNAMIC" in body.group(1)))
    return found


def short(symbols):
    """Kernels' plain names and the arguments of their templates, of their mangled names."""
    said = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True)
    names = []
    for name in said.stdout.splitlines():
        name = re.sub(r"\(anonymous namespace\)::|\b_?GLOBAL__N__\w+::", "", re.sub(r"^void ", "", name))
        plain = re.match(r"\w+", name).group(0)
        arguments = re.match(r"<(.*?)>?\(", name[len(plain):])
        names.append((plain, arguments.group(1).strip() if arguments else ""))
    return names


def measured(path):
    """What ptxas said, an entry a kernel and architecture."""
    entries, entry = [], None
    for line in path.read_text().splitlines():
        if match := re.search(r"Compiling entry function '(\S+)' for '(\w+)'", line):
            entry = {"symbol": match.group(1), "arch": match.group(2), "spill": 0, "stack": 0, "smem": 0, "registers": None}
            entries.append(entry)
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            if entry:
                entry["stack"] = int(match.group(1))
                entry["spill"] = max(int(match.group(2)), int(match.group(3)))
        elif match := re.search(r"Used (\d+) registers", line):
            entry["registers"] = int(match.group(1))
            if smem := re.search(r"(\d+) bytes smem", line):
                entry["smem"] = int(smem.group(1))
    return entries


def in_the_code(path):
    """{(symbol, arch): (registers, shared memory)} of an object, by cuobjdump."""
    said = subprocess.run([os.environ.get("CUOBJDUMP", "cuobjdump"), "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found, arch, symbol = {}, "", ""
    for line in said.splitlines():
        if match := re.search(r"^arch = (\w+)", line):
            arch = match.group(1)
        elif match := re.search(r"^ Function (\S+):", line):
            symbol = match.group(1)
        elif match := re.search(r"REG:(\d+) .*SHARED:(\d+)", line):
            found[symbol, arch] = (int(match.group(1)), int(match.group(2)))
    return found


def table(folders):
    rows, archs, spilling = {}, set(), 0
    for path in folders:
        entries, code = measured(path), in_the_code(path.with_suffix(".o"))
        for (name, arguments), e in zip(short([e["symbol"] for e in entries]), entries):
            registers, memory = code[e["symbol"], e["arch"]]
            if registers != e["registers"]:
                sys.exit(f"{name}, {e['arch']}: {registers} registers in the code, {e['registers']} said ptxas")
            archs.add(e["arch"])
            rows.setdefault((path.name[:-7], name, arguments), {})[e["arch"]] = (registers, e["spill"], memory)
            spilling += e["spill"] > 0
    archs = sorted(archs, key=lambda a: int(a[3:]))
    print("registers of a thread / bytes that it spills / bytes of static shared memory of a block")
    print(f"{'file':<18} " + " ".join(f"{a:<13}" for a in archs) + " kernel")
    for (file, name, arguments), row in sorted(rows.items()):
        cells = ("/".join(str(n) for n in row[a]) if a in row else "-" for a in archs)
        print(f"{file:<18} " + " ".join(f"{c:<13}" for c in cells) + f" {name}<{arguments}>".replace("<>", ""))
    print(f"{len(rows)} kernels on {len(archs)} GPUs; {spilling} of {sum(map(len, rows.values()))} spill")


def check(number, what, wrong):
    print(f"{'not ok' if wrong else 'ok'} {number} - {what}")
    for line in wrong:
        print(f"#   {line}")
    return bool(wrong)


def main():
    folders = sorted(Path(sys.argv[1]).glob("**/*.cu.res"))
    if not folders:
        print("no kernels of CUDA in this build: no nvcc")
        sys.exit(77)
    if "--table" in sys.argv:
        table(folders)
        return
    shared = {}
    for header in CUDA.glob("*.cuh"):
        shared.update(constants(without_comments(header.read_text())))
    bounds, bare, registers, memory, spills, count = {}, [], [], [], [], 0
    for source in sorted(CUDA.glob("*.cu")) + sorted(CUDA.glob("*.cuh")):
        bounds.update(kernels_in(source, shared))
        if source.name != "cuda.cuh" and "__global__" in without_comments(source.read_text()):
            bare.append(f"{source.name}: a kernel without KN_KERNEL has no bound")
    for path in folders:
        entries = measured(path)
        for (name, _), e in zip(short([e["symbol"] for e in entries]), entries):
            count += 1
            where = f"{name} ({path.name[:-4]}, {e['arch']})"
            threads, dynamic = bounds.get(name, (None, False))
            if threads is None:
                bare.append(f"{where}: no KN_KERNEL of this name in the sources")
                continue
            whole = -(-threads // 32) * 32  # registers are given to warps
            if e["registers"] is None or e["registers"] * whole > REGISTERS:
                registers.append(f"{where}: {e['registers']} registers x {threads} threads")
            if e["smem"] > (BESIDE if dynamic else SHARED):
                memory.append(f"{where}: {e['smem']} bytes, {'besides dynamic ones' if dynamic else 'static'}")
            if e["spill"] > SPILLS.get(name, 0):
                spills.append(f"{where}: {e['spill']} bytes, {e['registers']} registers")
    bad = check(1, f"each of {count} kernels has a bound ({len(bounds)} in the sources)", bare)
    bad |= check(2, f"registers of the largest block are at most {REGISTERS}", registers)
    bad |= check(3, f"shared memory fits into {SHARED} bytes", memory)
    bad |= check(4, "registers aren't spilled", spills)
    sys.exit(bad)


if __name__ == "__main__":
    main()
