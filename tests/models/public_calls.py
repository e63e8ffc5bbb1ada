# tests/models/public_calls.py: public_calls.py [--missing] ROOT HEADER...: from the public headers, a C file that
# calls every public function with empty arguments: NULL for pointers, zeros for the rest, and again with ones for numbers.
# --missing instead lists the functions that have no place in places.h and are not among those that need none.
import re
import sys

# No place is noted for functions that don't fail, that keep or give back a pointer of the caller's (which may be a
# literal of the call: it would end with the macro's block), or that are the places themselves.
NO_PLACE = """kn_place_enter kn_place_leave kn_ok kn_error kn_clear_error kn_set_error_handler
kn_abort_on_error kn_dtype_size kn_dtype_name kn_dtype_parse kn_dtype_is_float kn_device_name
kn_array_describe kn_describe kn_nearest kn_array_make kn_graph_on_launch kn_graph_host_part
kn_on_grad kn_on_accumulated
kn_on_node kn_on_backward_end kn_module_hook kn_fsdp_set_comm_hook kn_fsdp_set_all_reduce_hook
kn_fsdp_set_gather_hook kn_fsdp_on_event kn_fsdp_event_name kn_options_create kn_options_main
kn_gpt_config_text kn_llama_config_text kn_loader_new_ kn_borrow kn_host_free
kn_mem_name kn_ledger_read kn_ledger_reset_peaks kn_scope_begin kn_scope_end
kn_live_tensors kn_threads kn_set_free_cores kn_tracing kn_now kn_finish kn_rank
kn_comm_size kn_world kn_tensor_free kn_grad kn_requires_grad kn_grad_mode kn_recomputing kn_set_grad_mode kn_set_check kn_checking
kn_get_step kn_seed""".split()

PLACES = "places.h", "autograd/places.h", "state/places.h", "models/places.h"

# Functions that would end the process or wait for other ranks.
SKIP = {"kn_abort_on_error", "kn_place_leave"}


def functions(root, headers):
    for header in headers:
        text = re.sub(r"/\*.*?\*/", "", open(f"{root}/{header}").read(), flags=re.S)
        text = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", "", text, flags=re.M)
        for m in re.finditer(r"KN_API\s+([^;{]*?)(kn_\w+)\s*\(([^;]*)\)\s*(?:KN_PRINTF\([^)]*\))?\s*;", text):
            yield header, m.group(2), " ".join(m.group(3).split())


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


def main():
    args = sys.argv[1:]
    missing = args[0] == "--missing"
    root, *headers = args[missing:]
    if missing:
        placed = set(re.findall(r"^#define (kn_\w+)\(\.\.\.\)", "".join(open(f"{root}/{p}").read() for p in PLACES), flags=re.M))
        names = {name for _, name, _ in functions(root, headers)}
        for name in sorted(names - placed - set(NO_PLACE)):
            print(f"{name} has no place in places.h")
        for name in sorted((placed - names) | (placed & set(NO_PLACE))):
            print(f"{name} needs none in places.h")
        return
    calls, table = [], []
    for header, name, arg in functions(root, headers):
        if name in SKIP:
            continue
        for number in "0", "1":
            at = len(table)
            calls.append(f"static int call_{at}(void) {{ (void)({call(name, arg, number)}); return __LINE__; }}")
            placed = "false" if name in NO_PLACE else "true"
            table.append(f'{{ "{name}", call_{at}, {placed} }},')
    print("\n".join(calls + ["static const public_call calls[] = {"] + table + ["};"]))


main()
