/* models/programs/pictures.c: SVG is written as text into memory, and the file all or nothing. */
#include "models/programs/pictures.h"
#include "data/data.h"
#include "kernels/error.h"
#include "models/image.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

enum { WIDTH = 640, HEIGHT = 240, LEFT = 60, TOP = 30, BOTTOM = 40, RIGHT = 20 };

/* A panel with a frame, its range on the left and epochs below. */
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

static void frame(const panel *p, const char *title)
{
    fprintf(p->out, "<text x=\"%d\" y=\"%.0f\" font-weight=\"bold\">%s</text>\n", LEFT, p->top + 20,
            title);
    for (int i = 0; i <= 4; i++) {
        const double v = p->low + (p->high - p->low) * i / 4;
        const double e = p->from + (p->to - p->from) * i / 4;
        fprintf(p->out,
                "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>"
                "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.4g</text>"
                "<text x=\"%.1f\" y=\"%.0f\" text-anchor=\"middle\">%.3g</text>\n",
                LEFT, WIDTH - RIGHT, down(p, v), down(p, v), LEFT - 6, down(p, v) + 4, v,
                across(p, e), p->top + HEIGHT - BOTTOM + 18, e);
    }
    fprintf(p->out, "<text x=\"%d\" y=\"%.0f\" text-anchor=\"end\">epochs</text>\n", WIDTH - RIGHT,
            p->top + HEIGHT - BOTTOM + 34);
}

/* One line; field: where the value lies in a curve_point. */
static void curve(const panel *p, const curve_point *point, int n, size_t field, const char *colour,
                  const char *name, int place)
{
    fprintf(p->out, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\" points=\"", colour);
    for (int i = 0; i < n; i++) {
        double v;
        memcpy(&v, (const char *)&point[i] + field, sizeof v);
        fprintf(p->out, "%.1f,%.1f ", across(p, point[i].epoch), down(p, v));
    }
    fprintf(p->out, "\"/>\n<text x=\"%d\" y=\"%.0f\" fill=\"%s\">%s</text>\n", LEFT + 200 + place,
            p->top + 20, colour, name);
}

bool picture_curves(const char *path, const curve_point *point, int n)
{
    text t;
    if (!text_begin(&t))
        return false;
    panel loss = { t.out, 0, 0, 0, 0, 0 };
    for (int i = 0; i < n; i++) {
        loss.high = fmax(loss.high, fmax(point[i].train_loss, point[i].val_loss));
        loss.to = fmax(loss.to, point[i].epoch);
    }
    panel right = { t.out, HEIGHT, 0, 100, 0, loss.to };
    svg_begin(t.out, WIDTH, 2 * HEIGHT);
    frame(&loss, "loss");
    curve(&loss, point, n, offsetof(curve_point, train_loss), "#888", "training", 0);
    curve(&loss, point, n, offsetof(curve_point, val_loss), "#06c", "validation", 80);
    frame(&right, "right, in per cent");
    curve(&right, point, n, offsetof(curve_point, accuracy), "#06c", "validation", 80);
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
                        "<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"middle\" font-size=\"10\">%lld"
                        "</text>",
                        NAMES + (double)(c * cell) + (double)cell / 2, at + 4, (long long)count);
        }
        fprintf(t.out, "\n");
    }
    fprintf(t.out, "</svg>\n");
    return text_end(&t, path);
}

/* ---- the worst mistakes ---------------------------------------------------------------------- */

bool picture_mistakes(const char *path, const char *text_path, const image_eval *e,
                      const kn_image_set *set, const kn_vision_input *in, kn_augment augment)
{
    kn_tensor *image[WORST];
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
    kn_tensor *all = kn_ok() ? kn_cat(image, e->mistakes, 0) : NULL;
    bool ok = all && kn_image_save(path, all, .columns = 4);
    kn_loader_free(one);
    kn_scope_end(scope);
    return text_end(&t, text_path) && ok;
}
