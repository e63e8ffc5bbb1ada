/* models/programs/measures.c: a row of floats a rank and step: losses, norm, number of a parameter,
 * news. */
#include "models/programs/measures.h"
#include "kernels/error.h"
#include "kernels/memory.h"
#include "kernels/stream.h"
#include "tensor/tensor_internal.h"

struct measures {
    kn_comm *world;
    kn_device device;
    int64_t accum, width; /* micro-batches; floats a row */
    kn_tensor *row;       /* of this rank */
    kn_tensor *all;       /* [ranks, width]; row, where there is one rank */
    float *host;          /* their copy on the host */
    kn_fetch *sent[2];    /* oldest first */
    int waiting, most;
};

enum { NORM, NONFINITE, STOP, NOW, SAVE, STATE, MORE }; /* columns after the losses */

measures *measures_create(kn_comm *world, kn_device device, int64_t accum, int behind)
{
    measures *m = kn_host_calloc(1, sizeof *m);
    if (!m)
        return NULL;
    int64_t ranks = kn_comm_size(world), width = accum + MORE;
    *m = (measures){ world, device, accum, width, .most = behind + 1 };
    kn_scope scope = kn_scope_begin();
    kn_tensor *row = kn_zeros(KN_F32, device, KN_SHAPE(width));
    kn_tensor *all = ranks > 1 ? kn_zeros(KN_F32, device, KN_SHAPE(ranks, width)) : row;
    if (row && all) {
        m->row = kn_keep(row);
        m->all = kn_keep(all);
    }
    kn_scope_end(scope);
    m->host = kn_host_alloc((size_t)(ranks * width) * sizeof *m->host);
    if (m->row && m->host)
        return m;
    measures_free(m);
    return NULL;
}

void measures_free(measures *m)
{
    if (!m)
        return;
    for (int i = 0; i < m->waiting; i++)
        kn_fetch_end(m->sent[i], NULL, 0);
    kn_tensor_free(m->row);
    kn_tensor_free(m->all);
    kn_host_free(m->host);
    kn_host_free(m);
}

static kn_tensor *place(measures *m, int64_t i)
{
    return kn_tensor_alias(m->row, i, 0, NULL, NULL);
}

/* A value on another device is converted there, so that only the f32 is copied. */
static bool put(measures *m, int64_t i, kn_tensor *value)
{
    if (value && kn_device_of(value) != m->device)
        value = kn_cast(value, KN_F32);
    return value && kn_copy_(place(m, i), value);
}

bool measures_loss(measures *m, int64_t a, kn_tensor *loss)
{
    return put(m, a, loss);
}

bool measures_grads(measures *m, kn_tensor *norm, kn_tensor *nonfinite)
{
    return put(m, m->accum + NORM, norm) && put(m, m->accum + NONFINITE, nonfinite);
}

/* The state of a save on two ranks together. */
static kn_save_state worse(kn_save_state a, kn_save_state b)
{
    static const int order[] = {
        [KN_SAVE_WRITTEN] = 0, [KN_SAVE_NONE] = 1, [KN_SAVE_FAILED] = 2, [KN_SAVE_RUNNING] = 3
    };
    return order[a] > order[b] ? a : b;
}

bool measures_send(measures *m, news mine)
{
    kn_stream *s = kn_compute_stream(m->device);
    if (m->waiting == m->most)
        return kn_fail("measures: %d steps are pending; take one first", m->waiting);
    const float list[] = { mine.stop, mine.now, (float)mine.save, (float)mine.state };
    const int64_t count = MORE - STOP;
    bool ok = kn_copy_(kn_tensor_alias(m->row, m->accum + STOP, 1, &count, NULL),
                       kn_from(KN_F32, m->device, list, 1, &count));
    ok = ok && (m->all == m->row ||
                kn_all_gather(m->world, kn_array_of(m->all).data, kn_array_of(m->row).data,
                              m->width, KN_F32, s, "losses"));
    kn_fetch *f = ok ? kn_fetch_begin(m->all) : NULL;
    if (f)
        m->sent[m->waiting++] = f;
    return f != NULL;
}

int measures_waiting(const measures *m)
{
    return m->waiting;
}

static int64_t lower(int64_t a, float b)
{
    return b < 0 || (a >= 0 && (float)a < b) ? a : (int64_t)b;
}

bool measures_take(measures *m, measured *out)
{
    int64_t ranks = kn_comm_size(m->world);
    size_t bytes = (size_t)(ranks * m->width) * sizeof *m->host;
    if (m->waiting == 0)
        return kn_fail("measures: no step is pending");
    kn_fetch *f = m->sent[0];
    m->sent[0] = m->sent[1];
    m->waiting--;
    if (!kn_fetch_end(f, m->host, bytes))
        return false;
    double sum = 0;
    for (int64_t a = 0; a < m->accum; a++)
        for (int64_t k = 0; k < ranks; k++)
            sum += m->host[k * m->width + a];
    *out = (measured){ .loss = sum / (double)(m->accum * ranks),
                       .norm = m->host[m->accum + NORM],
                       .nonfinite = -1,
                       .news.state = KN_SAVE_WRITTEN };
    for (int64_t k = 0; k < ranks; k++) {
        const float *more = m->host + k * m->width + m->accum;
        out->nonfinite = lower(out->nonfinite, more[NONFINITE]);
        out->news.stop |= more[STOP] != 0;
        out->news.now |= more[NOW] != 0;
        out->news.save = (int)more[SAVE]; /* the same on all */
        out->news.state = worse(out->news.state, (kn_save_state)more[STATE]);
    }
    return true;
}
