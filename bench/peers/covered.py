"""bench/peers/covered.py: the public functions that scripts/peers ops compares with torch, and the others with a reason.
Needs no torch.

    python3 bench/peers/covered.py docs/operations.md    complains where the page and the headers differ
"""
import os
import re
import sys

sys.dont_write_bytecode = True
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..')
sys.path.insert(0, os.path.join(ROOT, 'scripts'))
from functions import functions

HEADERS = {'autograd/operations.h': 'Operations', 'autograd/functional.h': 'Operations of neural networks',
           'autograd/distances.h': 'Distances and their losses', 'autograd/volumes.h': 'Volumes and places',
           'autograd/spectral.h': 'Fourier transforms',
           'nn/layers.h': 'Layers', 'optim/optim.h': 'Optimizers'}
SUM = 'kn_add and the norm in one step: add_norm.is_kn_add_and_the_norm_in_each_dtype compares them'
DRAWS, CACHE, STEP, SCALER = ('draws numbers of its own', 'keeps keys and values; no gradient', 'counts and settings of a step',
                              'part of kn_scaler_new\'s row')
WITHOUT = {
    'kn_dropout': DRAWS, 'kn_rand_like': DRAWS, 'kn_randn_like': DRAWS, 'kn_randint': DRAWS, 'kn_randint_like': DRAWS,
    'kn_randperm': DRAWS, 'kn_bernoulli': DRAWS, 'kn_multinomial': DRAWS,
    'kn_is_channels_last': 'tells about memory; no tensor comes out',
    'kn_kv_cache_new': CACHE, 'kn_kv_cache_free': CACHE, 'kn_kv_cache_append': CACHE, 'kn_kv_cache_length': CACHE,
    'kn_kv_cache_truncate': CACHE, 'kn_cache_new': CACHE, 'kn_cache_free': CACHE, 'kn_cache_length': CACHE,
    'kn_cache_truncate': CACHE, 'kn_cache_select': CACHE, 'kn_token_positions': CACHE, 'kn_cached_positions': CACHE,
    'kn_sequential_append': 'in the row of kn_sequential_init', 'kn_sequential_extend': 'in the row of kn_sequential_init',
    'kn_batch_norm_relu': 'the bits of kn_batch_norm_init, kn_add and kn_relu: conv.norm_and_relu compares them',
    'kn_add_layer_norm': SUM, 'kn_add_rms_norm': SUM, 'kn_add_norm': 'kn_add and a call of the norm: layers.norms_of_sums compares them',
    'kn_own_optim': 'the formula is the user\'s',
    'kn_optim_free': STEP, 'kn_step': STEP, 'kn_unclip_grads': STEP, 'kn_set_lr': STEP, 'kn_lr': STEP, 'kn_optim_steps': STEP,
    'kn_optim_state_name': STEP, 'kn_optim_state_name_of': STEP, 'kn_muon_seconds': STEP, 'kn_optim_state': STEP, 'kn_optim_set_steps': STEP, 'kn_optim_module': STEP,
    'kn_first_nonfinite_grad': 'finds a number that is no number', 'kn_find_nonfinite_grad': 'finds a number that is no number',
    'kn_scaler_free': SCALER, 'kn_scale_loss': SCALER, 'kn_scaler_step': SCALER, 'kn_scaler_get': SCALER,
    'kn_scaler_set': SCALER,
    'kn_scaler_update': SCALER,
}


def public():
    """{header: names}, in the order of the headers."""
    return {header: [name for name, _, _ in functions(header)] for header in HEADERS}


def rows_of(page):
    """{name: row} of a page's tables."""
    return {m[1]: m[0] for m in re.finditer(r'^\| `(\w+)` \|.*$', page, re.M)}


def complaints(named, where):
    """Each public function has a row, or a reason why not; each row has a function."""
    names = [name for list_ in public().values() for name in list_]
    for name in names:
        if name not in named and name not in WITHOUT:
            yield f'{name} has no row in {where}'
    for name in [*named, *WITHOUT]:
        if name not in names:
            yield f'{name} is no public function of {", ".join(HEADERS)}'
    for name in named:
        if name in WITHOUT:
            yield f'{name} has a row and a reason to have none'


def main():
    page = sys.argv[1]
    with open(os.path.join(ROOT, page), encoding='utf-8') as f:
        found = rows_of(f.read())
    for line in complaints(found, f'{page}: give it one in bench/peers and run scripts/peers ops --only NAME --page {page}'):
        print(line)


if __name__ == '__main__':
    main()
