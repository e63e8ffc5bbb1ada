/* data/image_file.c: reads one file with an image, of a kind that its first bytes tell. */
#include "data/images_internal.h"
#include "kernels/error_internal.h"
#include "tensor/files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

bool kn_image_fits(kn_image_room *room, int64_t height, int64_t width, int64_t max_pixels)
{
    if (height > 0 && width > 0 && height <= max_pixels / width)
        return true;
    snprintf(room->problem, sizeof room->problem,
             "it has %lld x %lld pixels; the limit is %lld pixels (.max_pixels)", (long long)height,
             (long long)width, (long long)max_pixels);
    return false;
}

static int unusable(kn_image_room *room, const char *why)
{
    snprintf(room->problem, sizeof room->problem, "%s", why);
    return KN_SAMPLE_SKIP;
}

int kn_image_decode(const uint8_t *file, size_t size, int64_t max_pixels, kn_image_room *room,
                    kn_pixels *out)
{
    static const uint8_t png[] = { 0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n' };
    static const uint8_t jpeg[] = { 0xff, 0xd8, 0xff };
    if (size >= sizeof png && memcmp(file, png, sizeof png) == 0)
#ifdef KN_HAVE_PNG
        return kn_png_decode(file, size, max_pixels, room, out);
#else
        return unusable(room, "it is a PNG file, but libpng wasn't found when Knap was built "
                              "(libpng-dev on Debian)");
#endif
    if (size >= sizeof jpeg && memcmp(file, jpeg, sizeof jpeg) == 0)
#ifdef KN_HAVE_JPEG
        return kn_jpeg_decode(file, size, max_pixels, room, out);
#else
        return unusable(room, "it is a JPEG file, but libjpeg wasn't found when Knap was built "
                              "(libjpeg-dev on Debian)");
#endif
    return unusable(room, size == 0 ? "the file is empty" : "it is neither a JPEG nor a PNG file");
}

/* The bytes of a descriptor in the room. What can't be read just now is an error: the run would go
 * on without images that are fine. */
static int read_bytes(int fd, const char *path, int64_t most, kn_image_room *room, size_t *size)
{
    struct stat st;
    if (kn_file_facts(fd, &st) != 0)
        return kn_fail_system("cannot read the image %s: %m", path);
    if (!S_ISREG(st.st_mode))
        return unusable(room, "it is not a regular file");
    if (st.st_size > most)
        return unusable(room, "the file is larger than an image of so many pixels (.max_pixels)");
    uint8_t *to = kn_room_take(room, KN_ROOM_FILE, (size_t)st.st_size);
    if (!to)
        return false;
    ssize_t n = kn_read_at(fd, to, (size_t)st.st_size, 0);
    if (n < 0)
        return kn_fail_system("cannot read the image %s: %m", path);
    *size = (size_t)n;
    return n == st.st_size ? true : unusable(room, "it was truncated meanwhile");
}

int kn_image_file_read(const char *path, int64_t max_pixels, kn_image_room *room, kn_pixels *out)
{
    size_t size = 0;
    int fd = kn_open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
    if (fd < 0 && errno != ENOENT && errno != ENOTDIR)
        return kn_fail_system("cannot open the image %s: %m", path);
    int answer = fd < 0 ? unusable(room, strerror(errno))
                        : read_bytes(fd, path, 8 * max_pixels + (1 << 20), room, &size);
    if (fd >= 0)
        close(fd);
    if (answer == true)
        answer = kn_image_decode(room->at[KN_ROOM_FILE], size, max_pixels, room, out);
    if (answer == KN_SAMPLE_SKIP) {
        char why[KN_PROBLEM];
        memcpy(why, room->problem, sizeof why);
        snprintf(room->problem, sizeof room->problem, "cannot read the image %.250s: %.200s", path,
                 why);
    }
    return answer;
}

kn_tensor *kn_image_read_(const char *path, kn_image_read_options o)
{
    kn_image_room room = { 0 };
    kn_pixels p;
    kn_tensor *t = NULL;
    if (!kn_ok() || !kn_given(path, "kn_image_read", "the path"))
        return NULL;
    if (o.max_pixels < 0 || o.max_pixels > KN_MOST_PIXELS)
        return kn_fail_null("kn_image_read: .max_pixels is %lld, should lie between 1 and 2^32",
                            (long long)o.max_pixels);
    int answer = kn_image_file_read(path, o.max_pixels ? o.max_pixels : KN_MAX_PIXELS, &room, &p);
    if (answer == KN_SAMPLE_SKIP)
        kn_fail("kn_image_read: %s", room.problem);
    else if (answer == true)
        t = kn_pixels_tensor(p);
    kn_room_free(&room);
    return t;
}
