/* tests/fsdp/buffer_test.c: buffers that compute in another dtype than their own: in several
 * modules, between forward and backward, and after a wrap that failed. */
#include "tests/failing.h"
#include "tests/fsdp/ranks.h"
#include "tests/fsdp/pair.h"

/* One tensor is a buffer of both modules, in one unit or in two. */
RANK_TEST(buffer, a_buffer_of_several_modules_is_cast_once, .threads = "124")
{
    for (int how = 0; how < 4; how++) {
        OWNED_PAIR pair m;
        KN_CHECK(pair_init(&m, false) && kn_buffer(&m.a, "running", m.buffer) &&
                 kn_fsdp_wrap(&m, world, .wrap_class = how & 1 ? "spy" : NULL,
                              .buffer_dtype = KN_BF16, .sync_from_rank0 = how > 1));
        KN_CHECK(shows(&m, KN_BF16, 1, 1, 300), "what computes, %d", how);
        void *const all[] = { &m, &m.a, &m.b };
        for (int i = 0; i < 3; i++) {
            kn_summon_scope s = kn_summon(all[i]);
            KN_CHECK(s.s && shows(&m, KN_F32, 1, 1.0001f, 300.7f), "summoned %d, %d", i, how);
            KN_CHECK(kn_summon_end(s) && shows(&m, KN_BF16, 1, 1, 300), "end %d, %d", i, how);
        }
    }
}

/* Showing what nobody writes counts as no write to what a backward saved. */
KN_TEST(buffer, a_buffer_may_be_shown_between_forward_and_backward)
{
    OWNED_PAIR pair m;
    IN_SCOPE;
    KN_CHECK(pair_init(&m, false) && kn_fsdp_wrap(&m, NULL, .buffer_dtype = KN_BF16));
    kn_tensor *x = kn_require_grad(kn_ones(KN_BF16, KN_CPU, KN_SHAPE(3)), true);
    kn_tensor *loss = sum_of(kn_mul(x, m.buffer));
    KN_CHECK(kn_summon_end(kn_summon(&m, .read_only = true)));
    KN_CHECK(kn_backward(loss));
    loss = sum_of(kn_mul(x, m.buffer));
    KN_CHECK(kn_module_full_buffers(&m, true) && put(m.buffer, 1, 2, 3) &&
             kn_module_full_buffers(&m, false) && shows(&m, KN_BF16, 1, 2, 3));
    REFUSED(kn_backward(loss), "was written in place after forward used it");
}

KN_TEST(buffer, a_wrap_that_fails_casts_no_buffer)
{
    bool ok = false;
    for (int64_t n = 1; !ok && n < 2000; n++) { /* each allocation fails in turn */
        pair m;
        KN_CHECK(pair_init(&m, false));
        ok = WITH_FAILING(n, kn_fsdp_wrap(&m, NULL, .buffer_dtype = KN_BF16));
        KN_CHECK(ok || (shows(&m, KN_F32, 1, 1.0001f, 300.7f) &&
                        kn_fsdp_wrap(&m, NULL, .buffer_dtype = KN_F16) &&
                        shows(&m, KN_F16, 1, 1, 300.75f)),
                 "allocation %lld", (long long)n);
        KN_CHECK(kn_module_full_buffers(&m, true) && shows(&m, KN_F32, 1, 1.0001f, 300.7f),
                 "allocation %lld", (long long)n);
        pair_free(&m);
    }
    KN_CHECK(ok);
}

/* A buffer that another unit casts stays as that one has it. */
KN_TEST(buffer, a_wrap_that_fails_leaves_the_buffers_of_others)
{
    OWNED_PAIR pair m;
    KN_CHECK(pair_init(&m, false) && kn_buffer(&m.a, "shared", m.buffer));
    kn_scope scope = kn_scope_begin();
    KN_CHECK(kn_buffer(&m.a, "lost", kn_empty(KN_F32, KN_META, KN_SHAPE(2))));
    kn_scope_end(scope);
    KN_CHECK(kn_fsdp_wrap(&m.b, NULL, .buffer_dtype = KN_BF16) && shows(&m, KN_BF16, 1, 1, 300));
    REFUSED(kn_fsdp_wrap(&m.a, NULL, .buffer_dtype = KN_F16), "buffer 'a.lost' is on meta");
    KN_CHECK(shows(&m, KN_BF16, 1, 1, 300));
}
