/* optim/piece.c: pieces of a step as tensors, for updates that are made of operations. */
#include "autograd/ops.h"
#include "optim/optim_internal.h"

kn_tensor *kn_piece_tensor(kn_device d, const void *data, kn_dtype dtype, int64_t count)
{
    if (!data)
        return NULL;
    size_t bytes = (size_t)count * kn_dtype_size(dtype);
    kn_storage *s =
        kn_storage_wrap(d, (void *)(uintptr_t)data, bytes, NULL, NULL, "a step's piece");
    int64_t one = 1;
    kn_tensor *t = s ? kn_tensor_on(s, 0, dtype, 1, &count, &one, true) : NULL;
    kn_storage_unref(s);
    return t;
}

kn_tensor *kn_piece_grad(kn_device d, const kn_opt_step *step, const kn_opt_piece *q)
{
    const kn_dtype t = kn_wide_dtype(q->param_dtype);
    kn_tensor *factor = kn_cast(kn_piece_tensor(d, step->grad_scale, KN_F64, 1), t);
    kn_tensor *mean =
        kn_mul(kn_cast(kn_piece_tensor(d, q->grad, q->grad_dtype, q->count), t), factor);
    if (!step->limit)
        return mean;
    kn_tensor *most = kn_cast(kn_piece_tensor(d, step->limit, KN_F64, 1), t);
    return kn_minimum(kn_maximum(mean, kn_neg(most)), most);
}

bool kn_piece_write(kn_device d, const kn_opt_step *step, const kn_opt_piece *q, int which,
                    kn_tensor *values)
{
    void *to = which == 0 ? q->param : which == 1 ? q->m : which == 2 ? q->v : q->more;
    bool narrow = q->param_dtype == KN_BF16 || q->param_dtype == KN_F16;
    if (!values || q->count == 0)
        return kn_ok();
    if (!step->seed || !narrow)
        return kn_copy_(kn_piece_tensor(d, to, q->param_dtype, q->count), values);
    const kn_opt_place *at = &q->place;
    const int64_t run = at->run > 0 ? at->run : q->count, shape[] = { q->count / run, run };
    kn_round_args a = { .dst = kn_array_make(to, q->param_dtype, 2, shape),
                        .src = kn_array_make(kn_data_of(values), values->dtype, 2, shape),
                        .stream = at->stream + (uint64_t)which,
                        .start = at->start,
                        .step = at->step,
                        .seed_at = step->seed,
                        .step_at = step->step };
    return KN_LAUNCH(kn_compute_stream(d), KN_K_ROUND, a);
}
