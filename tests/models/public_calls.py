# tests/models/public_calls.py: public_calls.py ROOT HEADER...: from the public headers, a C file that calls
# every public function with empty arguments: NULL for pointers, zeros for the rest, and again with ones for numbers.
import os
import re
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(sys.argv[1], 'scripts'))
from places import functions, WITHOUT

# Functions that would end the process or wait for other ranks.
SKIP = {"kn_abort_on_error", "kn_place_leave"}


def split(args):
    out, depth = [""], 0
    for c in args:
        depth += (c == "(") - (c == ")")
        if c == "," and depth == 0:
            out.append("")
        else:
            out[-1] += c
    return [a.strip() for a in out]


def value(arg, number):
    if arg == "...":
        return None
    if "*" in arg or "(" in arg or "[" in arg:
        return "NULL"
    kind = re.sub(r"\b\w+$", "", arg).strip() if " " in arg else arg
    kind = kind.replace("const ", "").strip()
    if kind in ("int", "int64_t", "size_t", "uint64_t", "uint32_t", "double", "float"):
        return number
    if kind == "bool":
        return "false"
    return f"({kind}){{ 0 }}"


def call(name, args, number):
    if name == "kn_fail":
        return 'kn_fail("kn_fail: said by hand")'
    given = [] if args == "void" else [value(a, number) for a in split(args)]
    return f"{name}({', '.join(a for a in given if a)})"


def main(root, headers):
    calls, table = [], []
    for header, name, arg in functions(root, headers):
        if name in SKIP:
            continue
        for number in "0", "1":
            at = len(table)
            calls.append(f"static int call_{at}(void) {{ (void)({call(name, arg, number)}); return __LINE__; }}")
            placed = "false" if name in WITHOUT else "true"
            table.append(f'{{ "{name}", call_{at}, {placed} }},')
    print("\n".join(calls + ["static const public_call calls[] = {"] + table + ["};"]))


main(sys.argv[1], sys.argv[2:])
