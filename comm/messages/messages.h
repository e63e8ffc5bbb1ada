/* comm/messages/messages.h (private): back ends whose ranks exchange messages, on any number of
 * hosts: MPI (mpi_world.h) and TCP (tcp.h). Their common part lies here.
 *
 * A collective is made of exchanges (messages.c): one message to and one from each other rank,
 * where everybody's bytes go to everybody (gathers, reductions), else to one rank and from one, in
 * ceil(log2 N) steps (sums and maxima of scalars, broadcasts, barriers, agreements; sums and maxima
 * take one more where N is no power of two). Each call begins with the exchange of its description,
 * in the same way; bytes move only once all ranks' descriptions are equal. An exchange is waited
 * for by looking, so that it can end for other reasons than its messages: poison, a mismatch, time.
 *
 * Beside them runs a control channel of words, read by waiting ranks (messages_world.c):
 *   poison   an error stands on the sender
 *   left     the sender's world is closed
 *   where    the sender waits for you in this call, and this is how far it is elsewhere
 *   here     the answer: this is how far I am */
#ifndef KNAP_FSDP_COMM_MESSAGES_H
#define KNAP_FSDP_COMM_MESSAGES_H

#include "comm/comm_internal.h"
#include <pthread.h>

enum { KN_WORD_POISON = 1, KN_WORD_LEFT, KN_WORD_WHERE, KN_WORD_HERE };
enum { KN_WORD_FAMILIES = 32 };

typedef struct kn_message_word {
    int32_t what, family, families, unused;
    int64_t launched;  /* here: the number of the last call in the family */
    char text[1024];   /* poison */
    kn_comm_note note; /* where: the call, */
    struct {
        int64_t id, launched;
    } at[KN_WORD_FAMILIES]; /* and the number of the last call in each family */
} kn_message_word;

typedef struct kn_message_world kn_message_world;
typedef struct kn_message_comm kn_message_comm;

/* Bytes for rank j, or from it: they lie j strides further on; none if bytes is 0. */
typedef struct kn_message_side {
    char *at; /* what is sent is only read */
    int64_t stride, bytes;
} kn_message_side;

/* A part of the messages of an exchange. */
typedef struct kn_message_part {
    kn_message_side send, receive;
} kn_message_part;

enum { KN_MESSAGE_PARTS = 2 * KN_COMM_PIECES };
enum { KN_TO_ALL = -1, KN_TO_NONE = -2 };

/* Each message is made of these, one after the other. */
typedef struct kn_message_parts {
    const kn_message_part *part;
    int parts;    /* at most KN_MESSAGE_PARTS */
    int to, from; /* to and from this rank only, KN_TO_ALL: all others, KN_TO_NONE: none */
} kn_message_parts;

/* What part i of p sends to rank j (sends), or receives from it. */
static inline kn_message_side kn_message_at(const kn_message_parts *p, int i, int j, bool sends)
{
    kn_message_side m = sends ? p->part[i].send : p->part[i].receive;
    m.at += j * m.stride;
    return m;
}
/* Bytes of the message to rank j, or of the one from it; 0: there is none. me: this rank. */
int64_t kn_message_bytes(const kn_message_parts *p, int me, int j, bool sends);

/* The differences between back ends. */
typedef struct kn_transport {
    /* Starts the exchanges in parts and waits for all of them; tag orders exchanges of one call.
     * False with an error; the world is broken then. */
    bool (*exchange)(kn_message_comm *c, const kn_comm_call *call, const kn_message_parts *parts,
                     int tag);
    /* Sends a word to rank r of the world; never blocks, gives up silently. */
    void (*tell)(kn_message_world *w, int r, const kn_message_word *word);
    /* Hands arrived words to kn_message_heard; false if an error now stands. Any thread, one at a
     * time. */
    bool (*listen)(kn_message_world *w);
    /* Whether the calling thread may send and read words. */
    bool (*may)(kn_message_world *w);
    /* Whether something of this exchange, from or to rank peer of c, is not done. */
    bool (*open)(kn_message_comm *c, int peer);
    /* Optional: all that rank r of the world sent before it left is here. Without: it is after a
     * moment. */
    bool (*drained)(kn_message_world *w, int r);
} kn_transport;

