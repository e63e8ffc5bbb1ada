/* models/programs/pictures.c: SVG is written as text into memory, and the file all or nothing. */
#include "models/programs/pictures.h"
#include "data/data.h"
#include "kernels/error_internal.h"
#include "models/image.h"
#include "state/folder_internal.h"
#include "tensor/files.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ---- text ------------------------------------------------------------------------------------ */

/* A text that grows; open_memstream's. */
typedef struct text {
    FILE *out;
    char *data;
    size_t size;
} text;

static bool text_begin(text *t)
{
    *t = (text){ 0 };
    return (t->out = open_memstream(&t->data, &t->size)) || kn_fail("no memory for a picture");
}

/* Writes it to path, and frees it. */
static bool text_end(text *t, const char *path)
{
    bool ok = fclose(t->out) == 0 || kn_fail("no memory for %s", path);
    ok = ok && kn_file_write(path, (const void *[]){ t->data }, (size_t[]){ t->size }, 1);
    free(t->data);
    return ok;
}

/* A label inside XML; kn_vision_label took out what XML can't hold. */
static void put_name(FILE *out, const char *name)
{
    for (; *name; name++) {
        if (strchr("<>&\"'", *name))
            fprintf(out, "&#%d;", *name);
        else
            fputc(*name, out);
    }
}

static void svg_begin(FILE *out, double width, double height)
{
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" "
            "font-family=\"sans-serif\" font-size=\"12\">\n"
            "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
            width, height);
}

/* ---- curves ---------------------------------------------------------------------------------- */

enum { WIDTH = 640, HEIGHT = 240, LEFT = 60, TOP = 30, BOTTOM = 40, RIGHT = 60, LINES = 5 };

/* A panel with round numbers on the left, and epochs below. */
typedef struct panel {
    FILE *out;
    double top, low, high, from, to; /* values, epochs */
} panel;

static double across(const panel *p, double epoch)
{
    const double part = p->to > p->from ? (epoch - p->from) / (p->to - p->from) : 0.5;
    return LEFT + part * (WIDTH - LEFT - RIGHT);
}

static double down(const panel *p, double value)
{
    const double part = p->high > p->low ? (value - p->low) / (p->high - p->low) : 0.5;
    return p->top + TOP + (1 - part) * (HEIGHT - TOP - BOTTOM);
}

/* 1, 2 or 5 times a power of ten, at most LINES of which make the range. */
static double round_step(double range)
{
    double step = range > 0 ? pow(10, floor(log10(range / LINES))) : 1;
    for (int i = 0; range > LINES * step; i++)
        step *= i % 3 == 1 ? 2.5 : 2;
    return step;
}

static void frame(const panel *p, const char *title)
{
    const double values = round_step(p->high - p->low), epochs = round_step(p->to - p->from);
    fprintf(p->out, "<text x=\"%d\" y=\"%.0f\" font-weight=\"bold\">%s</text>\n", LEFT, p->top + 20,
            title);
    for (int i = 0; p->low + i * values <= p->high + values / 1e6; i++) {
        const double v = p->low + i * values;
        fprintf(p->out,
                "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>"
                "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.4g</text>\n",
                LEFT, WIDTH - RIGHT, down(p, v), down(p, v), LEFT - 6, down(p, v) + 4, v);
    }
    for (int i = 0; p->from + i * epochs <= p->to + epochs / 1e6; i++)
        fprintf(p->out, "<text x=\"%.1f\" y=\"%.0f\" text-anchor=\"middle\">%.4g</text>\n",
                across(p, p->from + i * epochs), p->top + HEIGHT - BOTTOM + 18,
                p->from + i * epochs);
    fprintf(p->out, "<text x=\"%d\" y=\"%.0f\" text-anchor=\"end\">epochs</text>\n", WIDTH - RIGHT,
            p->top + HEIGHT - BOTTOM + 34);
}

/* One line, with the last value at its end, lower by shift; field: where the value lies in a
 * curve_point. */
static void curve(const panel *p, const curve_point *point, int n, size_t field, const char *colour,
                  const char *name, int place, double shift)
{
    double x = 0, y = 0, v = 0;
    fprintf(p->out, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\" points=\"", colour);
    for (int i = 0; i < n; i++) {
        memcpy(&v, (const char *)&point[i] + field, sizeof v);
        x = across(p, point[i].epoch), y = down(p, v);
        fprintf(p->out, "%.1f,%.1f ", x, y);
    }
    fprintf(p->out,
            "\"/>\n<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>"
            "<text x=\"%.1f\" y=\"%.1f\" fill=\"%s\">%.4g</text>\n"
            "<text x=\"%d\" y=\"%.0f\" fill=\"%s\">%s</text>\n",
            x, y, colour, x + 6, y + 4 + shift, colour, v, LEFT + 200 + place, p->top + 20, colour,
            name);
}

