/* tests/tensor/storage_test.c: releasing and retaking bytes, categories, wrapped bytes. */
#include "tensor/tensor_internal.h"
#include "tests/kn_test.h"

static int64_t live(kn_mem_category m)
{
    return kn_ledger_read().live[m];
}

KN_TEST(storage, release_retake)
{
    int64_t shape[2] = { 8, 16 }, before = live(KN_MEM_GATHERED);
    kn_storage *s = kn_storage_create(kn_device_memory(KN_CPU), 512, KN_MEM_GATHERED, "h.0.weight");
    KN_CHECK(s != NULL);
    kn_tensor *t = kn_tensor_on(s, 0, KN_F32, 2, shape, NULL, false);
    KN_CHECK(t && s->refs == 2 && live(KN_MEM_GATHERED) == before + 512);
    KN_CHECK(kn_fill_(t, 2));
    uint32_t version = s->version;
    kn_storage_release(s);
    kn_storage_release(s);
    KN_CHECK(s->released && !s->data && live(KN_MEM_GATHERED) == before);
    KN_CHECK(kn_numel(t) == 128 && kn_is_contiguous(t), "shapes need no bytes");
    KN_CHECK(kn_array_of(t).data == NULL);
    KN_CHECK_ERROR("h.0.weight f32[8,16] are released");
    REFUSED(kn_fill_(t, 1), "released");
    REFUSED(kn_data(t), "released");
    KN_CHECK(kn_storage_retake(s) && kn_storage_retake(s) && s->version == version);
    KN_CHECK(kn_fill_(t, 3) && ((float *)kn_data(t))[127] == 3);
    kn_storage_unref(s);
    kn_tensor_free(t);
    KN_CHECK(live(KN_MEM_GATHERED) == before);
    KN_CHECK_OK();
}

KN_TEST(storage, begins_released)
{
    int64_t n = 4, before = live(KN_MEM_UNREDUCED);
    kn_storage *s =
        kn_storage_create_released(kn_device_memory(KN_CPU), 16, KN_MEM_UNREDUCED, NULL);
    kn_tensor *t = kn_tensor_on(s, 0, KN_F32, 1, &n, NULL, false);
    kn_set_name(t, "grad");
    KN_CHECK(live(KN_MEM_UNREDUCED) == before && !kn_data(t));
    KN_CHECK_ERROR("grad f32[4]");
    KN_CHECK(kn_storage_retake(s) && kn_data(t) && live(KN_MEM_UNREDUCED) == before + 64);
    kn_tensor_free(t);
    kn_storage_unref(s);
    KN_CHECK(live(KN_MEM_UNREDUCED) == before);
    REFUSED(kn_storage_create(NULL, 8, KN_MEM_COMM, "x"), "no memory");
}

static void count(void *arg)
{
    ++*(int *)arg;
}

KN_TEST(storage, wraps)
{
    float bytes[4] = { 1, 2, 3, 4 };
    int64_t n = 4;
    int freed = 0;
    kn_storage *s = kn_storage_wrap(KN_CPU, bytes, sizeof bytes, count, &freed, NULL);
    kn_tensor *t = kn_tensor_on(s, 0, KN_F32, 1, &n, NULL, false);
    kn_storage_unref(s);
    kn_storage_release(t->storage);
    KN_CHECK(!t->storage->released && kn_data(t) == bytes, "wrapped bytes stay");
    KN_CHECK(freed == 0);
    kn_tensor_free(t);
    KN_CHECK(freed == 1);
}

KN_TEST(storage, views_stay_inside)
{
    int64_t n = 4, three = 3, two[2] = { 2, 2 }, stride[2] = { 3, 1 }, far[2] = { INT64_MAX, 1 };
    int64_t back = -1, none = 0;
    kn_tensor *t = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(4));
    kn_storage *s = t->storage;
    REFUSED(kn_tensor_on(s, 1, KN_F32, 1, &n, NULL, true), "leaves the storage");
    KN_CHECK(kn_tensor_on(s, 1, KN_F32, 1, &three, NULL, true) && s->refs == 2);
    REFUSED(kn_tensor_on(s, -1, KN_F32, 1, &three, NULL, true), "leaves");
    REFUSED(kn_tensor_on(s, 0, KN_F32, 2, two, stride, true), "leaves");
    REFUSED(kn_tensor_on(s, 0, KN_F32, 2, two, far, true), "leaves");
    REFUSED(kn_tensor_on(s, 3, KN_F32, 1, &three, &back, true), "leaves");
    REFUSED(kn_tensor_on(s, 0, KN_F64, 1, &three, NULL, true), "f64[3]");
    KN_CHECK(kn_tensor_on(s, 4, KN_F32, 1, &none, NULL, true) != NULL);
    REFUSED(kn_tensor_on(s, 5, KN_F32, 1, &none, NULL, true), "leaves");
}

KN_TEST(storage, category)
{
    int64_t n = 1000, a = live(KN_MEM_ACTIVATION), b = live(KN_MEM_DATA);
    kn_scope s = kn_scope_begin();
    KN_CHECK(kn_empty(KN_F32, KN_CPU, 1, &n) && live(KN_MEM_ACTIVATION) >= a + 4000);
    kn_context_get()->alloc_category = KN_MEM_DATA + 1;
    int64_t now = live(KN_MEM_ACTIVATION);
    KN_CHECK(kn_empty(KN_F32, KN_CPU, 1, &n) && live(KN_MEM_DATA) >= b + 4000);
    KN_CHECK(live(KN_MEM_ACTIVATION) == now);
    kn_context_get()->alloc_category = 0;
    kn_scope_end(s);
    KN_CHECK(live(KN_MEM_ACTIVATION) == a && live(KN_MEM_DATA) == b);
}
