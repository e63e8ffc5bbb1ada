"""bench/peers/operations_volumes.py: the operations of autograd/volumes.h and autograd/spectral.h beside torch's."""
import torch
import torch.nn.functional as F

from operations import row


def volume(d, least=4, **how):
    return d.input([d.int(1, 2), d.int(1, 3), d.int(least, 6), d.int(least, 7), d.int(least, 7)], **how)


def each(d, low, high):
    return [d.int(low, high) for _ in range(3)]


@row('kn_conv3d', 'conv3d')
def _(d):
    g, stride, pad, dilation = d.int(1, 2), each(d, 1, 3), each(d, 0, 2), each(d, 1, 2)
    c, o = g * d.int(1, 3), g * d.int(1, 3)
    x = d.input([d.int(1, 2), c, d.int(4, 6), d.int(4, 7), d.int(4, 7)])
    w = d.input([o, c // g] + each(d, 1, 2))
    inputs = [x, w] + [d.input([o])] * d.int(0, 1)
    return inputs, lambda k, x, w, b=None: k.conv3d(x, w, b, strides=stride, pads=pad, dilations=dilation, groups=g), \
        lambda x, w, b=None: F.conv3d(x, w, b, stride, pad, dilation, g)


for word in ('max_pool3d', 'avg_pool3d'):
    @row('kn_' + word, word)
    def _(d, word=word):
        kernel, stride, pad, up = each(d, 2, 3), each(d, 1, 3), each(d, 0, 1), d.choice([True, False])
        own, more = {}, {}
        if word == 'avg_pool3d':
            own['exclude_pad'] = d.choice([True, False])
            more['count_include_pad'] = not own['exclude_pad']
        elif d.int(0, 1):
            own['dilation'] = more['dilation'] = d.int(1, 2)
        return [volume(d, 5)], lambda k, x: getattr(k, word)(x, kernels=kernel, strides=stride, pads=pad, ceil_mode=up, **own), \
            lambda x: getattr(F, word)(x, kernel, stride, pad, ceil_mode=up, **more)


for word in ('adaptive_avg_pool3d', 'adaptive_max_pool3d', 'adaptive_max_pool2d', 'adaptive_max_pool1d'):
    @row('kn_' + word, word)
    def _(d, word=word):
        n = int(word[-2])
        size = [d.int(1, 9) for _ in range(n)]
        return [d.input([d.int(1, 2), d.int(1, 3)] + [d.int(1, 7) for _ in range(n)])], \
            lambda k, x: getattr(k, word)(x, *size), lambda x: getattr(F, word)(x, size)


@row('kn_grid_sample', 'grid_sample')
def _(d):
    n, mode, corners = d.int(1, 2), d.choice(['bilinear', 'nearest']), d.choice([True, False])
    padding = d.choice(['zeros', 'border', 'reflection'])
    return [d.input([n, d.int(1, 3), d.int(1, 6), d.int(1, 6)]), d.input([n, d.int(1, 5), d.int(1, 5), 2])], \
        lambda k, x, g: k.grid_sample(x, g, nearest=mode == 'nearest', align_corners=corners,
                                      padding=k.enums['KN_GRID_' + padding.upper()]), \
        lambda x, g: F.grid_sample(x, g, mode, padding, corners) + (0 * g.sum() if mode == 'bilinear' else 0)


@row('kn_affine_grid', 'affine_grid')
def _(d):
    n, h, w, corners = d.int(1, 3), d.int(1, 6), d.int(1, 6), d.choice([True, False])
    return [d.input([n, 2, 3])], lambda k, t: k.affine_grid(t, h, w, corners), \
        lambda t: F.affine_grid(t, [n, 1, h, w], corners)


def length(d):
    return d.choice([d.int(1, 40), d.choice([64, 67, 96, 128, 210, 400])])


@row('kn_rfft', 'fft.rfft')
def _(d):
    return [d.input(d.shape(most=2) + [length(d)])], lambda k, x: k.rfft(x), \
        lambda x: torch.view_as_real(torch.fft.rfft(x))


@row('kn_irfft', 'fft.irfft')
def _(d):
    n = length(d)
    return [d.input(d.shape(most=2) + [n // 2 + 1, 2])], lambda k, x: k.irfft(x, n), \
        lambda x: torch.fft.irfft(torch.view_as_complex(x.contiguous()), n)


def framed(d):
    n, lead = d.choice([8, 16, 20, 33]), d.choice([[], [d.int(1, 3)]])
    hop, own = d.int(1, n // 2), {'normalized': d.choice([True, False]), 'no_center': d.choice([True, False])}
    return n, lead, hop, own, {'normalized': own['normalized'], 'center': not own['no_center']}


@row('kn_stft', 'stft')
def _(d):
    n, lead, hop, own, judge = framed(d)
    size = d.int(1, n)
    return [d.input(lead + [d.int(40, 90)]), d.input([size], 'positive')], \
        lambda k, x, w: k.stft(x, n_fft=n, hop=hop, window=w.handle, **own), \
        lambda x, w: torch.view_as_real(torch.stft(x, n, hop, size, w, return_complex=True, **judge))


@row('kn_istft', 'istft')
def _(d):
    n, lead, hop, own, judge = framed(d)
    return [d.input(lead + [n // 2 + 1, d.int(3, 9), 2]), d.input([n], 'positive', grad=False)], \
        lambda k, x, w: k.istft(x, n_fft=n, hop=hop, window=w.handle, **own), \
        lambda x, w: torch.istft(torch.view_as_complex(x.contiguous()), n, hop, n, w, **judge)
