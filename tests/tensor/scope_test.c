/* tests/tensor/scope_test.c: ownership of handles, and when they are freed. */
#include "tensor/tensor_internal.h"
#include "tests/kn_test.h"

static kn_tensor *make(void)
{
    return kn_empty(KN_F32, KN_CPU, KN_SHAPE(3));
}

KN_TEST(scope, frees)
{
    int64_t before = kn_live_tensors(), bytes = kn_ledger_read().live_total;
    kn_scope outer = kn_scope_begin();
    make();
    kn_scope inner = kn_scope_begin();
    for (int i = 0; i < 200; i++)
        make();
    kn_tensor *kept = kn_keep(make());
    KN_CHECK(kn_live_tensors() == before + 202);
    kn_scope_end(inner);
    KN_CHECK(kn_live_tensors() == before + 2);
    kn_scope_end(inner);
    KN_CHECK(kn_live_tensors() == before + 2, "ending twice does nothing");
    kn_scope again = kn_scope_begin();
    kn_scope_end(inner);
    make();
    kn_scope_end(outer); /* ends again too */
    KN_CHECK(kn_live_tensors() == before + 1);
    kn_scope_end(again);
    KN_CHECK(kn_check(kept, "kept"));
    kn_tensor_free(kept);
    KN_CHECK(kn_live_tensors() == before && kn_ledger_read().live_total == bytes);
    KN_CHECK_OK();
}

KN_TEST(scope, ends_while_error_stands)
{
    int64_t before = kn_live_tensors();
    kn_scope s = kn_scope_begin();
    make();
    kn_fail("oh");
    KN_CHECK(make() == NULL);
    kn_scope_end(s);
    KN_CHECK(kn_live_tensors() == before);
    KN_CHECK_ERROR("oh");
    kn_tensor_free(NULL);
    KN_CHECK_OK();
}

KN_TEST(scope, free_of_unkept)
{
    kn_scope s = kn_scope_begin();
    kn_tensor *t = make();
    kn_tensor_free(t);
    KN_CHECK_ERROR("belongs to its scope");
    kn_tensor_free(kn_keep(t));
    KN_CHECK_OK();
    kn_tensor *own = kn_tensor_new(KN_F32, KN_CPU, NULL, KN_MEM_DATA, KN_SCALAR, NULL, false);
    KN_CHECK(kn_scope_adopt(own) == own && own->refs == 1);
    int64_t n = kn_live_tensors();
    kn_scope_end(s);
    KN_CHECK(kn_live_tensors() == n - 2);
}

KN_TEST(scope, end_except)
{
    int64_t before = kn_live_tensors();
    kn_scope outer = kn_scope_begin();
    kn_tensor *outside = make();
    kn_scope middle = kn_scope_begin();
    kn_tensor *a = make();
    make();
    kn_scope_begin(); /* ended with middle */
    kn_tensor *b = make(), *c = kn_scope_adopt(kn_keep(make()));
    make();
    kn_tensor *list[] = { b, outside, NULL, a, b, c, a };
    kn_scope_end_except(middle, list, 7);
    KN_CHECK(kn_live_tensors() == before + 4);
    KN_CHECK(a->refs == 1 && b->refs == 1 && c->refs == 2 && outside->refs == 1);
    KN_CHECK(!a->passing && !outside->passing && a->scoped == 1 && c->scoped == 2);
    make();
    kn_scope_end_except(middle, list, 7);
    KN_CHECK(kn_live_tensors() == before + 5, "an ended scope ends nothing");
    kn_scope_end(outer);
    KN_CHECK(kn_live_tensors() == before);
    KN_CHECK_OK();
}

KN_TEST(scope, base_ends_with_context)
{
    kn_context_end();
    int64_t before = kn_live_tensors();
    make();
    kn_scope_begin();
    make();
    KN_CHECK(kn_live_tensors() == before + 2);
    kn_context_end();
    KN_CHECK(kn_live_tensors() == before);
    KN_CHECK(kn_ledger_read().live_total == 0);
}

KN_TEST(scope, dead_handles_are_known)
{
#ifdef KN_DEBUG
    kn_scope s = kn_scope_begin();
    kn_tensor *t = make();
    kn_scope_end(s);
    REFUSED(kn_numel(t), "numel: tensor was freed");
    REFUSED(kn_keep(t), "keep: tensor was freed");
    kn_place_enter("model.c", 41);
    kn_tensor *alive = kn_keep(make());
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    kn_list_live(out);
    fclose(out);
    KN_CHECK(strstr(text, "f32[3]") && strstr(text, "model.c:41"), "%s", text);
    free(text);
    kn_tensor_free(alive);
#else
    KN_SKIP("only a debug build keeps dead handles");
#endif
}

/* 100,000 temporaries in one scope are freed in time linear in their number: ten times as many take
 * far less than a hundred times as long. */
static bool is_linear(double seconds[2])
{
    enum { N = 100000 };
    kn_tensor *t = kn_empty(KN_F32, KN_CPU, KN_SCALAR);
    for (int big = 0; big < 2; big++) {
        double begin = kn_test_clock(CLOCK_THREAD_CPUTIME_ID); /* other programs don't count */
        kn_scope s = kn_scope_begin();
        for (int i = 0; i < (big ? N : N / 10); i++)
            kn_tensor_alias(t, 0, 0, NULL, NULL);
        kn_scope_end(s);
        seconds[big] = kn_test_clock(CLOCK_THREAD_CPUTIME_ID) - begin;
    }
    return seconds[1] < 100 * seconds[0] + 0.5;
}

/* Once is enough: a virtual machine's processor may be away for a while, which no clock of its
 * tells. */
KN_TEST(scope, is_cheap)
{
    double seconds[2];
    bool linear = false;
    for (int i = 0; i < 5 && !linear; i++)
        linear = is_linear(seconds);
    KN_CHECK_OK();
    KN_CHECK(linear, "%g s, %g s", seconds[0], seconds[1]);
}