bool picture_curves(const char *path, const curve_point *point, int n)
{
    text t;
    if (!text_begin(&t))
        return false;
    panel loss = { t.out, 0, 0, 0, 0, 0 }, right = { t.out, HEIGHT, 100, 0, 0, 0 };
    for (int i = 0; i < n; i++) {
        loss.high = fmax(loss.high, fmax(point[i].train_loss, point[i].val_loss));
        loss.to = right.to = fmax(loss.to, point[i].epoch);
        right.low = fmin(right.low, point[i].accuracy);
        right.high = fmax(right.high, point[i].accuracy);
    }
    const double losses = round_step(loss.high);
    loss.high = ceil(loss.high / losses) * losses;
    right.low = 10 * floor(right.low / 10);
    right.high = fmin(100, 10 * ceil((right.high + 1) / 10));
    svg_begin(t.out, WIDTH, 2 * HEIGHT);
    frame(&loss, "loss");
    /* numbers of neighbours would cover each other */
    const curve_point end = n > 0 ? point[n - 1] : (curve_point){ 0 };
    const double far = down(&loss, end.val_loss) - down(&loss, end.train_loss);
    const double shift = fabs(far) < 12 ? copysign((12 - fabs(far)) / 2, far) : 0;
    curve(&loss, point, n, offsetof(curve_point, train_loss), "#888", "training", 0, -shift);
    curve(&loss, point, n, offsetof(curve_point, val_loss), "#06c", "test", 80, shift);
    frame(&right, "right test images in %");
    curve(&right, point, n, offsetof(curve_point, accuracy), "#06c", "", 80, 0);
    fprintf(t.out, "</svg>\n");
    return text_end(&t, path);
}

/* ---- the confusion matrix -------------------------------------------------------------------- */

bool picture_confusion(const char *path, const image_eval *e, const kn_vision_input *in)
{
    enum { NAMES = 130, CELL = 36, SMALL = 12 };
    const int64_t n = e->classes, cell = n <= 30 ? CELL : SMALL;
    const double side = NAMES + (double)(n * cell);
    text t;
    if (!e->confusion)
        return kn_fail("the confusion matrix of %lld classes is too large for a picture",
                       (long long)n);
    if (!text_begin(&t))
        return false;
    svg_begin(t.out, side + 20, side + 20);
    fprintf(t.out,
            "<text x=\"%d\" y=\"%d\" text-anchor=\"end\" fill=\"#666\">taken for &#8594;</text>"
            "<text x=\"%d\" y=\"%d\" text-anchor=\"end\" fill=\"#666\">its class &#8595;</text>\n",
            NAMES - 6, NAMES - 26, NAMES - 6, NAMES - 8);
    for (int64_t r = 0; r < n; r++) {
        const double at = NAMES + (double)(r * cell) + (double)cell / 2,
                     all = (double)e->of_class[2 * r];
        fprintf(t.out, "<text x=\"%d\" y=\"%.0f\" text-anchor=\"end\" font-size=\"%d\">", NAMES - 6,
                at + 4, cell == CELL ? 12 : 9);
        put_name(t.out, in->label[r]);
        fprintf(t.out,
                "</text><text transform=\"translate(%.0f,%d) rotate(-90)\" font-size=\"%d\">",
                at + 4, NAMES - 6, cell == CELL ? 12 : 9);
        put_name(t.out, in->label[r]);
        fprintf(t.out, "</text>\n");
        for (int64_t c = 0; c < n; c++) {
            const int64_t count = e->confusion[r * n + c];
            const double part = all > 0 ? (double)count / all : 0;
            fprintf(t.out,
                    "<rect x=\"%lld\" y=\"%lld\" width=\"%lld\" height=\"%lld\" fill=\"%s\" "
                    "fill-opacity=\"%.3f\" stroke=\"#eee\"/>",
                    (long long)(NAMES + c * cell), (long long)(NAMES + r * cell), (long long)cell,
                    (long long)cell, r == c ? "#06c" : "#c00", sqrt(part));
            if (cell == CELL && count > 0)
                fprintf(t.out,
                        "<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"middle\" font-size=\"10\" "
                        "fill=\"%s\">%lld</text>",
                        NAMES + (double)(c * cell) + (double)cell / 2, at + 4,
                        part > 0.5 ? "white" : "black", (long long)count);
        }
        fprintf(t.out, "\n");
    }
    fprintf(t.out, "</svg>\n");
    return text_end(&t, path);
}

/* ---- images ---------------------------------------------------------------------------------- */

/* x[N,C,H,W], each pixel as a square of pixels so that small images can be seen. */
static kn_tensor *enlarged(kn_tensor *x)
{
    enum { SEEN = 96 };
    const int64_t side = x ? kn_size(x, 3) : SEEN,
                  times = side < SEEN ? (SEEN + side - 1) / side : 1;
    return times > 1 ? kn_interpolate(x, .sizes = { kn_size(x, 2) * times, side * times }) : x;
}

bool picture_grid(const char *path, kn_tensor *x, int64_t columns)
{
    x = enlarged(x);
    return x && kn_image_save(path, x, .columns = columns);
}

/* ---- the worst mistakes ---------------------------------------------------------------------- */

enum { ACROSS = 4, SHOWN = 144, CAPTION = 44 };

