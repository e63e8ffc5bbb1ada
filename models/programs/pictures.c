/* models/programs/pictures.c: SVG is written as text into memory, and the file all or nothing. */
#include "models/programs/pictures.h"
#include "models/programs/chart.h"
#include "kernels/error_internal.h"
#include "models/image.h"
#include "models/tokens/tokens.h"
#include "tensor/files.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- curves ---------------------------------------------------------------------------------- */

bool picture_curves(const char *path, const losses *run)
{
    static const char *const look[][2] = { { "training", "#888" },
                                           { "test", "#06c" },
                                           { "right", "#06c" } };
    chart_line line[LINES];
    page t;
    double most = 0, low = 100, high = 0;
    for (int i = 0; i < LINES; i++) {
        line[i] = run->line[i];
        line[i].name = look[i][0];
        line[i].colour = look[i][1];
        for (int k = 0; k < line[i].count; k++) {
            const double y = line[i].y[k];
            most = i == RIGHT ? most : fmax(most, y);
            low = i == RIGHT ? fmin(low, y) : low;
            high = i == RIGHT ? fmax(high, y) : high;
        }
    }
    const chart loss = { "loss", "epochs", line, LOSSES, .high = chart_round(most) };
    const chart right = { "right test images in %",
                          "epochs",
                          line + RIGHT,
                          1,
                          .low = 10 * floor(low / 10),
                          .high = fmin(100, 10 * ceil((high + 1) / 10)) };
    const double top = chart_height(&loss);
    if (!svg_begin(&t, CHART_WIDTH, top + chart_height(&right)))
        return false;
    chart_draw(t.out, &loss, 0);
    chart_draw(t.out, &right, top);
    return svg_end(&t, path);
}

/* ---- the confusion matrix -------------------------------------------------------------------- */

bool picture_confusion(const char *path, const image_eval *e, const kn_vision_input *in)
{
    enum { NAMES = 130, CELL = 36, SMALL = 12 };
    const int64_t n = e->classes, cell = n <= 30 ? CELL : SMALL;
    const double side = NAMES + (double)(n * cell);
    page t;
    if (!e->confusion)
        return kn_fail("the confusion matrix of %lld classes is too large for a picture",
                       (long long)n);
    if (!svg_begin(&t, side + 20, side + 20))
        return false;
    fprintf(t.out,
            "<text x=\"%d\" y=\"%d\" text-anchor=\"end\" fill=\"#666\">taken for &#8594;</text>"
            "<text x=\"%d\" y=\"%d\" text-anchor=\"end\" fill=\"#666\">its class &#8595;</text>\n",
            NAMES - 6, NAMES - 26, NAMES - 6, NAMES - 8);
    for (int64_t r = 0; r < n; r++) {
        const double at = NAMES + (double)(r * cell) + (double)cell / 2,
                     all = (double)e->of_class[2 * r];
        fprintf(t.out, "<text x=\"%d\" y=\"%.0f\" text-anchor=\"end\" font-size=\"%d\">", NAMES - 6,
                at + 4, cell == CELL ? 12 : 9);
        svg_text(t.out, in->label[r]);
        fprintf(t.out,
                "</text><text transform=\"translate(%.0f,%d) rotate(-90)\" font-size=\"%d\">",
                at + 4, NAMES - 6, cell == CELL ? 12 : 9);
        svg_text(t.out, in->label[r]);
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
    return svg_end(&t, path);
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

/* The grid of images (columns of side pixels and gaps of 2) in parts, each with its two classes. */
static bool captions(const char *path, const char *png, const image_eval *e,
                     const kn_vision_input *in, int64_t width, int64_t height)
{
    const int columns = e->mistakes < ACROSS ? e->mistakes : ACROSS;
    const int rows = (e->mistakes + ACROSS - 1) / ACROSS;
    const double all_wide = (double)(columns * (width + 2) + 2),
                 all_high = (double)(rows * (height + 2) + 2);
    size_t size;
    void *bytes = kn_file_read(png, SIZE_MAX, &size);
    char *code = bytes ? kn_base64_text(bytes, size) : NULL;
    page t;
    kn_host_free(bytes);
    if (!code || !svg_begin(&t, ACROSS * (SHOWN + 10) + 10, rows * (SHOWN + CAPTION) + 10)) {
        kn_host_free(code);
        return false;
    }
    fprintf(t.out,
            "<defs><image id=\"all\" width=\"%.0f\" height=\"%.0f\" "
            "href=\"data:image/png;base64,%s\"/></defs>\n",
            all_wide, all_high, code);
    kn_host_free(code);
    for (int i = 0; i < e->mistakes; i++) {
        const int x = 10 + i % ACROSS * (SHOWN + 10), y = 10 + i / ACROSS * (SHOWN + CAPTION);
        fprintf(t.out,
                "<svg x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" viewBox=\"%lld %lld %lld %lld\">"
                "<use href=\"#all\"/></svg>\n<text x=\"%d\" y=\"%d\" font-weight=\"bold\">",
                x, y, SHOWN, SHOWN, (long long)(2 + i % ACROSS * (width + 2)),
                (long long)(2 + i / ACROSS * (height + 2)), (long long)width, (long long)height, x,
                y + SHOWN + 14);
        svg_text(t.out, in->label[e->worst[i].label]);
        fprintf(t.out, "</text>\n<text x=\"%d\" y=\"%d\" fill=\"#c00\">taken for ", x,
                y + SHOWN + 28);
        svg_text(t.out, in->label[e->worst[i].guess]);
        fprintf(t.out, "</text>\n");
    }
    return svg_end(&t, path);
}

bool picture_mistakes(const char *dir, const image_eval *e, const kn_image_set *set,
                      const kn_vision_input *in, kn_augment augment)
{
    kn_tensor *image[WORST];
    const kn_path png = kn_path_of(dir, "mistakes.png", "");
    page t;
    memset(&augment.normalize, 0, sizeof augment.normalize);
    if (e->mistakes == 0)
        return true;
    if (!page_begin(&t))
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
    bool ok = all && kn_image_save(png.text, all, .columns = ACROSS) &&
              captions(kn_path_of(dir, "mistakes.svg", "").text, png.text, e, in, kn_size(all, 3),
                       kn_size(all, 2));
    kn_loader_free(one);
    kn_scope_end(scope);
    return page_end(&t, kn_path_of(dir, "mistakes.tsv", "").text) && ok;
}
