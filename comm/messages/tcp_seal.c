/* comm/messages/tcp_seal.c: who speaks at a meeting knows the job's key, and doesn't say it
 * (tcp.h).
 *
 * A seal is a keyed hash: SHA-256-crypt, which every Linux C library brings, of the message and the
 * key. It is made for passwords, so that it is slow (about half a millisecond): good against
 * guessing names of jobs, and paid a few times a rank. It says nothing about what is sent later:
 * the network must be trusted. */
#include "comm/messages/tcp.h"
#include <crypt.h>
#include <stdio.h>
#include <string.h>

#define SETTING "$5$rounds=1000$knap$"

bool kn_tcp_seal(const char *key, char kind, const uint64_t *word, int words, char *seal)
{
    char phrase[512];
    struct crypt_data *room = kn_host_calloc(1, sizeof *room);
    int n = snprintf(phrase, sizeof phrase, "%c", kind);
    for (int i = 0; i < words; i++)
        n += snprintf(phrase + n, sizeof phrase - (size_t)n, " %llx", (unsigned long long)word[i]);
    n += snprintf(phrase + n, sizeof phrase - (size_t)n, ":%s", key);
    const char *made = room && n < (int)sizeof phrase ? crypt_r(phrase, SETTING, room) : NULL;
    bool ok = made && strlen(made) == strlen(SETTING) + KN_TCP_SEAL - 1;
    if (ok)
        memcpy(seal, made + strlen(SETTING), KN_TCP_SEAL);
    kn_host_free(room);
    return ok ||
           kn_fail(
               "rendezvous: this system's crypt(3) has no SHA-256, which ranks know each other by");
}

bool kn_tcp_sealed(const char *key, char kind, const uint64_t *word, int words, const char *seal)
{
    char want[KN_TCP_SEAL];
    unsigned differ = 0;
    if (!kn_tcp_seal(key, kind, word, words, want))
        return false;
    for (int i = 0; i < KN_TCP_SEAL; i++) /* takes as long wherever they differ */
        differ |= (unsigned)(unsigned char)(want[i] ^ seal[i]);
    return differ == 0;
}
