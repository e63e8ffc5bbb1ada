"""bench/peers/opinfo_shape.py: indexing, shapes and new tensors of torch as calls of Knap, for opinfo_table.TABLE."""
import math

import torch

from knap import ZERO, Tensor
from opinfo_table import SHAPE_ONLY, TABLE, both, cast, flat, ints, like, n, nn, refuse, rows, shape, slots

# ---- indexing -------------------------------------------------------------------------------------


def gathered(k, x, dim, index):
    return k.gather(x, dim, index)


def item(k, x, index):
    """x[index] for numbers, slices, None, ... and one tensor."""
    index = list(index) if isinstance(index, (tuple, list)) and not (
        isinstance(index, list) and all(isinstance(i, int) for i in index)) else [index]
    used = sum(i is not None and i is not Ellipsis for i in index)
    if Ellipsis in [i for i in index if not isinstance(i, Tensor)]:
        at = next(j for j, i in enumerate(index) if i is Ellipsis)
        index[at:at + 1] = [slice(None)] * (k.ndim(x) - used)
    index = [k.tensor(torch.tensor(i)) if isinstance(i, list) else i for i in index]
    if all(isinstance(i, Tensor) or i == slice(None) for i in index) and any(isinstance(i, Tensor) for i in index):
        return k.index(x, len(index), [i if isinstance(i, Tensor) else None for i in index])
    if sum(isinstance(i, Tensor) for i in index) > 1:
        refuse('several index tensors beside slices of a part')
    dim = 0
    for i in index:
        if i is None:
            x = k.unsqueeze(x, dim)
        elif isinstance(i, bool):
            refuse('an index of bool')
        elif isinstance(i, int):
            i = i + k.size(x, dim) if i < 0 else i
            x = k.select(x, dim, i)
            continue
        elif isinstance(i, slice):
            begin, end, step = i.indices(k.size(x, dim))
            x = k.slice(x, dim, begin, max(begin, end)) if step == 1 else k.slice_step(x, dim, begin, end, step)
        else:
            before = k.ndim(x)
            taken = k.ndim(i) if k.dtype_of(i) == k.enums['KN_BOOL'] else 1
            x = k.index(x, dim + 1, [None] * dim + [i])
            dim += k.ndim(x) - before + taken - 1
        dim += 1
    return x


def from_end(k, x, dim, i):
    i = int(k.item(i)) if isinstance(i, Tensor) else i
    return i + k.size(x, dim) if i < 0 else i


def put_slice(k, x, src, dim=0, start=None, end=None, step=1):
    begin, end, step = slice(start, end, step).indices(k.size(x, dim))
    if step != 1:
        at = k.tensor(torch.arange(begin, max(begin, end), step))
        return k.index_put(x, dim % k.ndim(x) + 1, [None] * (dim % k.ndim(x)) + [at], src, False)
    return cat(k, [k.slice(x, dim, 0, begin), src, k.slice(x, dim, max(begin, end), k.size(x, dim))], dim)


rows(gather=lambda k, x, dim, index, sparse_grad=False: k.gather(x, dim, index), take_along_dim=lambda k, x, i, dim=None:
     k.take_along_dim(x, i, dim) if dim is not None else k.take_along_dim(k.reshape(x, 1, [-1]), k.reshape(i, 1, [-1]), 0),
     index_select=lambda k, x, dim, index: k.index_select(x, dim, index),
     scatter=lambda k, x, dim, index, src, reduce=None: k.scatter(x, dim, index, src if isinstance(src, Tensor) else k.expand(
         like(k, src, x), *n(shape(k, index)))) if reduce is None else k.scatter_reduce(
             x, dim, index, src if isinstance(src, Tensor) else k.expand(like(k, src, x), *n(shape(k, index))),
             k.enums[{'add': 'KN_BY_SUM', 'multiply': 'KN_BY_PROD'}[reduce]]),
     scatter_add=lambda k, x, dim, index, src: k.scatter_add(x, dim, index, src),
     index_add=lambda k, x, dim, index, src, alpha=1: k.index_add(x, dim, index, src if alpha == 1 else k.scale(src, alpha)),
     index_copy=lambda k, x, dim, index, src: k.index_copy(x, dim, index, src),
     index_fill=lambda k, x, dim, index, value: k.index_fill(x, dim, index, value),
     index_put=lambda k, x, index, values, accumulate=False: k.index_put(x, len(index), list(index), values, accumulate),
     masked_scatter=lambda k, x, mask, src: k.masked_scatter(x, mask, src), take=lambda k, x, index: k.reshape(
         k.take_along_dim(k.reshape(x, 1, [-1]), k.reshape(index, 1, [-1]), 0), *n(shape(k, index))),
     __getitem__=item, select=lambda k, x, dim, i: k.select(x, dim, i),
     narrow=lambda k, x, dim, start, length: k.slice(
         x, dim, from_end(k, x, dim, start), from_end(k, x, dim, start) + length), slice=lambda k, x, dim=0, start=None,
     end=None, step=1: item(k, x, [slice(None)] * (dim % k.ndim(x)) + [slice(start, end, step)]))
