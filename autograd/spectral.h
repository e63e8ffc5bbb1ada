/* autograd/spectral.h: Fourier transforms, with gradients, on every device. They keep to the rules
 * of autograd/functional.h. Complex numbers are a last dim of two, {real, imaginary}, as
 * torch.view_as_real gives them. */
#ifndef KNAP_AUTOGRAD_SPECTRAL_H
#define KNAP_AUTOGRAD_SPECTRAL_H

#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* y[..., k, :] = sum_j x[..., j] e^(-2 pi i j k / n) for k up to n / 2, of x[..., n]:
 * y[..., n / 2 + 1, 2] (torch.fft.rfft). It is made of matrix products, of about n times the sum of
 * n's factors; a prime factor is at most 1024. bf16 and f16 are computed in f32. */
KN_API kn_tensor *kn_rfft(kn_tensor *x);
/* The x[..., n] of which kn_rfft makes x[..., n / 2 + 1, 2] (torch.fft.irfft); n 0: the even one.
 * Imaginary parts of the first number, and of the last one of an even n, don't count. */
KN_API kn_tensor *kn_irfft(kn_tensor *x, int64_t n);

typedef struct kn_stft_options {
    KN_BEGIN_OPTIONS;
    int64_t n_fft; /* elements of a frame; required */
    int64_t hop;   /* from one frame to the next; 0: n_fft / 4 */
    kn_tensor
        *window; /* of x's dtype, at most n_fft elements, which is put in the middle; NULL: ones */
    bool no_center;  /* frames begin at the first element, not half a frame before it */
    bool normalized; /* divided by sqrt(n_fft) */
    int64_t length;  /* kn_istft: elements of the result; 0: all that the frames give */
} kn_stft_options;
/* kn_rfft of frames of x[L] or x[N,L] times the window, x mirrored at both ends:
 * [..., n_fft / 2 + 1, T, 2] (torch.stft). Its frames are in memory, n_fft / hop times x. */
KN_API kn_tensor *kn_stft_(kn_tensor *x, kn_stft_options o);
#define kn_stft(x, ...) kn_stft_(x, KN_OPTIONS(kn_stft_options, __VA_ARGS__))
/* Back: frames times the window, added up where they lie and divided by the sum of the windows'
 * squares (torch.istft), through which no gradient goes to the window. A sum that is 0 is an error on
 * the CPU. */
KN_API kn_tensor *kn_istft_(kn_tensor *x, kn_stft_options o);
#define kn_istft(x, ...) kn_istft_(x, KN_OPTIONS(kn_stft_options, __VA_ARGS__))

#ifdef __cplusplus
}
#endif
#endif