/* The PNG at path as text that an SVG can hold. */
static bool put_base64(FILE *out, const char *path)
{
    static const char digit[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    FILE *in = fopen(path, "rb");
    unsigned char b[3];
    size_t n;
    if (!in)
        return kn_fail("cannot read %s again", path);
    while ((n = fread(b, 1, 3, in)) > 0) {
        const unsigned v = (unsigned)b[0] << 16 | (n > 1 ? b[1] << 8 : 0) | (n > 2 ? b[2] : 0);
        fprintf(out, "%c%c%c%c", digit[v >> 18], digit[v >> 12 & 63],
                n > 1 ? digit[v >> 6 & 63] : '=', n > 2 ? digit[v & 63] : '=');
    }
    const bool ok = !ferror(in) || kn_fail("cannot read %s again", path);
    fclose(in);
    return ok;
}

/* The grid of images (columns of side pixels and gaps of 2) in parts, each with its two classes. */
static bool captions(const char *path, const char *png, const image_eval *e,
                     const kn_vision_input *in, int64_t width, int64_t height)
{
    const int columns = e->mistakes < ACROSS ? e->mistakes : ACROSS;
    const int rows = (e->mistakes + ACROSS - 1) / ACROSS;
    const double all_wide = (double)(columns * (width + 2) + 2),
                 all_high = (double)(rows * (height + 2) + 2);
    text t;
    if (!text_begin(&t))
        return false;
    svg_begin(t.out, ACROSS * (SHOWN + 10) + 10, rows * (SHOWN + CAPTION) + 10);
    fprintf(t.out,
            "<defs><image id=\"all\" width=\"%.0f\" height=\"%.0f\" href=\"data:image/png;base64,",
            all_wide, all_high);
    const bool ok = put_base64(t.out, png);
    fprintf(t.out, "\"/></defs>\n");
    for (int i = 0; i < e->mistakes; i++) {
        const int x = 10 + i % ACROSS * (SHOWN + 10), y = 10 + i / ACROSS * (SHOWN + CAPTION);
        fprintf(t.out,
                "<svg x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" viewBox=\"%lld %lld %lld %lld\">"
                "<use href=\"#all\"/></svg>\n<text x=\"%d\" y=\"%d\" font-weight=\"bold\">",
                x, y, SHOWN, SHOWN, (long long)(2 + i % ACROSS * (width + 2)),
                (long long)(2 + i / ACROSS * (height + 2)), (long long)width, (long long)height, x,
                y + SHOWN + 14);
        put_name(t.out, in->label[e->worst[i].label]);
        fprintf(t.out, "</text>\n<text x=\"%d\" y=\"%d\" fill=\"#c00\">taken for ", x,
                y + SHOWN + 28);
        put_name(t.out, in->label[e->worst[i].guess]);
        fprintf(t.out, "</text>\n");
    }
    fprintf(t.out, "</svg>\n");
    return text_end(&t, path) && ok;
}

/* DIR/mistakes and an ending. */
static const char *mistakes_at(const char *dir, const char *ending, char path[4096])
{
    snprintf(path, 4096, "%s/mistakes.%s", dir, ending);
    return path;
}

bool picture_mistakes(const char *dir, const image_eval *e, const kn_image_set *set,
                      const kn_vision_input *in, kn_augment augment)
{
    kn_tensor *image[WORST];
    char path[4096], png[4096];
    text t;
    memset(&augment.normalize, 0, sizeof augment.normalize);
    if (e->mistakes == 0)
        return true;
    if (!text_begin(&t))
        return false;
    kn_scope scope = kn_scope_begin();
    /* a loader: it gives the image that took a bad one's place in the evaluation, too */
    kn_loader *one = kn_image_loader(set, NULL, .batch = 1, .augment = augment);
    fprintf(t.out, "image\tits class\ttaken for\tloss\n");
    for (int i = 0; i < e->mistakes && kn_ok(); i++) {
        const mistake *m = &e->worst[i];
        kn_loader_seek(one, m->index);
        image[i] = kn_next(one).x;
        fprintf(t.out, "%lld\t%s\t%s\t%.3f\n", (long long)m->index, in->label[m->label],
                in->label[m->guess], m->loss);
    }
    kn_tensor *all = kn_ok() ? enlarged(kn_cat(image, e->mistakes, 0)) : NULL;
    bool ok = all && kn_image_save(mistakes_at(dir, "png", png), all, .columns = ACROSS) &&
              captions(mistakes_at(dir, "svg", path), png, e, in, kn_size(all, 3), kn_size(all, 2));
    kn_loader_free(one);
    kn_scope_end(scope);
    return text_end(&t, mistakes_at(dir, "tsv", path)) && ok;
}

bool picture_folder(const char *dir)
{
    struct stat st;
    if (dir && !kn_folder_outside(dir))
        return false;
    if (!dir || KN_AGAIN(mkdir(dir, 0777)) == 0)
        return true;
    if (errno != EEXIST)
        return kn_fail_system("--pictures %s: cannot make the folder: %m", dir);
    return (kn_look(dir, &st) > 0 && S_ISDIR(st.st_mode)) ||
           kn_fail("--pictures %s: a file that is no folder lies there", dir);
}