TABLE['narrow_copy'] = TABLE['narrow']
nn(one_hot=lambda k, x, num_classes=-1: k.one_hot(x, num_classes), embedding=lambda k, i, w, padding_idx=None, max_norm=None,
   norm_type=2.0, scale_grad_by_freq=False, sparse=False: refuse('the norms of rows aren\'t bounded, nor gradients scaled')
   if max_norm is not None or scale_grad_by_freq else k.embedding(
       *((w, i) if k.dtype_of(i) in (k.enums['KN_I64'], k.enums['KN_I32']) else (i, w)),    # op_db has the table first
       **({} if padding_idx is None else {'padding_idx': padding_idx or ZERO})))

# ---- shape ----------------------------------------------------------------------------------------


def cut(k, x, dim, sizes):
    return slots(k, len(sizes), lambda s: k.split(x, dim, len(sizes), sizes, s))


def split(k, x, size, dim=0):
    whole = k.size(x, dim)
    each = [min(size, whole - b) for b in range(0, whole, size)] if isinstance(size, int) else list(size)
    return cut(k, x, dim, each or [0])


def chunk(k, x, count, dim=0):
    return split(k, x, max(1, -(-k.size(x, dim) // count)), dim)


def tensor_split(k, x, at, dim=0):
    whole = k.size(x, dim)
    if isinstance(at, Tensor):
        at = k.values(at).tolist()
    if isinstance(at, int):
        sizes = [whole // at + (i < whole % at) for i in range(at)]
    else:
        ends = [0] + [min(a if a >= 0 else a + whole, whole) for a in at] + [whole]
        return [k.slice(x, dim, b, max(b, e)) for b, e in zip(ends, ends[1:])]
    return cut(k, x, dim, sizes)


def cat(k, tensors, dim=0):
    return k.cat(list(tensors), len(tensors), dim)


def least(count):
    def call(k, x):
        s = shape(k, x)
        more = {1: [1], 2: [1] * (2 - len(s)) + s, 3: [[1, 1, 1], [1] + s + [1], s + [1]][len(s)] if len(s) < 3 else s}
        return x if len(s) >= count else k.reshape(x, *n(more[count]))
    return lambda k, *t: call(k, t[0]) if len(t) == 1 and isinstance(t[0], Tensor) else [call(k, x) for x in flat(t)]


def joined(count, dim):
    def call(k, tensors):
        t = [least(count)(k, x) for x in tensors]
        return cat(k, t, 0 if k.ndim(t[0]) == 1 else dim)
    return call


def grid(k, t):
    sizes = [k.size(x, 0) if k.ndim(x) else 1 for x in t]
    return [k.expand(k.reshape(x, *n([1] * i + [-1] + [1] * (len(t) - i - 1))), *n(sizes)) for i, x in enumerate(t)]


def shifted(k, x, dim, sign):
    dims = list(range(k.ndim(x))) if dim is None else ints(dim)
    return k.roll(x, *n([sign * k.size(x, d) // 2 if sign > 0 else -(k.size(x, d) // 2) for d in dims]), dims)


def with_shape(f):
    return lambda k, x, *s, **o: f(k, x, [v for v in flat(s if s else list(o.values()))])


def moved(k, x, a, b):
    a, b = ([d % k.ndim(x) for d in ints(dims)] for dims in (a, b))
    order = [d for d in range(k.ndim(x)) if d not in a]
    for to, of in sorted(zip(b, a)):
        order.insert(to, of)
    return k.permute(x, *n(order)) if len(a) != 1 else k.movedim(x, a[0], b[0])


def differences(k, x, n=1, dim=-1, prepend=None, append=None):
    if n == 0:    # torch gives x without what is put before and behind
        return x
    if prepend is not None or append is not None:
        x = cat(k, [t for t in (prepend, x, append) if t is not None], dim)
    if k.dtype_of(x) != k.enums['KN_BOOL']:
        return k.diff(x, n, dim)
    for _ in range(min(n, k.size(x, dim))):
        x = k.logical_xor(k.slice(x, dim, min(1, k.size(x, dim)), k.size(x, dim)), k.slice(x, dim, 0, max(0, k.size(x, dim) - 1)))
    return x


def turned(k, x, times=1, dims=(0, 1)):
    times %= 4
    if times == 2:
        return k.flip(x, 2, list(dims))
    if times == 0:
        return x
    return k.transpose(k.flip(x, 1, [dims[1]]), *dims) if times == 1 else k.flip(k.transpose(x, *dims), 1, [dims[1]])


reshape = with_shape(lambda k, x, s: k.reshape(x, *n(s)))
rows(reshape=reshape, view=reshape, view_copy=reshape, reshape_as=lambda k, x, y: k.reshape(x, *n(shape(k, y))),
     view_as=lambda k, x, y: k.reshape(x, *n(shape(k, y))), ravel=lambda k, x: k.reshape(x, 1, [-1]),
     flatten=lambda k, x, start_dim=0, end_dim=-1: k.flatten(x, start_dim, end_dim),
     unflatten=lambda k, x, dim, sizes: k.unflatten(x, dim, *n(sizes)), transpose=lambda k, x, a, b: k.transpose(x, a, b),
     permute=with_shape(lambda k, x, s: k.permute(x, *n(s))), squeeze=lambda k, x, dim=None: x if dim == () else k.squeeze(x, *n(dim)),
     unsqueeze=lambda k, x, dim: k.unsqueeze(x, dim), movedim=moved, expand=with_shape(lambda k, x, s: k.expand(x, *n(s))),
     broadcast_to=lambda k, x, s: k.expand(x, *n(s)), expand_as=lambda k, x, y: k.expand(x, *n(shape(k, y))),
     diagonal=lambda k, x, offset=0, dim1=0, dim2=1: k.diagonal(x, offset, dim1, dim2),
     unfold=lambda k, x, dim, size, step: k.unfold(x, dim, size, step), flip=lambda k, x, *d, dims=None: x if dims == () else k.flip(
         x, *n(flat(d) if d else dims)), fliplr=lambda k, x: k.flip(x, 1, [1]), flipud=lambda k, x: k.flip(x, 1, [0]),
     roll=lambda k, x, shifts, dims=None: k.roll(x, *n(shifts), ints(dims) if dims is not None and dims != () else []),
     rot90=turned, repeat=with_shape(lambda k, x, s: k.repeat(x, *n(s))), tile=with_shape(lambda k, x, s: k.tile(x, *n(s))),
     repeat_interleave=lambda k, x, repeats, dim=None, output_size=None: k.repeat_interleave(
         x if dim is not None else k.reshape(x, 1, [-1]), dim or 0, *n(k.values(repeats).reshape(-1).tolist() if isinstance(
             repeats, Tensor) else repeats)), tril=lambda k, x, diagonal=0: k.tril(x, diagonal),
     triu=lambda k, x, diagonal=0: k.triu(x, diagonal), cat=cat, stack=lambda k, t, dim=0: k.stack(list(t), len(t), dim),
     split=split, unsafe_split=split, split_with_sizes=split, chunk=chunk, unsafe_chunk=chunk, tensor_split=tensor_split,
     hsplit=lambda k, x, at: tensor_split(k, x, at, 0 if k.ndim(x) == 1 else 1), vsplit=tensor_split,
     dsplit=lambda k, x, at: tensor_split(k, x, at, 2), unbind=lambda k, x, dim=0: [
         k.squeeze(t, *n(dim)) for t in split(k, x, 1, dim)], hstack=joined(1, 1), vstack=joined(2, 0), dstack=joined(3, 2),
     atleast_1d=least(1), atleast_2d=least(2), atleast_3d=least(3), t=lambda k, x: x if k.ndim(x) < 2 else k.transpose(x, 0, 1),
     mT=lambda k, x: k.transpose(x, -2, -1), mH=lambda k, x: k.transpose(x, -2, -1), T=lambda k, x: k.permute(
         x, *n(list(range(k.ndim(x))[::-1]))) if k.ndim(x) else x, column_stack=lambda k, t: cat(k, [
             x if k.ndim(x) > 1 else k.reshape(x, 2, [-1, 1]) for x in t], 1), broadcast_tensors=lambda k, *t: [
                 k.expand(x, *n(torch.broadcast_shapes(*(shape(k, y) for y in t)))) for x in t],
     sum_to_size=lambda k, x, *s: k.reshape(k.sum(x, *n([i for i in range(k.ndim(x)) if i < k.ndim(x) - len(flat(s)) or flat(s)[
         i - k.ndim(x) + len(flat(s))] == 1 != k.size(x, i)] or 0), True), *n(flat(s))) if list(flat(s)) != shape(k, x) else x,
     constant_pad_nd=lambda k, x, pad, value=0: k.pad(x, 0, value, *n(pad)), meshgrid=lambda k, *t, indexing='ij': [
         k.transpose(x, 0, 1) if indexing == 'xy' and k.ndim(x) > 1 else x for x in grid(k, flat(t))],
     cartesian_prod=lambda k, *t: t[0] if len(t) == 1 else k.stack(
         g := [k.reshape(x, 1, [-1]) for x in grid(k, t)], len(g), -1),
     slice_scatter=lambda k, x, src, dim=0, start=None, end=None, step=1: put_slice(k, x, src, dim, start, end, step),
     select_scatter=lambda k, x, src, dim, index: put_slice(k, x, k.unsqueeze(src, dim), dim, i := from_end(k, x, dim, index), i + 1),
     tril_indices=lambda k, r, c, offset=0, **o: k.transpose(k.nonzero(k.tril(k.ones(0, 0, 2, [r, c]), offset)), 0, 1),
     triu_indices=lambda k, r, c, offset=0, **o: k.transpose(k.nonzero(k.triu(k.ones(0, 0, 2, [r, c]), offset)), 0, 1),
     fft__fftshift=lambda k, x, dim=None: shifted(k, x, dim, 1), fft__ifftshift=lambda k, x, dim=None: shifted(k, x, dim, -1),
     diag_embed=lambda k, x, offset=0, dim1=-2, dim2=-1: k.diag_embed(x, offset, dim1, dim2),
     diag=lambda k, x, diagonal=0: k.diagonal(x, diagonal, 0, 1) if k.ndim(x) > 1 else k.diag_embed(x, diagonal, 0, 1),
     diff=differences)
for name, copy in (('t', 't_copy'), ('expand', 'expand_copy'), ('diagonal', 'diagonal_copy'), ('permute', 'permute_copy'),
                   ('transpose', 'transpose_copy'), ('squeeze', 'squeeze_copy'), ('squeeze', 'squeeze/multiple'), ('T', 'H'),
                   ('unsqueeze', 'unsqueeze_copy'), ('unfold', 'unfold_copy'), ('unbind', 'unbind_copy'), ('split', 'split/list_args'),
                   ('split', 'split_with_sizes_copy'), ('meshgrid', 'meshgrid/variadic_tensors'),
                   ('meshgrid', 'meshgrid/list_of_tensors'), ('diagonal', 'linalg.diagonal')):
    TABLE[copy] = TABLE[name]
TABLE['linalg.diagonal'] = lambda k, x, offset=0, dim1=-2, dim2=-1: k.diagonal(x, offset, dim1, dim2)
for mode in ('constant', 'reflect', 'replicate', 'circular'):
    TABLE['nn.functional.pad/' + mode] = lambda k, x, pad, mode='constant', value=None: k.pad(
        x, k.enums['KN_PAD_' + mode.upper()], value or 0, *n(pad))
TABLE['nn.functional.pad/replicate_negative'] = TABLE['nn.functional.pad/replicate']


# ---- new tensors ----------------------------------------------------------------------------------

def made(fill):
    def call(k, *s, dtype=None, device=None, requires_grad=False, layout=None, pin_memory=False, memory_format=None, **o):
        beside = s[0] if s and isinstance(s[0], Tensor) else None
        s = [v for v in s if not isinstance(v, Tensor)]
        sizes = o.get('size') or (shape(k, beside) if fill.endswith('_like') else s[0] if s and isinstance(
            s[0], (list, tuple)) else s)
        values = [v for v in (s if fill.endswith('_like') else s[1:]) if not isinstance(v, (list, tuple))] + [
            v for m, v in o.items() if m == 'fill_value']
        code = k.dtype(dtype) if dtype else k.dtype_of(beside) if beside else 0
        value = {'zeros': [0], 'ones': [1], 'full': values, 'empty': []}[fill.split('_')[-2 if fill.endswith('_like') else -1]]
        if fill == 'full' and dtype is None:
            code = k.dtype(torch.tensor(values[0]).dtype)
        return getattr(k, 'full' if value else 'empty')(code, k.enums['KN_CPU'], *value[:1], *n(list(sizes)))
    return call


for word in ('zeros', 'ones', 'full', 'empty'):
    for name in (word, word + '_like', 'new_' + word):
        TABLE[name] = made(name)
    SHAPE_ONLY.update({'empty', 'empty_like', 'new_empty'})
SHAPE_ONLY.update({'normal', 'normal/number_mean', 'normal/in_place', 'cauchy', 'exponential', 'geometric', 'log_normal', 'randn', 'rand_like', 'randn_like', 'randint', 'randint_like', 'bernoulli', 'multinomial', 'uniform'})
rows(randn=lambda k, *s, dtype=None, device=None, requires_grad=False: k.randn(
    k.dtype(dtype) if dtype else 0, k.enums['KN_CPU'], 1, 1, *n(flat(s))), rand_like=lambda k, x, dtype=None, **o: k.rand_like(cast(k, x, dtype)),
     randn_like=lambda k, x, dtype=None, **o: k.randn_like(cast(k, x, dtype)), randint_like=lambda k, x, a, b=None, dtype=None, **o: k.randint_like(
         cast(k, x, dtype), 0 if b is None else a, a if b is None else b), bernoulli=lambda k, x, **o: k.bernoulli(x),
     randint=lambda k, a, b, *s, device=None, dtype=torch.int64: k.randint(
         k.dtype(dtype), k.enums['KN_CPU'], *((a, b) if s else (0, a)), 1, 1, *n(s[0] if s else b)),
     multinomial=lambda k, p, count, replacement=False: k.multinomial(p, count, replacement),
     normal=lambda k, a, b, **o: k.add(*both(k, k.mul(k.randn_like(x := a if isinstance(a, Tensor) else b), like(k, b, x)), a)),
     cauchy=lambda k, x, median=0, sigma=1: k.tan(k.scale(k.rand_like(x), math.pi)), exponential=lambda k, x, rate=1: k.scale(
         k.log(k.rand_like(x)), -1 / rate), geometric=lambda k, x, p: k.ceil(k.scale(k.log(k.rand_like(x)), 1 / math.log(1 - p))),
     log_normal=lambda k, x, mean=1, std=2: k.exp(k.add_scalar(k.scale(k.randn_like(x), std), mean)), uniform=lambda k, x, a=0, b=1: k.add_scalar(k.scale(k.rand_like(x), b - a), a),
     eye=lambda k, rows, columns=None, dtype=None, device=None, requires_grad=False: k.eye(
         k.dtype(dtype) if dtype else 0, k.enums['KN_CPU'], rows, rows if columns is None else columns),
     linspace=lambda k, a, b, steps, dtype=None, device=None: k.linspace(k.dtype(dtype) if dtype else 0, k.enums['KN_CPU'], a, b, steps),
     arange=lambda k, a=0, end=None, step=1, dtype=None, device=None: k.arange(
         k.dtype(dtype or torch.arange(a).dtype), k.enums['KN_CPU'], a if end is None else end, start=0 if end is None else a, step=step),
     scalar_tensor=lambda k, v, dtype=None, device=None, requires_grad=False: k.full(
         k.dtype(dtype) if dtype else 0, k.enums['KN_CPU'], v, 0, []))

TABLE['normal/number_mean'] = TABLE['normal']
TABLE['normal/in_place'] = lambda k, x, mean=0, std=1: k.add_scalar(k.scale(k.randn_like(x), std), mean)
TABLE['linspace/tensor_overload'] = lambda k, a, b, steps, **o: TABLE['linspace'](
    k, *(k.item(t) if isinstance(t, Tensor) else t for t in (a, b)), steps, **o)
