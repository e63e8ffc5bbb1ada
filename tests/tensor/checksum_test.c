/* The checksum of files against the numbers of its reference implementation. */
#include "tensor/checksum.h"
#include "tests/kn_test.h"

KN_TEST(checksum, numbers_of_the_published_algorithm)
{
    static const struct {
        size_t bytes;
        uint64_t sum;
    } known[] = {
        { 0, 0x2d06800538d394c2u },    { 1, 0xc44bdff4074eecdbu },    { 3, 0xa1c4a8259b827291u },
        { 4, 0xbb4e3d89ee0b271du },    { 8, 0x79d02238b80e37b1u },    { 9, 0xf64cecc4271ff461u },
        { 16, 0x222e9aead6bddd51u },   { 17, 0x47aad6b375eb4bbau },   { 128, 0x421a9c905c6e66bau },
        { 129, 0x9e2414800f83768au },  { 240, 0xb714c5fd22744964u },  { 241, 0xbc424a2c480dd281u },
        { 256, 0x2d040b1ab40f0d78u },  { 257, 0xd0515fbec69efb50u },  { 1024, 0x1fd15e7d36f5e1bcu },
        { 1025, 0xfe08e5a874d23fd2u }, { 5000, 0x853377ef13cec7bdu },
    };
    static unsigned char b[5000];
    for (size_t i = 0; i < sizeof b; i++)
        b[i] = (unsigned char)((uint32_t)(i * 2654435761u) >> 13);
    for (size_t k = 0; k < sizeof known / sizeof *known; k++) {
        size_t n = known[k].bytes;
        KN_CHECK(kn_checksum_of(b, n) == known[k].sum, "of %zu bytes", n);
        for (size_t step = 1; step < 700; step += 13) { /* the same in portions */
            kn_checksum c;
            kn_checksum_begin(&c);
            for (size_t at = 0; at < n; at += step)
                kn_checksum_add(&c, b + at, n - at < step ? n - at : step);
            KN_CHECK(kn_checksum_end(&c) == known[k].sum, "of %zu bytes by %zu", n, step);
        }
    }
}