/* What is known of a rank. */
typedef struct kn_message_peer {
    _Atomic int left;
    kn_comm_note last; /* its last known call */
    int64_t here;      /* its answer to where, in family here_of; -1: none yet */
    double answered;   /* time of its last answer to where */
} kn_message_peer;

/* First member of a back end's world. */
struct kn_message_world {
    const kn_transport *by;
    kn_comm *first; /* the world */
    pthread_t main;
    pthread_mutex_t lock;  /* guards the receiving of words, and peer but for left */
    _Atomic bool told;     /* it was sent to the others */
    _Atomic int loudest;   /* the lowest rank that reported an error; INT32_MAX: none */
    kn_message_peer *peer; /* [size] */
    int here_of;
    double asked; /* time of this rank's last where */
};

/* First member of a back end's communicator. */
struct kn_message_comm {
    kn_comm base;
    kn_message_world *w;
    kn_comm_note *said;  /* [size] */
    const void **source; /* [size] scratch */
    char *room;          /* the others' messages, of room_bytes; taken when needed */
    size_t room_bytes;
    double left_since; /* when this call first saw that a rank it waits for has left; 0: not yet */
    /* How long this exchange has waited, and until when that was counted; after how long it sends
     * where again. */
    double waited, counted, ask;
    /* How long it had waited when it looked for late ranks, 0: not yet; and the time of that. */
    double asked_late, asked_at;
};

enum { KN_TAG_HEADER = 1, KN_TAG_DATA, KN_TAG_RESULT }; /* of exchanges */

/* messages.c: kn_comm_ops.run */
bool kn_message_run(kn_comm *c, const kn_comm_call *call, kn_stream *s);

/* messages_world.c: the fields of a zeroed world of size ranks, and of a communicator; false with
 * an error, and then _end is still due. */
bool kn_message_world_begin(kn_message_world *w, const kn_transport *by, int size);
void kn_message_world_end(kn_message_world *w);
bool kn_message_comm_begin(kn_message_comm *c, int size);
void kn_message_comm_end(kn_message_comm *c);
/* Word of rank r; false if an error now stands. */
bool kn_message_heard(kn_message_world *w, int r, kn_message_word *word);
/* Tells the others of this rank's end, so that they don't take it for a death. */
void kn_message_say_goodbye(kn_message_world *w);
/* True while no known reason keeps rank peer of c from coming to call; false with an error. */
bool kn_message_hopeful(kn_message_comm *c, const kn_comm_call *call, int peer);
/* An exchange of c begins to wait; and goes on, while something of it, as with rank peer, isn't
 * done (moved: a part has been since). False with an error: no known reason may keep the rank from
 * coming to call, nor may it be late: missing for longer than the timeout, and silent when it is
 * asked where it is. One that answers waits itself, for a rank that it will name, and is waited for
 * as long again. */
void kn_message_wait_begin(kn_message_comm *c);
bool kn_message_wait_on(kn_message_comm *c, const kn_comm_call *call, int peer, bool moved);
/* Entries of kn_comm_ops. */
void kn_message_ops_tell(kn_comm *c);
/* Exchanges words for a moment: if several ranks found an error at once, the lowest speaks. */
bool kn_message_ops_speaks(kn_comm *c);
bool kn_message_ops_healthy(kn_comm *c);
bool kn_message_ops_in_step(kn_comm *c, const kn_comm_call *call);
void kn_message_ops_late(kn_comm *c, const kn_comm_call *call, double limit);
#define KN_MESSAGE_OPS                                                                             \
    .run = kn_message_run, .tell = kn_message_ops_tell, .speaks = kn_message_ops_speaks,           \
    .healthy = kn_message_ops_healthy, .in_step = kn_message_ops_in_step,                          \
    .late = kn_message_ops_late

#endif
