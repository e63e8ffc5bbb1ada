"""scripts/places.py: places.py ROOT HEADER...: places.h, made of the installed headers while the library is built.

It has a macro of each public function's own name, which notes the caller's file and line for error texts.
"""
import re
import sys

# No place is noted for functions that don't fail, that keep or give back a pointer of the caller's (which may be a
# literal of the call: it would end with the macro's block), or that are the places themselves.
WITHOUT = set("""kn_place_enter kn_place_leave kn_ok kn_error kn_clear_error kn_set_error_handler
kn_abort_on_error kn_dtype_size kn_dtype_name kn_dtype_parse kn_dtype_is_float kn_device_name
kn_array_describe kn_describe kn_nearest kn_array_make kn_graph_on_launch kn_graph_host_part
kn_on_grad kn_on_accumulated
kn_on_node kn_on_backward_end kn_module_hook kn_fsdp_set_comm_hook kn_fsdp_set_all_reduce_hook
kn_fsdp_set_gather_hook kn_fsdp_on_event kn_fsdp_event_name kn_options_create kn_options_main
kn_gpt_config_text kn_llama_config_text kn_loader_new_ kn_borrow kn_host_free
kn_mem_name kn_ledger_read kn_ledger_reset_peaks kn_scope_begin kn_scope_end
kn_trace_put kn_trace_sees kn_trace_kind_name kn_explain_line kn_explain
kn_live_tensors kn_threads kn_set_free_cores kn_tracing kn_now kn_finish kn_rank
kn_comm_size kn_world kn_tensor_free kn_grad kn_requires_grad kn_grad_mode kn_recomputing kn_set_grad_mode
kn_set_check kn_checking kn_get_step kn_seed""".split())

HEAD = """/* places.h: where a user's code calls, its file and line are remembered for error texts, until the
 * call is over. knap.h includes it last.
 *
 * Each public function that can fail has a macro of its own name around it. A place is noted before
 * the arguments are evaluated, and the one before comes back after the call: so an error names the
 * call that failed, also where calls are nested, where an argument calls a function of the user
 * that calls others, or where a function of the user is called back. What is called by a pointer
 * has no place of its own. Statement expressions and cleanups are GNU C, which gcc and clang take.
 *
 * A compound literal among the arguments lives as long as the block around it: with a macro, until
 * the call is over. So a function that keeps or gives back a pointer of the caller's has none, and
 * its errors name no line.
 *
 * As a system header it has no part in messages of gcc: a wrong argument is told at its own place,
 * without the macros around it. Nested calls may hide each other's kn_place_before. */
#ifndef KNAP_PLACES_H
#define KNAP_PLACES_H
#pragma GCC system_header

#include "kernels/error.h"

#define KN_PLACE                                                                                   \\
    kn_place kn_place_before __attribute__((unused, cleanup(kn_place_leave))) =                    \\
        kn_place_enter(__FILE__, __LINE__)
"""


def functions(root, headers):
    """(header, name, arguments) of each public function."""
    for header in headers:
        with open(f'{root}/{header}', encoding='utf-8') as file:
            text = re.sub(r'/\*.*?\*/', '', file.read(), flags=re.S)
        text = re.sub(r'^[ \t]*#(?:[^\n]*\\\n)*[^\n]*', '', text, flags=re.M)
        for m in re.finditer(r'\bKN_API\b([^;]*);', text):
            declared = re.fullmatch(r'\s+[^;{(]*?(kn_\w+)\s*\((.*?)\)\s*(?:KN_PRINTF\([^)]*\))?\s*', m.group(1), re.S)
            if not declared:
                sys.exit(f'{header}: no declaration of a function: KN_API{m.group(1)}')
            yield header, declared.group(1), ' '.join(declared.group(2).split())


def main(root, headers):
    print(HEAD)
    names = [name for _, name, _ in functions(root, headers)]
    if WITHOUT - set(names):
        sys.exit(f'scripts/places.py: no header declares {" ".join(sorted(WITHOUT - set(names)))}')
    for name in names:
        if name not in WITHOUT:
            print(f'#define {name}(...) (__extension__({{ KN_PLACE; {name}(__VA_ARGS__); }}))')
    print('\n#endif')


if __name__ == '__main__':
    main(sys.argv[1], sys.argv[2:])
